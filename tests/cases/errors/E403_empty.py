from optgen.driver.load import find_spec

FILES = {"specs/helpers.py": "HALF = 0.5\n"}


def case():
    find_spec("specs/helpers.py")
