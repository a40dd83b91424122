"""Every spec is sound, named as torch names it, and has an oracle, beside which test_against_papers.py runs it."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from optgen import optim
from tests.harness import ROOT, spec_of
from tests.oracles import TABLES

NAMES = sorted(f.stem for f in (ROOT / "specs").glob("[!_]*.py") if f.stem != "plans")


def test_every_spec_has_an_oracle_and_a_distance_from_it() -> None:
    assert sorted(itertools.chain(*TABLES)) == NAMES, "a row in a table of tests/oracles.py"
    assert sorted(json.loads((ROOT / "docs/distances.json").read_text())) == NAMES, "make docs writes it"


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


@pytest.mark.parametrize("name", [n for n in NAMES if any(h.series for h in spec_of(n).hypers)])
def test_matrices_have_one_round_of_newton_schulz_at_least(name: str) -> None:
    """Without one the step would be a normalized momentum, of which no name and no number tells."""
    cls, p = getattr(optim, spec_of(name).class_name), torch.nn.Parameter(torch.ones(3, 3))
    for rounds in (0, -1):
        with pytest.raises(ValueError, match=f"ns_steps must be a whole number >= 1 and < 100, got {rounds}"):
            cls([p], ns_steps=rounds)
    assert cls([p], ns_steps=1).param_groups[0]["ns_steps"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_is_sound_and_short(name: str) -> None:
    spec = spec_of(name)
    spec.check()
    assert spec.name == name
    assert spec.cite and spec.doc
    assert all(h.meaning for h in spec.hypers) and all(f.meaning for f in spec.flags if not f.derived), "doc="
    body = [n for n in spec.source.statements if not n.text.startswith(('"', "'"))]
    assert len(body) <= 30
