"""torchtitan's container of optimizers, replaced by `optgen.integrations.torchtitan.Container`: groups by names of
parameters are then tested on our classes."""

import importlib
import os
import sys
from typing import Any

from tests.others import Suite


def install(plan: str) -> None:
    sys.path.insert(0, os.environ["OPTGEN_OTHERS_CHECKOUT"])
    titan: Any = importlib.import_module("torchtitan.components.optimizer")
    container = importlib.import_module("optgen.integrations.torchtitan").Container
    default = titan.default_adamw
    titan.default_adamw = lambda *a, **options: container.Config(param_groups=default(*a, **options).param_groups)
    titan.OptimizersContainer = container


SUITES = [
    Suite(
        plan="int8_split24",
        folder="tests/unit_tests",
        files=("test_optimizer_param_groups.py",),
        rewrites={r"torch\.optim\.": "__import__('optgen').optim."},
    )
]
