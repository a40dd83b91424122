from optgen.driver.cli import _flags
from optgen.driver.load import find_spec


def case():
    _flags(find_spec("lion"), ["amsgrad"])
