"""Names of parameters: they decide what a checkpoint gives to whom, in any order of parameters and groups; and lists
of parameters that a user edits."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import optgen
from optgen.optim import CAME, SGD, AdamW, Lion, Muon, ScheduleFreeAdamW
from tests.training import alike

NAMES = ("a", "b", "c", "d", "e", "f")
Groups = list[list[str]]


class Net(nn.Module):
    """Parameters of one shape, so that nothing but their names tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.register_parameter(name, nn.Parameter(torch.full((64, 64), 0.5, dtype=torch.bfloat16)))


def train(net: nn.Module, opt: Any, step: int) -> None:
    for i, p in enumerate(net.parameters()):
        made = torch.Generator().manual_seed(97 * step + i)
        p.grad = torch.randn(p.shape, generator=made).to(p.dtype)
    opt.step()


def shuffled(draw: random.Random, groups: Groups) -> Groups:
    return draw.sample([draw.sample(group, len(group)) for group in groups], len(groups))


def made(cls: Any, plan: str, net: nn.Module, groups: Groups, prefix: str, rates: list[float]) -> Any:
    given = dict(net.named_parameters())
    return cls(
        [
            {"params": [(prefix + name, given[name]) for name in group], "lr": lr, "weight_decay": 10 * lr}
            for group, lr in zip(groups, rates, strict=True)
        ],
        plan=plan,
        backend="reference",
    )


def of_names(net: nn.Module, opt: Any) -> dict[str, Any]:
    """Return what the optimizer has of each parameter, by the model's names: its state, rate, decay and name."""
    called = {id(p): name for name, p in net.named_parameters()}
    return {
        called[id(p)]: (opt.state[p], group["lr"], group["weight_decay"], label.removeprefix("module."))
        for group in opt.param_groups
        for p, label in zip(group["params"], group["param_names"], strict=True)
    }


def by_file(with_model: bool) -> Callable[..., None]:
    def load(net: nn.Module, opt: Any, other: nn.Module, again: Any, folder: Path) -> None:
        optgen.save_checkpoint(folder / "run.pt", opt, net)
        optgen.load_checkpoint(folder / "run.pt", again, other if with_model else None)

    return load


def by_torch_save(net: nn.Module, opt: Any, other: nn.Module, again: Any, folder: Path) -> None:
    torch.save(opt.state_dict(), folder / "opt.pt")
    again.load_state_dict(torch.load(folder / "opt.pt", weights_only=True))


WAYS: dict[str, Callable[..., None]] = {
    "state_dict": lambda net, opt, other, again, folder: again.load_state_dict(opt.state_dict()),
    "torch.save": by_torch_save,
    "dense": lambda net, opt, other, again, folder: again.load_state_dict(opt.dense_state_dict()),
    "file": by_file(False),
    "file and model": by_file(True),
}
RULES = [(AdamW, "int8_split24"), (CAME, "fp32"), (Lion, "int8_split24"), (Muon, "int8_split24"), (SGD, "bf16_sr"),
         (ScheduleFreeAdamW, "split32")]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_parts_of_a_group_take_its_options(way: str, tmp_path: Path) -> None:
    """In another order; of names and groups that are whole tests/machine.py has all ways."""
    net, other = Net(), Net()
    opt = made(AdamW, "fp32", net, [list("abcd"), list("ef")], "module.", [0.1, 0.2])
    train(net, opt, 0)
    again = made(AdamW, "fp32", other, [list("fe"), list("db"), list("ca")], "", [0.5] * 3)
    other.load_state_dict(net.state_dict())
    WAYS[way](net, opt, other, again, tmp_path)
    for one, run in ((net, opt), (other, again)):
        train(one, run, 1)
    assert alike(of_names(other, again), of_names(net, opt)) and alike(other.state_dict(), net.state_dict())


@pytest.mark.parametrize("seed", range(12))
def test_what_names_cannot_match_is_listed_and_nothing_is_loaded(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    way = draw.choice(["state_dict", "torch.save", "dense", "file", "file and model"])
    cls, plan = draw.choice(RULES) if way != "dense" else (AdamW, "fp32")
    groups, net, other = [list("ab"), list("cd"), list("ef")], Net(), Net()
    opt = made(cls, plan, net, groups, "", [1e-3] * 3)
    train(net, opt, 0)
    kind = ["lacking", "more", "other", "all others", "groups", "twice"][seed % 6]
    turned = shuffled(draw, groups)
    given: list[Any] = [[(name, other.get_parameter(name)) for name in group] for group in turned]
    words = ""
    if kind == "lacking":
        name, _ = given[-1].pop()
        words = rf"parameters \['{name}'\]: not expected"
    elif kind == "more":
        given.append([("g", nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16)))])
        words = r"expected parameters \['g'\], they are missing"
    elif kind == "other":
        (name, p), given[0] = given[0][0], given[0][1:]
        given[0].append(("g", p))
        words = rf"expected parameters \['g'\], got \['{name}'\] in their place"
    elif kind == "all others":
        given = [[(f"net.{name}", p) for name, p in group] for group in given]
        words = r"expected parameters \['net.a', 'net.b'.*; no name is known: without 'param_names'"
    elif kind == "groups":
        given[0][0], given[1][0] = given[1][0], given[0][0]
        words = r"group 0: expected its parameters in one group, they are in groups \["
    elif kind == "twice":
        mine = [[("x", net.a), ("y", net.b)], [("x", net.c)]]
        opt = cls([{"params": group} for group in mine], plan=plan, backend="reference")
        train(net, opt, 0)
        given = [[("x", other.c)], [("x", other.a), ("y", other.b)]]
        words = "several parameters have one name"
    again = cls([{"params": group} for group in given], plan=plan, backend="reference")
    before = copy.deepcopy((again.state_dict(), other.state_dict()))
    with pytest.raises(ValueError, match=words) as raised:
        WAYS[way](net, opt, other, again, tmp_path)
    assert "nothing was loaded" in str(raised.value)
    assert alike((again.state_dict(), other.state_dict()), before)
    if kind == "all others":  # of a renamed model: by position
        saved = opt.state_dict()
        for group in saved["param_groups"]:
            del group["param_names"]
        again.load_state_dict(saved)
        assert alike(*([x.state[p] for group in x.param_groups for p in group["params"]] for x in (opt, again)))


def test_names_that_only_wrappers_tell_apart_decide_too() -> None:
    net = Net()

    def named(*pairs: tuple[str, nn.Parameter]) -> Any:
        return AdamW(pairs, plan="fp32", backend="reference")

    opt = named(("w", net.a), ("_orig_mod.w", net.b))
    train(net, opt, 0)
    again = named(("_orig_mod.w", net.b), ("w", net.a))
    again.load_state_dict(opt.state_dict())
    assert alike(*([x.state[p] for p in (net.a, net.b)] for x in (opt, again)))
    with pytest.raises(ValueError, match="several parameters have one name, and names or groups are others"):
        named(("w", net.a), ("w", net.b)).load_state_dict(opt.state_dict())
    opt, again = named(("w", net.a), ("v", net.b)), named(("_orig_mod.v", net.b), ("_orig_mod.w", net.a))
    train(net, opt, 0)
    again.load_state_dict(opt.state_dict())
    assert alike(*([x.state[p] for p in (net.a, net.b)] for x in (opt, again)))


@pytest.mark.parametrize("way", ["state_dict", "file", "file and model"])
def test_patterns_of_several_rules_come_in_any_order_and_others_are_refused(way: str, tmp_path: Path) -> None:
    rules = {"a|b": {"rule": "adamw", "lr": 2e-3}, "c": "muon", "d": {"rule": "adamw", "lr": 5e-3}, "*": "lion"}
    common: Any = {"plan": "int8_split24", "backend": "reference"}
    net, other = Net(), Net()
    opt: Any = optgen.make(rules, net, **common)
    train(net, opt, 0)
    other.load_state_dict(net.state_dict())
    again: Any = optgen.make(dict(reversed(rules.items())), other, **common)
    WAYS[way](net, opt, other, again, tmp_path)
    assert alike(of_names(other, again), of_names(net, opt))
    moved: Any = optgen.make({"a|b|c": "adamw", "d": "muon", "*": "lion"}, Net(), **common)
    words = r"which have other rules for \['c', 'd'\]; nothing" if way == "state_dict" else r"got one of .*Muon"
    with pytest.raises(ValueError, match=words):
        WAYS[way](net, opt, Net(), moved, tmp_path)


@pytest.mark.parametrize("named", [True, False])
def test_a_group_that_a_distributed_checkpoint_leaves_without_options_is_refused(named: bool) -> None:
    """torch gives the options of a saved group to one of the groups that have its parameters."""
    net, other = Net(), Net()

    def groups(net: Net, *groups: str) -> list[dict[str, Any]]:
        return [{"params": [(x, net.get_parameter(x)) if named else net.get_parameter(x) for x in g]} for g in groups]

    opt = AdamW(groups(net, "ab", "cdef"), plan="fp32", backend="reference", lr=0.25)
    train(net, opt, 0)
    again = AdamW(groups(other, "ac", "bdef"), plan="fp32", backend="reference")
    before = copy.deepcopy(again.state_dict()["param_groups"])
    with pytest.raises(ValueError, match="expected 'plan' in every group: some have no options"):
        set_optimizer_state_dict(other, again, get_optimizer_state_dict(net, opt))
    assert again.state_dict()["param_groups"] == before


# -- lists edited in place -----------------------------------------------------------------------------------------
EDITS: dict[str, Callable[[list[Any], Any], list[Any]]] = {
    "append": lambda old, new: [*old, new],
    "remove": lambda old, new: old[1:],
    "remove and append": lambda old, new: [*old[:-2], old[-1], new],
    "turn": lambda old, new: old[::-1],
}


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("kind", EDITS)
def test_lists_edited_in_place_are_stepped_where_names_follow(kind: str, backend: str) -> None:
    """As those without names are; else the step is refused before any change."""
    runs = []
    for named in (True, False):
        made = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(3, 5, generator=made)) for _ in range(4)]
        given: Any = list(zip("abc", params[:3], strict=True)) if named else params[:3]
        opt = AdamW(given, lr=0.01, plan="fp32", backend=backend)
        for step in range(4):
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * step + i))
            if step == 2:
                group, before = opt.param_groups[0], copy.deepcopy(params)
                group["params"][:] = EDITS[kind](group["params"], params[3])
                if named and kind in ("append", "remove"):
                    with pytest.raises(ValueError, match="edit 'param_names' as 'params'"):
                        opt.step()
                    assert alike(params, before)
                if named:
                    group["param_names"][:] = EDITS[kind](group["param_names"], "d")
            opt.step()
        runs.append(params)
    assert alike(*runs)


def test_positions_that_move_are_refused_where_plans_of_single_parameters_go_by_them() -> None:
    params = [nn.Parameter(torch.ones(n, 64)) for n in (64, 65, 64, 65)]
    for overrides in (None, {"numel > 4100": "fp32"}):
        opt = AdamW(params, plan="int8", overrides=overrides, backend="reference")
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        before = copy.deepcopy(params)
        del opt.param_groups[0]["params"][0]
        if overrides is None:
            opt.step()
            continue
        with pytest.raises(ValueError, match=r"shape \[65, 64\] has got the position, by which it has overrides"):
            opt.step()
        assert alike(params, before)
