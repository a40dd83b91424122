"""`optgen.make(..., scale="mup")`: rates and decay that follow a model's width, and QK-clip's bound on logits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optgen
from docs.tools import transfer
from examples import qk_clip, wider_model
from optgen import widths
from tools.demo_model import LanguageModel, Size

ROOT = Path(__file__).resolve().parent.parent


def model(width: int = 64) -> LanguageModel:
    return LanguageModel(replace(Size(layers=1, width=64, heads=2), width=width))


def rates(rule: str, net: nn.Module | None = None, **given: Any) -> dict[str, tuple[float, ...]]:
    """Return lr and weight_decay by role, rounded."""
    opt: Any = optgen.make(rule, net or model(), plan="fp32", **given)
    return {g["role"]: tuple(round(g.get(key, 0.0), 9) for key in ("lr", "weight_decay")) for g in opt.param_groups}


def test_the_tables_of_mup() -> None:
    """Table 3 of arXiv:2203.03466 at four times the width, and spectral norms of sqrt(outputs / inputs) for Muon."""
    given: dict[str, Any] = dict(lr=8e-3, weight_decay=0.1, scale="mup", base_width=16)
    by_element = {"hidden": (2e-3, 0.4), "embedding": (8e-3, 0.1), "head": (2e-3, 0.4), "vector": (8e-3, 0.1)}
    assert rates("adamw", **given) == rates("ema(lion)", **given) == by_element
    assert rates("adamw", **given | dict(scale="mup_coupled")) == {r: (lr, 0.1) for r, (lr, _) in by_element.items()}
    assert rates("sgd", **given) == {
        "hidden": (8e-3, 0.1), "embedding": (0.032, 0.025), "head": (2e-3, 0.4), "vector": (0.032, 0.025),
    }  # fmt: skip
    adamw = {role: (lr / 8, decay) for role, (lr, decay) in by_element.items() if role != "hidden"}
    assert rates("muon", **given, adamw_lr=1e-3) == {"hidden": (8e-3, 0.1), **adamw}
    assert rates("muon", **given, match_rms_adamw=True)["hidden"] == rates("normuon", **given)["hidden"] == (4e-3, 0.2)
    assert {lr for lr, _ in rates("scion", scale="mup", base_width=16).values()} == {1e-3}
    known = {*widths.BY_ELEMENT, *widths.BY_GRADIENT, *widths.BY_NORM, *widths.TUNED}
    assert known <= {*optgen.list_rules()}


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.wide = nn.Linear(3, width), nn.Linear(width, 2 * width)
        self.experts, self.head = nn.Parameter(torch.randn(2, width, 8 * width)), nn.Linear(2 * width, 7)


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_a_model_without_embeddings(rule: str) -> None:
    """Its first layer and the bias of its head have a side that follows no width."""
    opt: Any = optgen.make(rule, Net(32), scale="mup", base_width=16, lr=1.0, plan="fp32")
    found = {name: g["lr"] for g in opt.param_groups for name in g["param_names"]}
    vectors = 1.0 if rule == "adamw" else 4.0
    assert found == {
        "inputs.weight": vectors, "inputs.bias": vectors, "wide.weight": 1 / 4 if rule == "adamw" else 1.0,
        "wide.bias": vectors, "experts": 1 / 4 if rule == "adamw" else 1.0, "head.weight": 1 / 4, "head.bias": 1.0,
    }  # fmt: skip


def test_a_wider_model_learns_at_the_rate_of_a_small_one() -> None:
    assert max(wider_model.train(width, 40) for width in (32, 256)) < 0.1
    net, small = model(256), model(16)
    wider_model.scale_weights(optgen.make("adamw", net, scale="mup", base_width=16, plan="fp32"), small)
    deviations = [{name: p.detach().std() for name, p in x.named_parameters()} for x in (net, small)]
    for name, times in (("blocks.0.up.weight", 0.25), ("head.weight", 1 / 16), ("tokens.weight", 1.0)):
        assert float(deviations[0][name] / deviations[1][name]) == pytest.approx(times)


def test_sweeps_to_begin_with() -> None:
    assert len(widths.TUNED) == 12
    for rule, (width, options) in widths.TUNED.items():
        found = rates(rule, scale="mup")
        assert found["vector"] == (options.get("adamw_lr", options["lr"]), 0.1)
        assert found["head"][0] == pytest.approx(found["vector"][0] * width / 64)
    assert rates("adamw", scale="mup", weight_decay=0.2)["vector"] == (1e-3, 0.2)


@pytest.mark.parametrize(
    ("rule", "net", "given", "words"),
    [
        ("adamw", model(), {"scale": "up"}, r"expected scale='mup' or 'mup_coupled', got 'up'"),
        ("adamw", model(), {"base_width": 8}, "base_width= goes with scale='mup'"),
        ("adamw", model(), {"scale": "mup", "base_width": 0}, "a width of 1 or more, got 0"),
        ("adamw", nn.Linear(3, 3), {"scale": "mup", "base_width": 8}, "no config .* and no head that say its"),
        (torch.optim.AdamW, model(), {"scale": "mup", "base_width": 8}, "how AdamW scales with width is not known"),
        ("hyperball(adamw)", model(), {"scale": "mup", "base_width": 8}, "scales with width is not known"),
        ("came", model(), {"scale": "mup"}, "begins with lr of a public sweep, of adamw, .*; for CAME give lr="),
        ("adamw", model(), {"scale": "mup", "lr": 1e-3}, "for AdamW give lr= and the base_width="),
    ],
)
def test_what_cannot_be_scaled_is_refused(rule: Any, net: nn.Module, given: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        optgen.make(rule, net, **given)


def test_the_page_has_what_was_measured() -> None:
    plain, mup = ([*map(float, row.split("|")[2:7])] for row in transfer.rows()[2:])
    assert "\n".join(transfer.rows()) in (ROOT / "docs/widths.md").read_text(encoding="utf-8")
    assert mup[-1] <= 2 < plain[-1]


def test_logits_explode_without_qk_clip_and_not_with_it() -> None:
    free, bound = qk_clip.run(70, False)[0], qk_clip.run(70, True, tau=10.0)[0]
    assert max(free[-10:]) > 60 and max(bound[20:]) < 20


@pytest.mark.parametrize("key_heads", [4, 2])
def test_qk_clip_scales_the_logits_of_each_head_by_its_factor(key_heads: int) -> None:
    """Heads above the bound end at it and the others stay, also where they share their keys."""
    torch.manual_seed(1)
    layer, x = qk_clip.Attention(32, 4, key_heads), torch.randn(2, 9, 32)
    clip = qk_clip.QKClip(optgen.make("adamw", layer, plan="fp32"), tau=0.5)
    clip.layer(layer, layer.q_proj, layer.k_proj)
    with clip:
        layer(x)
    before = clip.largest[layer].clone()
    assert bool((before > 0.5).any()) and clip.step() == float(before.max())
    with clip:
        layer(x)
    torch.testing.assert_close(clip.largest[layer], before.clamp(max=0.5))
