"""An override of a state that no rule of the project has, and none of the ready-made."""

from optgen.driver.load import find_plan

FILES = {
    "specs/plans.py": """from optgen.formats import Blocked, LogMinMax, Plan, floats

mine = Plan("8-bit moments.", signed=Blocked(), nonneg=LogMinMax(), overrides={"exp_avgg": floats.bf16})
""",
}


def case() -> None:
    find_plan("mine")
