"""Files of damaged content: what is loaded is what stands there, or it is refused and nothing has changed.

Daily runs draw the same damage each time, `--hypothesis-profile=full` draws new one.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from optgen import cast_model, load_checkpoint, save_checkpoint
from optgen.optim import CAME, AdamW
from optgen.runtime import files
from optgen.runtime.checkpoint import container
from tests.training import everything, train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(79, 52, bias=False), nn.Linear(52, 7, bias=False)


PARTS = ("optimizer", "model")
"""What is damaged of a content: the rest is what save_checkpoint alone writes."""


def ready(cls: Any, plan: str, steps: int, seed: int = 0) -> tuple[nn.Module, Any]:
    """A model and its optimizer in two groups after so many steps."""
    model = cast_model(Net(), torch.bfloat16)
    named = list(model.named_parameters())
    opt = cls([{"params": named[:1]}, {"params": named[1:], "lr": 2e-3}], lr=1e-2, plan=plan, seed=seed)
    train(opt, range(steps))
    return model, opt


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in nested dicts and lists."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def junk(drawn: random.Random, value: Any) -> Any:
    """Something else in the place of a value."""
    tensors = [
        torch.zeros(()), torch.zeros(0), torch.full((3, 2), math.nan), torch.zeros(2, 2, device="meta"),
        torch.eye(3).to_sparse(), torch.zeros(3, dtype=torch.complex64), torch.ones(1) > 0,
    ]  # fmt: skip
    if not isinstance(value, Tensor) or value.is_sparse or value.is_meta:
        return drawn.choice([
            None, "int8_split24", -1, 0, 2**70, 1.5, math.nan, -math.inf, True, b"\0", 1j, [], {}, (0.9,), {1}, object,
            [[value]], {"a": value}, *tensors,
        ])  # fmt: skip
    value = value.detach()
    dtype = drawn.choice((torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64))
    likely = [
        value.to(dtype), value.flatten(), value[None], value.flip(0) if value.ndim else value, value * 3,
        value.t() if value.ndim == 2 else value[None], value[:-1] if value.ndim else value, value.to("meta"),
        torch.cat([value, value[:1]]) if value.ndim else value, value.clone().requires_grad_(value.is_floating_point()),
        flipped(drawn, value), torch.full_like(value, drawn.choice((0, 1, 127))),
    ]  # fmt: skip
    return drawn.choice([*tensors, *likely, *likely])


def flipped(drawn: random.Random, value: Tensor) -> Tensor:
    """One bit of it is another."""
    data = bytearray(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if data:
        data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
    return torch.frombuffer(data, dtype=value.dtype).view(value.shape) if data else value


def damage(drawn: random.Random, content: Any, other: Any) -> None:
    """One to three changes of a nested dict; `other`: what is taken from another checkpoint."""
    other = copy.deepcopy(other)
    for _ in range(drawn.randint(1, 3)):
        found = [(where, key) for where, key in places(content) if where]
        where, key = drawn.choice(found)
        kind = drawn.choice(("drop", "rename", "replace", "replace", "replace", "swap", "other"))
        if kind == "drop":
            del where[key]
        elif kind == "rename" and isinstance(where, dict):
            new = drawn.choice([f"{key}_", "exp_avg", "step", 7, None, ("a",), f"{key}.x"])
            where[new] = where.pop(key)
        elif kind == "swap":
            there, at = drawn.choice([x for x in found if x[0] is where] or [(where, key)])
            where[key], there[at] = there[at], where[key]
        elif kind == "other":
            there, at = drawn.choice(list(places(other)))
            where[key] = there[at]
        else:
            where[key] = junk(drawn, where[key])


def read(content: Any, path: Path, model: nn.Module, opt: Any, before: Any) -> str:
    """Return "loaded", "refused" or, of content that cannot be written, "unwritable"; refused, it has changed nothing.

    What is loaded are the file's weights, and states that can be stepped.
    """
    try:
        container.write(path, content)
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError):
        return "unwritable"
    try:
        load_checkpoint(path, opt, model)
    except (ValueError, TypeError) as error:
        return "refused" if len(str(error)) > 20 and everything(opt, model) == before else f"changed: {error}"
    for name, value in model.state_dict().items():
        assert torch.equal(value, content["model"][name].to(value.dtype))
    train(opt, range(1))
    opt.load_state_dict(opt.state_dict())
    return "loaded"


@pytest.mark.filterwarnings("ignore:.*no state for", "ignore:.*is no option")
@pytest.mark.parametrize(("cls", "plan"), [(AdamW, "int8_split24"), (AdamW, "fp32_master"), (CAME, "int8_split24")])
def test_files_whose_content_was_wrong_when_they_were_written(tmp_path: Path, cls: Any, plan: str) -> None:
    source, other = ready(cls, plan, 2), ready(CAME, "bf16", 1)
    fresh = ready(cls, plan, 1, seed=5)
    path = tmp_path / "run.pt"
    save_checkpoint(path, *reversed(source), {"step": 2})
    content = copy.deepcopy(files.read(path))
    save_checkpoint(path, *reversed(other))
    foreign, before = copy.deepcopy(files.read(path)), everything(fresh[1], fresh[0])
    outcomes: Counter[str] = Counter()

    @given(st.integers(0, 2**32 - 1))
    def check(seed: int) -> None:
        broken = copy.deepcopy(content)
        damage(random.Random(seed), {key: broken[key] for key in PARTS}, {key: foreign[key] for key in PARTS})
        outcomes[read(broken, path, *copy.deepcopy(fresh), before)] += 1

    check()
    assert outcomes.keys() == {"loaded", "refused", "unwritable"} and min(outcomes.values()) > 1, outcomes
