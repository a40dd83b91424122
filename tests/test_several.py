"""`optgen.make`: optimizers by name, and several rules in one optimizer."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optgen
from optgen.base.errors import UserError
from optgen.by_name import class_of
from optgen.driver import checkpoints
from optgen.optim import AdamW, Lion, Muon
from tests.training import alike

RULES: dict[str, Any] = {r"^[02]\.weight$": {"rule": "muon", "lr": 0.02}, "^4": Lion, "*": "adamw"}
COMMON = {"lr": 1e-3, "weight_decay": 0.1}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))


def train(net: nn.Module, opts: list[Any], steps: int, seed: int = 1) -> None:
    made = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        net(torch.randn(8, 16, generator=made)).square().sum().backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_each_parameter_takes_the_step_of_its_rule() -> None:
    ours, theirs = model(), model()
    opt: Any = optgen.make(RULES, ours, plan="int8_split24", **COMMON)
    named = dict(theirs.named_parameters())

    def pick(*names: str) -> list[tuple[str, nn.Parameter]]:
        return [(name, named[name]) for name in names]

    apart = [
        Muon(pick("0.weight", "2.weight"), lr=0.02, weight_decay=0.1, plan="int8_split24"),
        Lion(pick("4.weight", "4.bias"), plan="int8_split24", **COMMON),
        AdamW(pick("0.bias", "2.bias"), plan="int8_split24", **COMMON),
    ]
    train(ours, [opt], 5)
    train(theirs, apart, 5)
    assert same(ours, theirs)
    assert opt.matched == {r"^[02]\.weight$": ["0.weight", "2.weight"], "^4": ["4.weight", "4.bias"],
                           "*": ["0.bias", "2.bias"]}  # fmt: skip
    assert "'^4': Lion, 2 parameters, 100 elements, int8_split24" in repr(opt)
    assert opt.memory().numel == sum(p.numel() for p in ours.parameters())


def test_inputs_go_to_the_rules_that_have_them_and_functions_choose_parameters() -> None:
    rules: dict[Any, Any] = {lambda name, p: p.ndim == 2: "adahessian", "0.bias": "sophia", "*": "adamw"}
    net, ones = model(), torch.ones_like
    opt: Any = optgen.make(rules, net, backend="reference", plan="fp32")
    assert list(opt.matched.values()) == [["0.weight", "2.weight", "4.weight"], ["0.bias"], ["2.bias", "4.bias"]]
    w, low, other = net[0].weight, net[0].bias, net[2].bias
    for given, words in (
        ({"hess": ones}, "'hess' is no input of this rule; its inputs: hessian"),
        ({"hessian": [w]}, "hessian has 1 tensors, and 4 parameters require a gradient"),
        ({"hessian": {w: w, other: other}}, "tensors for 1 parameters of no group of a rule that has it"),
        ({"hessian": {w: w, low: w}}, r"Sophia.feed: hessian of parameter '0.bias' .* must be \[24\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            opt.feed(**given)
        assert not any(opt.state.get(p) for p in net.parameters())
    with pytest.raises(RuntimeError, match=r"'hessian' of parameter '0.weight'.* was not fed"):
        train(net, [opt], 1)
    opt.feed(hessian={p: ones(p) for p in (w, net[2].weight, net[4].weight)})
    train(net, [opt], 1)
    opt.feed(hessian=ones, keep=True)
    train(net, [opt], 2)
    assert [opt.state[p].get("hessian_fed") for p in (w, low, other)] == [2.0, 2.0, None]
    assert [len(part.state) for part in opt.parts.values()] == [3, 1, 2]  # a lookup adds no entry to another's states


def test_what_does_not_fit_changes_nothing() -> None:
    net = model()
    opt: Any = optgen.make(RULES, net, **COMMON)
    train(net, [opt], 2)
    saved, before = copy.deepcopy(opt.state_dict()), copy.deepcopy(opt.state_dict())
    saved["param_groups"][0]["lr"] = 5.0
    saved["state"][5]["exp_avg_codes"] = torch.zeros(3)  # of the last part
    with pytest.raises(ValueError, match="nothing was loaded"):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == before["param_groups"][0]["lr"]
    other: Any = optgen.make({"weight": "lion", "bias": "adamw"}, model(), **COMMON)
    with pytest.raises(ValueError, match=r"expected groups of \['Lion', 'AdamW'\], got \['Muon', 'Lion', 'AdamW'\]"):
        other.load_state_dict(before)


@pytest.mark.parametrize(
    ("rule", "options", "error", "words"),
    [
        ({"weight": "muon"}, {}, ValueError, "no pattern matches 0.bias"),
        ({"weight": "muon", "0": "lion", "*": "adamw"}, {}, ValueError, "0.weight is matched by 'weight' and '0'"),
        ({"conv": "muon", "*": "adamw"}, {}, ValueError, "'conv' matches no parameter"),
        ({lambda name, p: p.ndim > 9: "muon", "*": "adamw"}, {}, ValueError, "<lambda>.* matches no parameter"),
        ({"(": "muon", "*": "adamw"}, {}, ValueError, r"make: '\(' is no regular expression of names: missing \)"),
        ({"*": {"lr": 1.0}}, {}, ValueError, "a dict with one under 'rule'"),
        ({"weight": "muon", "*": "adamw"}, {"rho": 1.0}, TypeError, "none of Muon, AdamW has the option 'rho'"),
        ({"weight": "muon", "*": "adamw"}, {"moment": 1.0}, TypeError, "the option 'moment'; did you mean 'momentum'"),
        ("adamw", {"rho": 1.0}, TypeError, "unexpected keyword argument 'rho'"),
    ],
)  # fmt: skip
def test_wrong_rules_are_refused(rule: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        optgen.make(rule, model(), **options)


@pytest.mark.parametrize("parameters", [3, None, list(model().parameters())], ids=["a number", "none", "unnamed"])
def test_wrong_models_are_refused(parameters: Any) -> None:
    with pytest.raises(TypeError, match=r"make: (expected a model or its named parameters|several rules are given by)"):
        optgen.make({"*": "adamw"}, parameters)


def test_names_and_other_ways() -> None:
    assert optgen.list_rules("adamw") == ["adamw"] and len(optgen.list_rules()) > 50
    assert [class_of(rule).SPEC for rule in optgen.list_rules()] == optgen.list_rules()
    opt = optgen.make("adamw", model().named_parameters(), plan="fp32", lr=0.5)
    assert type(opt) is AdamW and opt.param_groups[0]["plan"] == "fp32"
    several: Any = optgen.make(RULES, net := model().bfloat16(), plan="int8_split24", **COMMON)
    full = several.master_state_dict(net)
    assert all(torch.equal(full[name], value.float()) for name, value in net.state_dict().items())
    with pytest.raises(ValueError, match=r"says under 'rule' .* expected one of \['Muon', 'Lion', 'AdamW'\], got None"):
        several.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_a_file_of_other_rules_or_another_model_changes_nothing(tmp_path: Path) -> None:
    net, file = model(), tmp_path / "run.pt"
    opt: Any = optgen.make(RULES, net, plan="int8_split24", **COMMON)
    train(net, [opt], 2)
    optgen.save_checkpoint(file, opt, net)
    before, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(net.state_dict())
    single = AdamW(model().named_parameters())
    with pytest.raises(ValueError, match=r"expected a checkpoint of AdamW, got one of Muon \+ Lion \+ AdamW"):
        optgen.load_checkpoint(file, single)
    with pytest.raises(UserError, match=r"several rules: Muon \+ Lion \+ AdamW"):
        checkpoints.convert(str(file), str(tmp_path / "out.pt"), to="fp32")
    train(net, [opt], 1)
    moved = copy.deepcopy((opt.state_dict(), net.state_dict()))
    net.load_state_dict = refusing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the model refuses"):
        optgen.load_checkpoint(file, opt, net)
    assert alike((opt.state_dict(), net.state_dict()), moved) and not alike(before, moved[0])
    del net.load_state_dict
    optgen.load_checkpoint(file, opt, net)
    assert alike((opt.state_dict(), net.state_dict()), (before, weights))


def refusing(*_: Any) -> None:
    raise RuntimeError("the model refuses")
