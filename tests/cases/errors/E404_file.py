from optgen.driver.load import find_spec

FILES = {"rules/mine.py": ""}


def case():
    find_spec("rules/mien.py")
