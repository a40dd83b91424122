"""`lr` of a group is the rate of all that it steps: schedules reach vectors beside matrices and groups under AdamW.

The oracle makes each step by an optimizer of its own that is made with that step's rates, worked out by hand, and has
the states of the step before.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import optgen
from optgen.base.errors import UserError
from optgen.lang import flag, hyper, optimizer, shape_flag
from tests import harness
from tests.test_standalone import optimizer as standalone

RULES = ("Muon", "NorMuon", "AdaMuon", "LowRankMuon", "PolarGrad", "SOAPMuon", "AdaGO")
PLANS = ("fp32", "bf16_sr", "int8_split24", "split32")
LR, ADAMW_LR = 0.02, 3e-3
SHAPES = {"hidden": (6, 8), "bias": (8,), "table": (10, 4), "own": (7, 3), "late": (5, 4), "late_bias": (5,)}

Change = Callable[[Any, int], Any]
"""(optimizer, step) -> the optimizer that goes on."""


def _reloaded(opt: Any) -> Any:
    """Load a state dict into an optimizer that was made with other rates; of other copies see tests/machine.py."""
    groups = [
        {"params": list(zip(g["param_names"], g["params"], strict=True)), "adamw": g["adamw"], "lr": 0.7}
        for g in opt.param_groups
    ]
    new = type(opt)(groups, lr=0.5, adamw_lr=0.25, plan=opt.defaults["plan"], backend=opt.defaults["backend"])
    new.load_state_dict(opt.state_dict())
    return new


def _scheduled(make: Callable[[Any], Any]) -> Callable[[Any], Change]:
    """Return a change that steps a scheduler of torch's."""

    def begin(opt: Any) -> Change:
        scheduler = make(opt)

        def step(opt: Any, t: int) -> Any:
            scheduler.step()
            return opt

        return step

    return begin


def _by_hand(opt: Any) -> Change:
    def step(opt: Any, t: int) -> Any:
        for k, group in enumerate(opt.param_groups):
            group["lr"] = [0.013, 0.0, 0.05, 1e-4][(t + k) % 4]
        return opt

    return step


BY_HAND = ("by hand", "constant")  # of the schedules; the others stay with the groups that they found

SCHEDULES: dict[str, Callable[[Any], Change]] = {
    "constant": lambda opt: lambda opt, t: opt,
    "by hand": _by_hand,
    "warm-up from 0": _scheduled(lambda opt: lr_scheduler.LambdaLR(opt, lambda t: min(1.0, t / 3))),
    "cosine": _scheduled(lambda opt: lr_scheduler.CosineAnnealingLR(opt, 5)),
    "one cycle": _scheduled(
        lambda opt: lr_scheduler.OneCycleLR(
            opt, [0.03, 2e-3, 5e-3], total_steps=20, cycle_momentum=False
        )
    ),
    "falls to 0": _scheduled(lambda opt: lr_scheduler.LinearLR(opt, 1.0, 0.0, 3)),
}


def _weights(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    make = torch.Generator().manual_seed(3)
    return {name: nn.Parameter(torch.randn(shape, generator=make).to(dtype)) for name, shape in SHAPES.items()}


def _named(weights: dict[str, nn.Parameter], *names: str) -> list[tuple[str, nn.Parameter]]:
    return [(name, weights[name]) for name in names]


class Oracle:
    """Weights and states, stepped by optimizers that know one step's rates."""

    def __init__(self, cls: Any, plan: str, backend: str, weights: dict[str, nn.Parameter]) -> None:
        self.cls, self.options = cls, {"plan": plan, "backend": backend}
        self.weights = {name: nn.Parameter(p.detach().clone()) for name, p in weights.items()}
        self.states: dict[str, Any] = {}

    def step(self, grads: dict[str, Tensor], names: list[str], lr: float, adamw_lr: float, adamw: bool) -> None:
        floor = {"eps": 5e-4 * (adamw_lr / ADAMW_LR)} if self.cls.SPEC == "adago" and not adamw else {}
        if lr == 0.0:
            adamw_lr = 0.0
        opt = self.cls(_named(self.weights, *names), lr=lr, adamw_lr=adamw_lr, adamw=adamw, **floor, **self.options)
        for name in names:
            p = self.weights[name]
            if name in self.states:
                opt.state[p] = self.states[name]
            p.grad = grads[name].to(p.dtype)
        opt.step()
        self.states |= {name: dict(opt.state[self.weights[name]]) for name in names}


def _follow(
    rule: str, plan: str, backend: str, schedule: str, copied: bool, tensors: bool, *, counted: bool = False
) -> None:  # fmt: skip
    """A run of seven steps; rates set by hand know a group added after the third and a copy made after the fourth."""
    cls = getattr(optgen.optim, rule)
    weights = _weights(torch.float32 if plan == "fp32" else torch.bfloat16)
    opt = cls(
        [
            {"params": _named(weights, "hidden", "bias")}, {"params": _named(weights, "table"), "adamw": True},
            {"params": _named(weights, "own"), "adamw": True, "lr": 5e-3},
        ],
        lr=torch.tensor(LR, dtype=torch.float64) if tensors else LR, adamw_lr=ADAMW_LR, plan=plan, backend=backend,
        capturable=counted,
    )  # fmt: skip
    bases = [LR, None, None]  # None: under AdamW, at the group's own lr
    assert [float(g["lr"]) for g in opt.param_groups] == [LR, ADAMW_LR, 5e-3]
    oracle = Oracle(cls, plan, backend, weights)
    change = SCHEDULES[schedule](opt)
    make = torch.Generator().manual_seed(5)
    for t in range(7):
        grads = {name: torch.randn(shape, generator=make) for name, shape in SHAPES.items()}
        for group, base in zip(opt.param_groups, bases, strict=True):
            for name, p in zip(group["param_names"], group["params"], strict=True):
                p.grad = grads[name].to(p.dtype)
            lr = float(group["lr"])
            adamw_lr = lr if base is None else ADAMW_LR * (lr / base)
            oracle.step(grads, group["param_names"], lr, adamw_lr, base is None)
        opt.step()
        for group in opt.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                assert harness.same_bits(p, oracle.weights[name]), (name, t)
        if t == 2 and schedule in BY_HAND:
            opt.add_param_group({"params": _named(weights, "late", "late_bias"), "lr": 0.01})
            bases.append(0.01)
        if t == 3 and copied and schedule in BY_HAND:
            opt = _reloaded(opt)
        opt = change(opt, t)


def _cases(rule: str, count: int) -> Iterator[tuple[str, str, bool, bool]]:
    """Draw (plan, schedule, reloaded, rates as tensors); over the rules every schedule comes."""
    draw, start = random.Random(rule), RULES.index(rule)
    for k in range(start, start + count):
        yield draw.choice(PLANS), list(SCHEDULES)[k % len(SCHEDULES)], k % 5 > 0, draw.random() < 0.3


@pytest.mark.parametrize("rule", RULES)
def test_everything_follows_lr(rule: str) -> None:
    for case in _cases(rule, 2):
        plan, *rest = case
        _follow(rule, plan, "reference", *rest)


@pytest.mark.parametrize(("rule", "backend"), [("Muon", "cpp"), ("Muon", "triton"), ("AdaGO", "cpp")])
def test_everything_follows_lr_in_kernels(rule: str, backend: str) -> None:
    _follow(rule, "fp32", backend, "by hand", True, False)
    if backend == "triton":  # steps that are counted on the device, which read lr there
        _follow(rule, "fp32", backend, "cosine", False, True, counted=True)


def test_an_optimizer_made_at_0_asks_for_the_lr_that_the_second_rate_belongs_to() -> None:
    def step(opt: Any) -> float:
        p.grad = torch.ones(4)
        opt.step()
        return float(p.detach().abs().max())

    p = nn.Parameter(torch.zeros(4))
    opt = optgen.optim.Muon([p], lr=0.0, plan="fp32", backend="reference")
    assert step(opt) == 0.0
    opt.param_groups[0]["lr"] = 0.01
    with pytest.raises(ValueError, match=r"made with lr=0.*adamw_lr.*'base_lr'"):
        step(opt)
    opt.param_groups[0]["base_lr"] = 0.02
    assert step(opt) == pytest.approx(5e-4, rel=0.1)
    thawed = optgen.optim.Muon([{"params": [p], "lr": 0.0}], lr=0.02, plan="fp32")
    assert thawed.param_groups[0]["base_lr"] == 0.02
    for wrong, error in ((-1.0, ValueError), ("much", TypeError)):
        with pytest.raises(error, match="base_lr"):
            optgen.optim.Muon([{"params": [p], "base_lr": wrong}])


@optimizer(cite="none: vectors have their own rate")
def two_rates(
    p, g, *, lr=hyper(0.1, ge=0), slow_lr=hyper(0.01, ge=0, scheduled=True, lr_if="slow"), slow=flag(False),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
):  # fmt: skip
    p = p - (slow_lr if slow or not matrix else lr) * g
    return p


def test_a_rule_of_ones_own_in_a_package_and_in_one_file(tmp_path: Path) -> None:
    w = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    cls: Any = optgen.compile(two_rates, plan="fp32")
    opt = cls([{"params": w[:1]}, {"params": w[1:], "slow": True}], backend="reference")
    for group in opt.param_groups:
        group["lr"] *= 0.5
    for p in w:
        p.grad = torch.ones(3)
    opt.step()
    assert [float(p.detach()[0]) for p in w] == pytest.approx([-0.005, -0.005])  # half of slow_lr; of lr, begun at it

    one: Any = standalone("muon/fp32", tmp_path)
    ps = [[nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)), nn.Parameter(torch.ones(5))] for _ in range(2)]
    package = optgen.optim.Muon(ps[1], lr=LR, plan="fp32", backend="reference")
    for own, opt in zip(ps, (one(ps[0], lr=LR), package), strict=True):
        for lr in (LR, 0.0, 0.013, LR):
            opt.param_groups[0]["lr"] = lr
            for p in own:
                p.grad = torch.full_like(p, 0.5)
            opt.step()
    assert all(harness.same_bits(a, b) for a, b in zip(*ps, strict=True))


def test_declarations_of_second_rates_are_checked() -> None:
    with pytest.raises(UserError, match="scheduled"):

        @optimizer(cite="none")
        def no_lr(p, g, *, rate=hyper(0.1, ge=0, scheduled=True)):
            p = p - rate * g
            return p

    with pytest.raises(UserError, match="lr_if"):

        @optimizer(cite="none")
        def no_flag(p, g, *, lr=hyper(0.1, ge=0), rate=hyper(0.1, ge=0, scheduled=True, lr_if="adamv")):
            p = p - lr * rate * g
            return p


APART = ("wte.weight", "transformer.wpe.weight", "lm_head.weight", "model.embed_tokens.weight", "output.weight")
HIDDEN = ("layers.3.output.weight", "blocks.0.attn.head.weight", "patch_embed.proj.weight", "wte_proj.weight")


def test_embeddings_and_heads_among_matrices_are_warned_of_once() -> None:
    p = nn.Parameter(torch.zeros(4, 6))
    for name in APART:
        with pytest.warns(UserWarning, match=f"{name.replace('.', '[.]')} as hidden matrices.*optgen.make"):
            optgen.optim.Muon([(name, p)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optgen.optim.Muon([(name, nn.Parameter(torch.zeros(4, 6))) for name in HIDDEN])
        optgen.optim.Muon([{"params": [("wte.weight", p)], "adamw": True}])
        optgen.optim.SOAPMuon([("wte.weight", p)], max_precond_dim=5)
        others = nn.Parameter(torch.zeros(8, 3, 4, 4)), nn.Parameter(torch.zeros(4))
        optgen.optim.Muon(list(zip(("embed.weight", "lm_head.bias"), others, strict=True)))
        optgen.optim.AdamW([("wte.weight", p)])
    net = nn.ModuleDict({"codes": nn.Embedding(9, 4), "hidden": nn.Linear(4, 4)})  # by the class of the module
    net["hidden"].register_module("codes", nn.Linear(3, 3, bias=False))  # of a name that has the other's in it
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optgen.optim.Muon(net.named_parameters(), module=net)
    assert len(found) == 1 and "steps codes.weight as hidden matrices" in str(found[0].message)
    line = str(found[0].message).partition("or write ")[2].partition(", which")[0].replace("model", "net")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made: Any = eval(line)  # the line that it says is one that runs
    assert {group["role"]: group["param_names"] for group in made.param_groups} == {
        "hidden": ["hidden.weight"], "head": ["hidden.codes.weight"], "embedding": ["codes.weight"],
        "vector": ["hidden.bias"],
    }  # fmt: skip
