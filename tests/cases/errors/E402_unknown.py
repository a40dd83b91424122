from optgen.driver.load import find_spec

FILES = {"specs/broken.py": "from optgen.lang import softplus, sqrt\n"}


def case():
    find_spec("specs/broken.py")
