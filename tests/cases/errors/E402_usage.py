from optgen.driver.load import find_spec

FILES = {"specs/broken.py": "from optgen.lang import hyper\n\nrate = hyper(1e-3, min=0)\n"}


def case():
    find_spec("specs/broken.py")
