from optgen.driver.load import find_spec

FILES = {"specs/broken.py": "from optgen.lang import optimizer\n\ndef broken(p, g:\n    return p\n"}


def case():
    find_spec("specs/broken.py")
