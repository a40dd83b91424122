"""Several rules in one optimizer: PyTorch's questions of one, and programs beside the parts stepped alone."""

import copy
import inspect
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import optgen
from optgen.optim import SGD, AdamW, Lion, Muon
from optgen.runtime import Optimizer
from optgen.runtime.several import RULE, Several
from tests import test_torch_contract as contract
from tests.training import alike, bits, params_of


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
    (contract.test_the_rate_and_the_momentum_that_schedulers_set, ("a chain",)),
    (contract.test_the_rate_and_the_momentum_that_schedulers_set, ("OneCycleLR",)),
    (contract.test_the_rate_and_the_momentum_that_schedulers_set, ("CyclicLR",)),
    (contract.test_a_rate_that_is_a_tensor, ({}, ())),
    (contract.test_groups_have_options_of_their_own, ()),
    (contract.test_what_a_step_leaves_alone, ({},)),
    (contract.test_states_and_checkpoints, ({},)),
    (contract.test_steps_of_any_kind, (torch.tensor,)),
    (contract.test_hooks, ()),
]


@pytest.mark.filterwarnings("ignore:.*none of its 0 parameters")
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
    assert sorted(refused) == ["release_gradients"]


# -- programs -------------------------------------------------------------------------------------------------
RULES: list[dict[Any, tuple[type[Optimizer], dict[str, Any]]]] = [
    {r"^0\.weight": (Muon, {"lr": 0.02}), "*": (AdamW, {"lr": 1e-2})},
    {r"\.weight": (Lion, {"lr": 1e-3}), r"\.bias": (Lion, {"lr": 1e-2, "weight_decay": 0.1})},
    {"^0": (AdamW, {}), "^2": (SGD, {"lr": 0.1, "momentum": 0.9}), "*": (AdamW, {"lr": 3e-2})},
]
BACKENDS = ["reference", "cpp"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4), nn.LayerNorm(4))


class Pair:
    """An optimizer of several rules, and beside it the same parts, alone, on copies of the parameters.

    order   the numbers of the parts that step the groups, in the order in which they were added
    """

    def __init__(self, seed: int, backend: str, folder: Path) -> None:
        self.file = folder / "several.pt"
        self.draw, self.backend, self.steps, self.hooked = random.Random(seed), backend, 0, 0
        self.rules, self.plan = RULES[seed % 3], ["fp32", "int8_split24"][seed // 3 % 2]
        self.whole = self.made(model())
        parts = list(self.whole.parts.values())
        named = dict(model().named_parameters())
        self.alone: list[Any] = [
            cls([(name, named[name]) for name in names], plan=self.plan, backend=backend, **given)
            for (cls, given), names in zip(self.rules.values(), self.whole.matched.values(), strict=True)
        ]
        self.order = list(range(len(parts)))
        self.schedulers: list[tuple[Any, list[Any]]] = []
        self.saved: Any = None

    def made(self, net: nn.Module) -> Any:
        rules = {key: {"rule": cls, **given} for key, (cls, given) in self.rules.items()}
        return optgen.make(rules, net, plan=self.plan, backend=self.backend)

    def groups(self) -> list[dict[str, Any]]:
        left = [iter(opt.param_groups) for opt in self.alone]
        return [next(left[number]) for number in self.order]

    def both(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        groups = zip(self.whole.param_groups, self.groups(), strict=True)
        return [pair for ours, theirs in groups for pair in zip(ours["params"], theirs["params"], strict=True)]

    def owner(self, p: nn.Parameter) -> Any:
        return next(opt for opt in self.alone if any(p is q for q in params_of(opt)))

    # -- what a program does

    def step(self) -> None:
        self.steps += 1
        missing = self.draw.random() < 0.3
        for p, q in self.both():
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(self.draw.randrange(10**6)))
            p.grad = q.grad = None if missing and self.draw.random() < 0.5 else g
        closure = (lambda: 3.0) if self.draw.random() < 0.3 else None
        assert self.whole.step(closure) == (None if closure is None else 3.0)
        for opt in self.alone:
            opt.step()
        for together, apart in self.schedulers:
            together.step()
            for scheduler in apart:
                scheduler.step()

    def clear(self) -> None:
        self.whole.state.clear()
        for opt in self.alone:
            opt.state.clear()

    def new_state(self) -> None:
        kept = self.draw.random() < 0.5
        before = self.whole.state
        self.whole.state = before if kept else defaultdict(dict)
        for opt in self.alone:
            opt.state = opt.state if kept else defaultdict(dict)

    def pop(self) -> None:
        p, q = self.draw.choice(self.both())
        other = self.owner(q)
        way = self.draw.randrange(4)
        if way == 0:
            assert bits(self.whole.state.pop(p, None)) == bits(other.state.pop(q, None))
        elif way == 1:
            self.whole.state[p], other.state[q] = {}, {}
        elif way == 2 and q in other.state:
            del self.whole.state[p], other.state[q]
        else:
            self.whole.state[p]["mine"] = other.state[q]["mine"] = torch.ones(2)

    def add(self) -> None:
        number = self.draw.randrange(len(self.alone))
        name, shape = f"new{len(self.order)}", self.draw.choice([(3, 5), (4, 4)])
        p, q = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(shape))
        label = list(self.whole.parts.values())[number].defaults[RULE]
        way, rate = self.draw.randrange(4), self.draw.choice([1e-2, 1e-3])
        self.alone[number].add_param_group({"params": [(name, q)], "lr": rate})
        whole_group = {**self.alone[number].param_groups[-1], "params": [p], RULE: label}
        if way == 0:
            self.whole.add_param_group({"params": [(name, p)], "lr": rate, RULE: label})
        elif way == 1:
            list(self.whole.parts.values())[number].add_param_group({"params": [(name, p)], "lr": rate})
        elif way == 2:
            self.whole.param_groups.append(whole_group)
        else:
            self.whole.param_groups += [whole_group]
        self.order.append(number)

    def drop(self) -> None:
        last = len(self.order) - 1
        if last < 3:
            return
        at = self.draw.randrange(3, last + 1)
        place = self.order[:at].count(self.order[at])
        for p, q in zip(self.whole.param_groups[at]["params"], self.groups()[at]["params"], strict=True):
            self.whole.state.pop(p, None)
            self.owner(q).state.pop(q, None)
        if self.draw.random() < 0.5:
            self.whole.param_groups = [g for k, g in enumerate(self.whole.param_groups) if k != at]
        else:
            del self.whole.param_groups[at]
        del self.alone[self.order[at]].param_groups[place]
        del self.order[at]

    def rates(self) -> None:
        for ours, theirs in zip(self.whole.param_groups, self.groups(), strict=True):
            ours["lr"] = theirs["lr"] = self.draw.choice([1e-3, 2e-3])

    def schedule(self) -> None:
        if len(self.schedulers) < 2:
            kind = self.draw.choice([lambda opt: lr_scheduler.ExponentialLR(opt, 0.8), every_second])
            self.schedulers.append((kind(self.whole), [kind(opt) for opt in self.alone]))

    def hook(self) -> None:
        self.whole.register_step_post_hook(lambda *_: setattr(self, "hooked", self.hooked + 1))

    def load_itself(self) -> None:
        self.whole.load_state_dict(copy.deepcopy(self.whole.state_dict()))
        for opt in self.alone:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))

    def save(self) -> None:
        self.saved = copy.deepcopy((self.order, self.whole.state_dict(), [opt.state_dict() for opt in self.alone]))

    def load(self) -> None:
        if self.saved is not None and self.saved[0] == self.order:
            self.whole.load_state_dict(self.saved[1])
            for opt, own in zip(self.alone, self.saved[2], strict=True):
                opt.load_state_dict(own)

    def through_a_file(self) -> None:
        optgen.save_checkpoint(self.file, self.whole)
        optgen.load_checkpoint(self.file, self.whole)

    def copy(self) -> None:
        self.whole, self.alone = copy.deepcopy((self.whole, self.alone))
        self.schedulers = []  # those of the others

    def agree(self) -> None:
        for p, q in self.both():
            assert bits(p) == bits(q)
            assert bits(dict(self.whole.state.get(p, {}))) == bits(dict(self.owner(q).state.get(q, {})))
        assert len(self.whole.state) == sum(len(opt.state) for opt in self.alone)
        for ours, theirs in zip(self.whole.param_groups, self.groups(), strict=True):
            assert {k: v for k, v in ours.items() if k not in ("params", RULE)} == {
                k: v for k, v in theirs.items() if k != "params"
            }
        assert alike(self.whole.full_weights(), full(self))


def every_second(opt: Any) -> Any:
    return lr_scheduler.StepLR(opt, 2, 0.5)


def full(pair: Pair) -> list[Any]:
    left = [iter(opt.full_weights()) for opt in pair.alone]
    return [next(left[n]) for n, g in zip(pair.order, pair.groups(), strict=True) for _ in g["params"]]


KINDS = [
    Pair.clear, Pair.new_state, Pair.pop, Pair.add, Pair.add, Pair.drop, Pair.rates, Pair.schedule, Pair.hook,
    Pair.load_itself, Pair.save, Pair.load, Pair.through_a_file, Pair.copy,
]  # fmt: skip


@pytest.mark.parametrize("seed", [*range(24), *(pytest.param(n, marks=pytest.mark.full) for n in range(24, 240))])
@pytest.mark.filterwarnings(
    "ignore:.*the checkpoint has no state for", "ignore:.*none of its .* has had a gradient yet"
)
def test_programs_have_the_bits_of_the_parts_alone(seed: int, tmp_path: Path) -> None:
    pair, count = Pair(seed, BACKENDS[seed % 2], tmp_path), []
    handle = register_optimizer_step_post_hook(lambda opt, *_: count.append(opt) if opt is pair.whole else None)
    try:
        for _ in range(12):
            pair.step()
            pair.draw.choice(KINDS)(pair)
            pair.agree()
        assert len(count) == pair.steps
    finally:
        handle.remove()


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


# -- frameworks' ways -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("number", range(3))
def test_a_distributed_checkpoint_goes_on_with_the_same_bits(number: int, flat: bool) -> None:
    """Also where states were read, or a user keeps something in one, before there were any."""
    rules = {key: {"rule": cls, **given} for key, (cls, given) in RULES[number].items()}
    form = StateDictOptions(flatten_optimizer_state_dict=flat)
    net = model()
    opt: Any = optgen.make(rules, net, plan="int8_split24", backend="reference")
    train(net, opt, 3)
    opt.state[net[0].weight]["own"] = torch.ones(2)
    saved = copy.deepcopy(get_optimizer_state_dict(net, opt, options=form))
    other = copy.deepcopy(net)
    again: Any = optgen.make(rules, other, plan="int8_split24", backend="reference")
    assert not any(again.state[p] for p in other.parameters())
    again.state[other[0].weight]["own"] = torch.zeros(2)
    set_optimizer_state_dict(other, again, saved, options=form)
    train(net, opt, 3)
    train(other, again, 3)
    assert alike(list(net.state_dict().values()), list(other.state_dict().values()))
    assert alike(opt.state_dict(), again.state_dict())


def train(net: nn.Module, opt: Any, steps: int) -> None:
    for step in range(steps):
        net(torch.randn(8, 8, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        opt.step()
        opt.zero_grad()
