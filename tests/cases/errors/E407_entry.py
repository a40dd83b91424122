from pathlib import Path

from optgen.driver.project import read_config

FILES = {"pyproject.toml": '[tool.optgen]\nmath = "fast"\n'}


def case():
    read_config(Path.cwd())
