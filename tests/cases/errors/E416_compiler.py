from unittest import mock

from optgen.driver.ahead import compile_ahead
from optgen.runtime.cpu import native


def case():
    with mock.patch.object(native, "load", lambda jobs, quiet: [native.Unavailable("there is no C++ compiler")]):
        compile_ahead([native.Job("k", "")], lambda items, total: items)
