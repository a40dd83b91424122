"""Every spec is sound, named as torch names it, and has an oracle, beside which test_against_papers.py runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import spec_of
from tests.oracles import ELEMENTWISE, REDUCING, WHOLE, paper

SPECS = Path(__file__).parent.parent / "specs"
# Those that look at the whole model, at intervals, or multiply matrices: in test_against_papers.py and
# test_whole_model.py.
NAMES = sorted(f.stem for f in SPECS.glob("*.py") if f.stem not in ("__init__", "plans", *WHOLE))
# Fewer than 64 roundings per element and step, of half an ulp each, none of them amplified; and sums of 35.
TOLERANCE = 60 * (64 + 35) * 2.0**-53


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """torch keeps its own scalars (NAdam's mu_product) in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_every_spec_has_an_oracle() -> None:
    assert sorted(ELEMENTWISE | REDUCING) == NAMES


@paper
def madgrad(o, s, p, g, t, lr):
    """The paper's algorithm 1 with what its authors' code makes of lr = 0 and of eps = 0."""
    s.start = p if t == 1 else s.start
    rate = (lr + o.eps if lr else 0.0) * t**0.5
    s.s, s.v = s.s + rate * g, s.v + rate * g * g
    root = s.v ** (1 / 3) + o.eps
    return o.momentum * p + (1 - o.momentum) * (s.start - s.s / torch.where(root == 0, torch.inf, root))


@pytest.mark.parametrize(("momentum", "eps"), [(0.9, 1e-6), (0.9, 0.0), (0.0, 1e-6), (0.0, 0.0)])
def test_madgrad_waits_while_the_rate_is_0_and_divides_by_no_0(momentum: float, eps: float) -> None:
    hypers = {"momentum": momentum, "weight_decay": 0.0, "eps": eps}
    spec, oracle = spec_of("madgrad"), madgrad({}, hypers)
    ours = theirs = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    states: dict[str, Any] = {}
    for t in range(1, 9):
        g = torch.tensor([0.0, 1e-9 * t, 3.0], dtype=torch.float64)
        lr = 0.0 if t < 3 else 0.1
        ours, states, _ = spec.evaluate(ours, g, t, states, {}, **hypers, lr=lr)
        theirs = oracle(theirs, g, t, lr)
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
        assert ours[0] == 1.0
        assert torch.equal(ours, torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)) == (lr == 0)


LIKE_TORCH = [n for n in NAMES if (spec_of(n).like or "").startswith("torch.optim.")]


@pytest.mark.parametrize("name", LIKE_TORCH)
def test_names_and_defaults_are_torchs(name: str) -> None:
    """So that a call site and a checkpoint of torch.optim fit without a change."""
    spec = spec_of(name)
    cls = getattr(torch.optim, (spec.like or "").rsplit(".", 1)[1])
    assert spec.class_name == cls.__name__
    p = torch.nn.Parameter(torch.ones(3, 3))
    on = {f.name: True for f in spec.flags if not f.derived and f.name in cls([p]).defaults}
    on |= {"momentum": 0.9} if any(f.nonzero == "momentum" for f in spec.flags) else {}
    optimizer = cls([p], **on)
    p.grad = torch.ones(3, 3)
    optimizer.step()
    theirs = {k for k, v in optimizer.state[p].items() if v is not None} - {"step"}
    flags = spec.flag_values(on, (3, 3))
    ours = {s.name for s in (*spec.present(flags), *spec.present_host(flags))}
    assert ours == theirs
    defaults = cls([p]).defaults
    for h in spec.hypers:
        # None is the weight's own machine epsilon: here that of fp32, in which all is computed.
        parts = defaults[h.name] if isinstance(defaults[h.name], tuple) else (defaults[h.name],)
        wanted = tuple(torch.finfo(torch.float32).eps if part is None else part for part in parts)
        assert h.values == wanted, h.name
    for f in spec.flags:
        if f.name in defaults:
            assert f.default == defaults[f.name]


@pytest.mark.parametrize("name", NAMES)
def test_is_sound_and_short(name: str) -> None:
    spec = spec_of(name)
    spec.check()
    assert spec.name == name
    assert spec.cite and spec.doc
    body = [n for n in spec.source.statements if not n.text.startswith(('"', "'"))]
    assert len(body) <= 30
