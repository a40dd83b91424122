"""Every block of docs/migration.md is run: the removed lines make an old optimizer, the added ones take over."""

import copy
import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optgen.runtime import Optimizer
from optgen.runtime.layout import plans
from optgen.verify import bounds
from specs.plans import int8_split24

PAGE = Path(__file__).resolve().parent.parent / "docs" / "migration.md"
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(diff|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECTIONS = {title: BLOCK.findall(text) for title, text in SECTION.findall(PAGE.read_text(encoding="utf-8"))}
MOVING = [title for title, blocks in SECTIONS.items() if any(kind == "diff" for kind, _ in blocks)]


def lines(diff: str, sign: str) -> str:
    return "\n".join(line[1:] for line in diff.splitlines() if line.startswith(sign))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Embedding(32, 160), "head": nn.Linear(160, 32)})


def backward(net: nn.Module) -> None:
    net["head"](net["embed"](torch.arange(32))).square().mean().backward()  # type: ignore[index, operator]


def allowed(key: str, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    """The largest change of a state that is stored once under int8_split24."""
    signed, nonneg = (bounds.one_step_bound(f).total for f in (int8_split24.signed, int8_split24.nonneg))
    if key == "exp_avg_sq":  # so much of the root
        return ((1 + nonneg) ** 2 - 1) * kept[key]
    if key == "exp_avg":  # so much of the block's largest quotient, times the stored root, whose error m has as well
        root = kept["exp_avg_sq"].sqrt()
        largest = (kept[key].abs() / root).max() * (1 + 2**-8)
        return signed * largest * root * (1 + nonneg) + nonneg * kept[key].abs()
    return torch.zeros(())  # few values: fp32, as they are


def _installed(package: str) -> bool:
    """Return True if the real one is: other tests put stand-ins into sys.modules."""
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_every_peer_of_the_page_has_a_block() -> None:
    assert len(MOVING) == 6


@pytest.mark.parametrize("title", MOVING)
def test_its_blocks_run(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plans, "provider", plans.provider)
    diff = next(text for kind, text in SECTIONS[title] if kind == "diff")
    old_lines, new_lines = lines(diff, "-"), lines(diff, "+")
    package = re.match(r"from (\w+)", old_lines)
    assert package
    old: dict[str, Any] = {"torch": torch, "model": model()}
    there = _installed(package[1])
    if there:
        exec(old_lines, old)
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, for 20 s
            for _ in range(3):
                backward(old["model"])
                old["opt"].step()
                old["opt"].zero_grad()
        torch.save(old["opt"].state_dict(), "old.pt")
    new: dict[str, Any] = {"torch": torch, "model": copy.deepcopy(old["model"])}
    exec(new_lines, new)
    opt = new["opt"]
    assert isinstance(opt, Optimizer)
    loads = False
    for kind, text in SECTIONS[title]:
        if kind == "python" and (there or "old.pt" not in text):
            exec(text, new)
            loads = loads or "old.pt" in text
    if loads:
        dense = opt.dense_state_dict()["state"]
        for i, (name, p) in enumerate(new["model"].named_parameters()):
            assert opt.state[p]["step"] == 3, name
            kept = {k: v for k, v in old["opt"].state_dict()["state"][i].items() if isinstance(v, torch.Tensor)}
            for key, value in kept.items():
                if key not in ("step", "RMS"):  # theirs remembers a norm of the weight that it does not use
                    error = (dense[i][key].reshape(value.shape) - value).abs()
                    assert (error <= allowed(key, kept)).all(), (name, key)
    backward(new["model"])
    new["opt"].step()
