"""Inputs: further values per element that a user feeds."""

import copy
import linecache
import random
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import optgen
from optgen.base.errors import UserError
from optgen.driver.compile import compile as compiled
from optgen.lang import flag, hyper, input, optimizer
from optgen.optim import AdaHessian, Sophia
from tests.harness import same_bits


def freed(x: torch.Tensor) -> bool:
    return bool(x.untyped_storage().nbytes() == 4 < 4 * x.numel() and x.eq(0).all())


def test_an_input_is_fed_for_one_step_or_kept() -> None:
    p = torch.nn.Parameter(torch.ones(4, 3))
    p.grad = torch.ones(4, 3)
    opt = AdaHessian([("w", p)], plan="fp32")
    with pytest.raises(RuntimeError, match=r"'hessian' of parameter 'w'.*opt\.feed\(hessian=...\)"):
        opt.step()
    assert p.eq(1).all() and not opt.state.get(p)
    opt.feed(hessian=lambda x: torch.ones_like(x))
    assert opt.memory().states["hessian"] == 48
    opt.step()
    assert freed(opt.state[p]["hessian"]) and opt.memory().states["hessian"] == 0
    assert opt.state_dict()["state"][0]["hessian"].is_contiguous()  # torch.distributed.checkpoint reads into it
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert freed(opt.state[p]["hessian"])
    with pytest.raises(RuntimeError, match="was not fed"):
        opt.step()
    opt.feed(keep=True, hessian={p: torch.full((4, 3), 2.0)})
    for _ in range(2):
        opt.step()
    other = AdaHessian([("w", torch.nn.Parameter(p.detach().clone()))], plan="fp32")
    (q,) = other.param_groups[0]["params"]
    q.grad = p.grad
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for o in (opt, other):  # a checkpoint has what was kept
        o.step()
        assert not freed(o.state[o.param_groups[0]["params"][0]]["hessian"])
    assert same_bits(p.detach(), q.detach())


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"hess": [torch.ones(4, 3)]}, TypeError, "its inputs: hessian"),
        ({"hessian": [torch.ones(4, 3)] * 2}, ValueError, "2 tensors, and 1 parameters"),
        ({"hessian": [torch.ones(3, 4)]}, ValueError, r"must be \[4, 3\] on cpu, got \[3, 4\]"),
        ({"hessian": [torch.ones(4, 3, dtype=torch.int32)]}, TypeError, "floating tensor"),
        ({"hessian": [torch.ones(4, 3, device="meta")]}, ValueError, "on meta"),
        ({"hessian": {torch.ones(4, 3): torch.ones(4, 3)}}, ValueError, "parameters of no group"),
        ({"hessian": 3}, TypeError, "must be a list, a dict or a function of parameters, not 3"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(given: Any, error: type, words: str) -> None:
    opt = Sophia([torch.nn.Parameter(torch.ones(4, 3))])
    with pytest.raises(error, match=words):
        opt.feed(**given)
    assert not opt.state


def test_flags_follow_inputs_of_the_rule() -> None:
    def lost(p, g, mask=input(), *, lr=hyper(0.1), fresh=flag(fed="masks")):
        p = p - lr * g * mask
        return p

    with pytest.raises(UserError, match="E110"):
        optimizer(cite="none")(lost)


FOLLOWED = {"one": {"x"}, "other": {"y"}, "two": {"x", "y"}, "three": {"x", "y", "z"}}
"""Flags, and the inputs that each follows; what no flag of a rule follows is fed at every step."""


def drawn_reads(draw: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
    """Return flags, and pairs of a condition of them and of a flag `on` and the input that is read under it."""

    def condition(depth: int) -> str:
        if not depth:
            return draw.choice([*flags, *flags, "on", "not on", f"not {draw.choice(flags)}"])
        return f"({condition(depth - 1)} {draw.choice(['and', 'and', 'or'])} {condition(depth - 1)})"

    flags = draw.sample(sorted(FOLLOWED), draw.randint(1, 3))
    reads = [(condition(draw.choice([0, 1, 1, 2])), draw.choice("xyz")) for _ in range(draw.randint(1, 2))]
    reads += [(flag, draw.choice(sorted(FOLLOWED[flag]))) for flag in flags if draw.random() < 0.5]
    free = set("xyz").difference(*(FOLLOWED[flag] for flag in flags))
    return flags, [*reads, *((f"not on and {' and '.join(flags)}", x) for x in "xyz"), *(("True", x) for x in free)]


def read_at(flags: list[str], reads: list[tuple[str, str]], fed: set[str], on: bool) -> list[str]:
    setting = {flag: FOLLOWED[flag] <= fed for flag in flags} | {"on": on}
    return [x for condition, x in reads if eval(condition, setting)]


@pytest.mark.parametrize("number", range(24))
def test_inputs_are_read_where_they_are_fed_and_wait_until_then(number: int) -> None:
    """Rules of drawn conditions: one that reads what may not be fed is refused; of others whole numbers are fed at
    drawn steps, of which each step adds up what the oracle says."""
    flags, reads = drawn_reads(draw := random.Random(number))
    lines = [f"    if {condition}:\n        p = p + {x}" for condition, x in reads]
    declared = [f'{flag}=flag(fed="{" and ".join(sorted(FOLLOWED[flag]))}")' for flag in flags]
    head = "def drawn(p, g, x=input(), y=input(), z=input(), *, lr=hyper(1.0), on=flag(False), "
    text = "\n".join([f"{head}{', '.join(declared)}):", *lines, "    p = p - lr * g", "    return p"])
    name = f"<drawn {number}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    made = {"input": input, "flag": flag, "hyper": hyper}
    exec(compile(text, name, "exec"), made)
    spec, always = optimizer(made["drawn"]), set("xyz").difference(*(FOLLOWED[flag] for flag in flags))
    patterns = [(set(fed) | always, on) for n in range(4) for fed in combinations("xyz", n) for on in (False, True)]
    if any(not fed.issuperset(read_at(flags, reads, fed, on)) for fed, on in patterns):
        with pytest.raises(UserError, match="E106"):
            spec.check()
        return
    on, p, waiting, total = draw.random() < 0.5, torch.nn.Parameter(torch.zeros(3)), dict[str, int](), 0
    opt = compiled(spec, "fp32")([p], on=on, backend="reference" if number % 6 else "cpp")
    for _ in range(6):
        given = {x: draw.randint(1, 99) for x in "xyz" if x in always or draw.random() < 0.4}
        opt.feed(**{x: [torch.full((3,), float(value))] for x, value in given.items()})
        waiting |= given
        read = read_at(flags, reads, set(waiting), on)
        total += sum(waiting[x] for x in read)
        p.grad = torch.zeros(3)
        opt.step()
        waiting = {x: value for x, value in waiting.items() if x not in read}
        assert p.eq(total).all() and {x for x in "xyz" if opt.state[p][f"{x}_fed"]} == {*waiting}


@pytest.mark.parametrize("rule", ["adahessian", "gsam(sgd)", "sam(sgd)"])
def test_torch_makes_states_of_what_was_not_fed(rule: str) -> None:
    """By its extra step, which changes no weight; a rate or a gradient that is not 0 is of a step of the user's."""
    net = torch.nn.Linear(96, 64).bfloat16()
    opt = optgen.make(rule, net, plan="fp32")
    before = [p.detach().clone() for p in net.parameters()]
    made = get_optimizer_state_dict(net, opt)["state"]["weight"]
    assert made.keys() == opt.state[net.weight].keys() >= {"step"}
    assert all(same_bits(p.detach(), x) for p, x in zip(net.parameters(), before, strict=True))
    for lr, value in ((0.0, 1.0), (0.1, 0.0)):
        opt = optgen.make(rule, net, plan="fp32", lr=lr)
        for p in net.parameters():
            p.grad = torch.full_like(p, value)
        with pytest.raises(RuntimeError, match=r"was not fed|takes a closure"):
            opt.step()


@pytest.mark.parametrize(("cls", "fed"), product((AdaHessian, Sophia), (False, True)))
def test_a_rate_below_0_is_refused_at_the_first_step(cls: Any, fed: bool) -> None:
    """Fed or not, in any group, and with the zero gradients with which torch has states made."""
    for number, value in product((0, 1), (0.0, 1.0)):
        params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        opt = cls([{"params": [p], "lr": 0.0} for p in params], plan="fp32")
        opt.param_groups[number]["lr"] = -1.0
        for p in params:
            p.grad = torch.full((3,), value)
        opt.feed(hessian=dict.fromkeys(params if fed else (), torch.ones(3)))
        with pytest.raises((RuntimeError, ValueError), match="lr must be >= 0, got -1" if fed else "lr must|not fed"):
            opt.step()
        assert not any("step" in kept for kept in opt.state.values()) and all(p.eq(1).all() for p in params)


@optimizer(cite="none: a mask of pruning")
def masked(p, g, mask=input(), *, lr=hyper(0.1, ge=0)):
    p = (p - lr * g) * mask
    return p


def test_a_mask_is_kept_in_fp32_beside_few_bits() -> None:
    p = torch.nn.Parameter(torch.linspace(-1, 1, 8192).view(64, 128).bfloat16())
    opt = compiled(masked, "int4_split24")([p], lr=0.1)
    mask = torch.arange(8192).view(64, 128) % 2
    opt.feed(keep=True, mask=[mask.float()])
    for _ in range(2):
        p.grad = torch.ones_like(p)
        opt.step()
    assert (p == 0).view(-1)[::2].all() and (p != 0).view(-1)[1::2].float().mean() > 0.99
    assert opt.state[p]["mask"].dtype is torch.float32


@pytest.mark.parametrize("capturable", [False, True])
def test_what_a_graph_reads_is_not_freed(capturable: bool) -> None:
    p = torch.nn.Parameter(torch.ones(4, 3))
    opt = AdaHessian([p], plan="fp32", backend="triton", capturable=capturable)
    opt.feed(hessian=torch.ones_like)
    p.grad = torch.ones(4, 3)
    opt.step()
    assert freed(opt.state[p]["hessian"]) != capturable


@pytest.mark.parametrize("lost", [["mask"], ["mask", "mask_fed"]])
def test_a_checkpoint_without_its_inputs_is_refused(lost: list[str]) -> None:
    opt = compiled(masked, "int8_split24")([("w", torch.nn.Parameter(torch.ones(60, 70).bfloat16()))])
    opt.feed(keep=True, mask=torch.ones_like)
    opt.param_groups[0]["params"][0].grad = torch.ones(60, 70).bfloat16()
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    for entry in saved["state"].values():
        for key in lost:
            del entry[key]
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=r"'w'.* mask: expected float32 \[60, 70\], it is missing"):
        opt.load_state_dict(saved)
    assert same_bits(opt.state_dict()["state"][0]["mask"], before["state"][0]["mask"])
