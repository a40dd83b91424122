from optgen.driver.new import new

FILES = {"specs/mine.py": ""}


def case():
    new("../mine")
