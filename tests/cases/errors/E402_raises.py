from optgen.driver.load import find_spec

FILES = {"specs/broken.py": "import math\n\nHALF = math.sqroot(0.25)\n"}


def case():
    find_spec("specs/broken.py")
