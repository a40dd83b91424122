from optgen.driver.load import find_spec

FILES = {"specs/broken.py": "from optgen.lang import hyper\n\nlr = hypr(1e-3)\n"}


def case():
    find_spec("specs/broken.py")
