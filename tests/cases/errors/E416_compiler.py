from optgen.driver.ahead import compile_ahead
from optgen.runtime import native


def case():
    native.load = lambda jobs: [native.Unavailable("there is no C++ compiler")]
    compile_ahead([native.Job("k", "")], lambda items, total: items)
