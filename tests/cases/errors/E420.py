from pathlib import Path

from optgen.driver.replay import replay

FILES = {"step.pt": '{"__metadata__": {}}'}


def case():
    replay("step.pt", None, None, None)
