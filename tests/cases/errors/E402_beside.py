from optgen.driver.load import find_spec

FILES = {"specs/_shared.py": "", "specs/broken.py": "from specs._sharde import root\n"}


def case():
    find_spec("specs/broken.py")
