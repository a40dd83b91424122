from optgen.driver.load import find_spec

FILES = {"specs/broken.py": "from optgen.lang import state\n\nL = state(shape=(4, 4))\n"}


def case():
    find_spec("specs/broken.py")
