"""A plan of the project under the name of a ready-made one: groups and checkpoints know plans by their names."""

from optgen.driver.load import find_plan

FILES = {
    "specs/plans.py": """from optgen.formats import LogMinMax, Plan

int8 = Plan("4-bit second moments.", nonneg=LogMinMax(4))
""",
}


def case() -> None:
    find_plan("int8")
