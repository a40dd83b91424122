from pathlib import Path

from optgen.driver.load import load

FILES = {"specs/mine.py/helper.py": ""}


def case():
    load(Path("specs/mine.py"))
