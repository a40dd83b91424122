from optgen.driver.new import new

FILES = {"specs/mine.py": "HALF = 0.5\n"}


def case():
    new("mine")
