"""The packages that the command line needs, which generated optimizers do without."""

EXTRAS = {"typer": "compiler", "rich": "compiler", "hypothesis": "fuzz"}
"""Packages, with the extra of optgen that installs them. torch itself brings SymPy and Jinja."""


def advice(error: ModuleNotFoundError) -> str | None:
    """Return how to install the module that was not found, or None if it belongs to no extra."""
    name = (error.name or "").partition(".")[0]
    return f"{name}, which this needs: pip install 'optgen[{EXTRAS[name]}]'" if name in EXTRAS else None
