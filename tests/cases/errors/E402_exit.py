from optgen.driver.load import find_spec

FILES = {"specs/broken.py": "import sys\n\nsys.exit()\n"}


def case():
    find_spec("specs/broken.py")
