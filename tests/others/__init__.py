"""Tests that other packages have of their own, run on optgen's classes: `python -m tests.others DIR [NAME ...]`.

Nothing of the packages is kept here.  DIR has a checkout of each, and PYTHONPATH what its tests import:

    git clone https://github.com/databricks/flashoptim
    git clone https://github.com/NVIDIA-NeMo/Emerging-Optimizers emerging     # absl-py
    git clone https://github.com/pytorch/torchtitan                           # what it requires
    git clone https://github.com/huggingface/pytorch-image-models timm        # what it requires

A module of this folder is a package.  It has `SUITES`, `FILES_LEFT_OUT` (a reason, "ours: ..." or "theirs: ...", -> the
files of tests in the suites' folders that none of them runs), and if it must, a function `install(plan)`, which
replaces what the tests import by classes of optgen before any of them is collected.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Suite:
    """Test files of a package, copied from `folder` of its checkout, to be run by pytest under a plan.

    rewrites   regular expressions and their replacements in all Python files of the copy: devices, names
    failing    regular expression of tests that fail -> "ours: ..." or "theirs: ...", the reason
    left_out   regular expression of tests that are not run -> "ours: ..." or "theirs: ...", the reason
    environ    further variables of the process; without, kernels are eager and Triton's interpreted
    ranks      processes that run the tests together, over gloo: a test passes if it does on each

    Expressions are searched in names as pytest writes them, `test_file.py::test[parameters]`; the first one counts.
    """

    plan: str
    folder: str
    files: tuple[str, ...]
    rewrites: Mapping[str, str] = field(default_factory=dict)
    failing: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""
    ranks: int = 1

    @property
    def name(self) -> str:
        """The plan, and a word more where a package has several suites of one plan."""
        return f"{self.plan}, {self.kind}" if self.kind else self.plan
