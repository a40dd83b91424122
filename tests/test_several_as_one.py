"""Several rules in one optimizer: PyTorch's questions of one, and its groups and states, which are its parts'."""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import optgen
from optgen.optim import SGD, AdamW, Lion, Muon
from optgen.runtime import Optimizer
from optgen.runtime.several import RULE, Several
from tests import test_torch_contract as contract
from tests.training import bits, give, params_of


class Divided:
    """Stands for a class in the tests of PyTorch's contract: makes two parts of its parameters."""

    def __init__(self, cls: type[Optimizer]) -> None:
        self.cls, self.__name__, self.HYPERS = cls, cls.__name__, cls.HYPERS

    def __call__(self, params: Any, **options: Any) -> Several:
        given = list(params)
        if isinstance(given[0], dict):
            first, rest = given[:1], given[1:]
        else:
            first, rest = [{"params": given[:1]}], [{"params": given[1:]}]
        return Several({"first": self.cls(first, **options), "rest": self.cls(rest, **copy.deepcopy(options))})


ASKED: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (contract.test_the_loss_goes_down, ({}, False)),
    (contract.test_a_rate_that_is_a_tensor, ({}, ())),
    (contract.test_groups_have_options_of_their_own, ()),
    (contract.test_what_a_step_leaves_alone, ({},)),
    (contract.test_states_and_checkpoints, ({},)),
    (contract.test_steps_of_any_kind, (torch.tensor,)),
    (contract.test_hooks, ()),
]


@pytest.mark.parametrize(("question", "given"), ASKED)
@pytest.mark.parametrize("cls", [SGD, AdamW, Muon])
def test_what_pytorch_asks_of_one_optimizer(cls: type[Optimizer], question: Any, given: tuple[Any, ...]) -> None:
    question(Divided(cls), *given)


def test_every_public_method_of_an_optimizer_is_there() -> None:
    """With its arguments, or refused by name."""
    refused = []
    for name, theirs in inspect.getmembers(Optimizer, inspect.isfunction):
        if name.startswith("_"):
            continue
        ours = getattr(Several, name)
        if inspect.signature(ours).return_annotation == "NoReturn":
            with pytest.raises(NotImplementedError, match=rf"{name}\(.*opt\.parts"):
                ours(None, None)
            refused.append(name)
        else:
            assert list(inspect.signature(ours).parameters)[1:] == list(inspect.signature(theirs).parameters)[1:], name
    assert sorted(refused) == ["release_gradients", "watch"]


# -- views ----------------------------------------------------------------------------------------------------
RULES: list[dict[Any, tuple[type[Optimizer], dict[str, Any]]]] = [
    {r"^0\.weight": (Muon, {"lr": 0.02}), "*": (AdamW, {"lr": 1e-2})},
    {r"\.weight": (Lion, {"lr": 1e-3}), r"\.bias": (Lion, {"lr": 1e-2, "weight_decay": 0.1})},
    {"^0": (AdamW, {}), "^2": (SGD, {"lr": 0.1, "momentum": 0.9}), "*": (AdamW, {"lr": 3e-2})},
]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4), nn.LayerNorm(4))


def made(number: int, net: nn.Module) -> Any:
    rules = {key: {"rule": cls, **given} for key, (cls, given) in RULES[number].items()}
    return optgen.make(rules, net, plan="int8_split24", backend="reference")


@pytest.mark.parametrize("number", range(3))
def test_groups_are_those_of_the_parts_in_the_order_in_which_they_came(number: int) -> None:
    opt = made(number, model())
    first, *_, last = opt.parts.values()

    def group(part: Any) -> dict[str, Any]:
        return {**part.param_groups[0], "params": [nn.Parameter(torch.ones(3, 4))], "param_names": ["new"]}

    added = [group(part) for part in (last, first, first)]
    opt.param_groups = [*opt.param_groups, *added]
    with pytest.raises(TypeError, match="item deletion"):
        del opt.param_groups[0]
    last.add_param_group({"params": [("late", nn.Parameter(torch.ones(3, 4)))]})
    opt.add_param_group({"params": [("later", nn.Parameter(torch.ones(4, 3)))], RULE: first.defaults[RULE]})
    own = [part.defaults[RULE] for part in opt.parts.values()]
    labels = [*own, own[-1], own[0], own[0], own[-1], own[0]]
    assert [g[RULE] for g in opt.param_groups] == labels
    assert all(any(g is x for x in last.param_groups) for g in (added[0], opt.param_groups[-2]))
    assert first.param_groups[1] is added[1] and first.param_groups[2] is added[2]
    assert sum(len(part.param_groups) for part in opt.parts.values()) == len(labels)
    opt.param_groups = [g for g in opt.param_groups if g is not added[0] and g is not added[1]]
    assert first.param_groups[1] is added[2]
    assert [g[RULE] for g in opt.param_groups] == [*own, own[0], own[-1], own[0]]
    assert not any(g is added[0] for g in last.param_groups)
    give(params_of(opt), 1)
    opt.step()
    assert all(opt.state[p]["step"] == 1 for p in params_of(opt))
    assert [g[RULE] for g in copy.deepcopy(opt).param_groups] == [g[RULE] for g in opt.param_groups]


@pytest.mark.parametrize("number", range(3))
def test_states_are_those_of_the_parts(number: int) -> None:
    net = model()
    opt = made(number, net)
    train(net, opt, 1)
    owners = {p: part for part in opt.parts.values() for p in params_of(part)}
    assert len(opt.state) == sum(len(part.state) for part in opt.parts.values()) == len(owners)
    assert all(opt.state[p] is part.state[p] and p in opt.state for p, part in owners.items())
    p, q, *_, r = owners
    assert opt.state.pop(p)["step"] == 1 and p not in owners[p].state and opt.state.pop(p, None) is None
    opt.state[p] = {}
    del opt.state[q]
    opt.state[r]["mine"] = torch.ones(2)
    assert owners[p].state[p] == {} and q not in owners[q].state and "mine" in owners[r].state[r]
    opt.state["n"] = 3
    assert next(iter(opt.parts.values())).state["n"] == 3 and opt.state["n"] == 3
    kept = dict(opt.state)
    for states in (defaultdict(dict), kept):
        opt.state = states
        assert {key for part in opt.parts.values() for key in part.state} == set(states)
    assert all(owners[key].state[key] is value for key, value in kept.items() if key != "n")
    opt.state.clear()
    assert not opt.state and not any(part.state for part in opt.parts.values())


@pytest.mark.parametrize("why", ["evaluation", "released gradients"])
def test_a_step_that_one_part_refuses_for_its_mode_changes_nothing(why: str) -> None:
    net = model()
    opt: Any = optgen.make({"0": "adamw", "*": "schedule_free_adamw"}, net, backend="reference")
    scaler = torch.amp.GradScaler("cpu")
    train(net, opt, 1)
    last = opt.parts["*"]
    if why == "evaluation":
        last.eval()
    else:
        handle = last.release_gradients()
    before = bits([p for group in opt.parts["0"].param_groups for p in group["params"]])
    scaler.scale(net(torch.ones(8, 8)).square().sum()).backward()
    with pytest.raises(RuntimeError, match="in evaluation" if why == "evaluation" else "factor of a GradScaler"):
        scaler.step(opt) if why == "released gradients" else opt.step()
    assert bits([p for group in opt.parts["0"].param_groups for p in group["params"]]) == before
    if why == "released gradients":
        handle.remove()


def train(net: nn.Module, opt: Any, steps: int) -> None:
    for step in range(steps):
        net(torch.randn(8, 8, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        opt.step()
        opt.zero_grad()
