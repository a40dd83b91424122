from optgen.driver.load import find_spec

FILES = {"specs/broken.py": "from ._shared import root\n"}


def case():
    find_spec("specs/broken.py")
