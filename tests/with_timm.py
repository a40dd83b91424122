"""Tests of generated optimizers under timm itself: `python -m tests.with_timm`, run by test_frameworks.

timm and torchvision are taken from the environment, or from its folder `FOLDER`, into which `make setup` puts them.
"""

import importlib
import importlib.util
import inspect
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

FOLDER = Path(sys.prefix) / "frameworks"

LIBRARIES: list[Any] = []
"""Kept: operators end with the library that defined them."""


def missing() -> str | None:
    """A package that is not here; None: all are."""
    for name in ("timm", "torchvision"):
        if importlib.util.find_spec(name) is None and not (FOLDER / name).is_dir():
            return name
    return None


def add_torchvision() -> None:
    """Make torchvision importable.  Where its library is for another build of torch, it stops when it looks up its
    operators: their names are defined first then.  Nothing here calls them."""
    sys.path.append(str(FOLDER))
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # only then: a library that fits defines them itself, and must be the first to do it
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        LIBRARIES.append(library)


def prepared() -> ModuleType:
    """Return the example."""
    add_torchvision()
    from tests.test_frameworks import example

    return example("timm_groups")


def stopped_and_resumed(example: ModuleType) -> None:
    """By timm's own saver: bit for bit one run."""
    from timm.models import resume_checkpoint
    from timm.utils import CheckpointSaver

    from tests.test_frameworks import same_weights
    from tests.training import alike

    whole, part, rest = example.network(), example.network(), example.network()
    ends = example.optimizer(whole)
    example.train(whole, ends, 0, 8)
    stopped = example.optimizer(part)
    example.train(part, stopped, 0, 4)
    with tempfile.TemporaryDirectory() as folder:
        CheckpointSaver(part, stopped, checkpoint_dir=folder, recovery_dir=folder).save_checkpoint(4)
        resumed = example.optimizer(rest)
        epoch = resume_checkpoint(rest, f"{folder}/last.pth.tar", resumed, log_info=False)
    assert epoch == 5  # the one after that which was saved
    assert alike(stopped.state_dict(), resumed.state_dict())
    example.train(rest, resumed, 4, 8)
    assert same_weights(whole, rest)
    assert alike(ends.state_dict(), resumed.state_dict())
    assert torch.uint8 in {v.dtype for kept in ends.state.values() for v in kept.values() if isinstance(v, Tensor)}


def beside_torchs(example: ModuleType) -> None:
    """Groups with a decay of rates and a schedule, and the first step of the AdamW of torch that timm makes."""
    model, other = example.network(), example.network()
    ours = example.optimizer(model, plan="fp32", betas=(0.9, 0.999))
    theirs = example.optimizer(other, "adamw")
    assert type(theirs) is torch.optim.AdamW
    assert [group["lr_scale"] for group in ours.param_groups] == [group["lr_scale"] for group in theirs.param_groups]
    assert len({group["lr_scale"] for group in ours.param_groups}) > 2
    example.train(model, ours, 4, 5)
    example.train(other, theirs, 4, 5)
    pairs = dict(zip(model.parameters(), other.parameters(), strict=True))
    for group, like in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert group["lr"] == like["lr"] > 0
        for p in group["params"]:
            # The first step is lr * (about the sign of g): an update of at most lr, whose ten-odd roundings are half
            # an ulp each in both, and two roundings of the weight.
            slack = 2 * 16 * 2**-24 * group["lr"] + 4 * 2**-24 * p.detach().abs()
            assert ((p - pairs[p]).abs() <= slack).all()


def other_rules(example: ModuleType) -> None:
    """Rules under their default names, of which one has no eps and one three betas."""
    from optgen.by_name import class_of
    from optgen.integrations.timm import register

    for rule in ("muon", "came"):
        model, start = example.network(), example.network()
        made = example.optimizer(model, register(rule, plan="int8_split24"))
        assert type(made) is class_of(rule), type(made)
        assert "int8_split24" in str(made.plans().values())
        example.train(model, made, 4, 6)
        pairs = zip(model.parameters(), start.parameters(), strict=True)
        assert all(a.isfinite().all() and not torch.equal(a, b) for a, b in pairs)


def all_rules(example: ModuleType) -> None:
    """timm gives weight_decay, 0 by default, to every class; a rule without decay refuses another, in a group too."""
    from timm.optim import create_optimizer_v2

    import optgen
    from optgen.by_name import class_of
    from optgen.integrations.timm import register

    model = example.network()
    for rule in optgen.list_rules():
        name, decays = register(rule, plan="fp32"), "weight_decay" in inspect.signature(class_of(rule)).parameters
        made = create_optimizer_v2(model, name, lr=1e-3)
        assert isinstance(made, class_of(rule)), rule
        for filtered in (True, False):
            refused = pytest.raises(ValueError, match=r"has no weight decay, got weight_decay=0\.1: leave it at 0")
            with nullcontext() if decays else refused:
                create_optimizer_v2(model, name, lr=1e-3, weight_decay=0.1, filter_bias_and_bn=filtered)


CHECKS = {x.__name__: x for x in (stopped_and_resumed, beside_torchs, other_rules, all_rules)}


def main() -> None:
    torch.set_num_threads(1)  # as in tests/conftest.py: threads that wait for one another take five times the work
    made = prepared()
    for name, check in CHECKS.items():
        check(made)
        print(f"ok {name}")


if __name__ == "__main__":
    main()
