from pathlib import Path

from optgen.driver.load import find_spec

FILES = {"specs/latin.py": ""}


def case():
    Path("specs/latin.py").write_bytes("# née Adam\n".encode("latin-1"))
    find_spec("specs/latin.py")
