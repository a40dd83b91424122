"""Sharpness-aware steps around an optimizer, beside another package's."""

import copy
from typing import Any

import pytest
import pytorch_optimizer
import torch

import optgen
from optgen import SAM
from optgen.base.errors import UserError
from optgen.driver.load import find_spec
from optgen.lang import hyper, input, optimizer, wrapper, wrappers
from optgen.optim import AdamW
from tests.harness import same_bits


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()


def closure_of(net: torch.nn.Module, opt: Any, t: int) -> Any:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    x = x.to(next(net.parameters()).dtype)

    @torch.enable_grad()
    def closure() -> Any:
        opt.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("way", ["SAM", "sam", "asam", "gsam"])
def test_steps_are_those_of_another_package(way: str) -> None:
    """`SAM` in fp64, but for their norms, which are in fp32: each moves weights by 2^-24 of rho or so.

    Rules in fp32, of sums of less than 64 terms: of ten steps, each of two gradients, an error of 2^-24 in each term.
    """
    ours, theirs = model(), model()
    alpha, sgd, near = {"alpha": 0.3} if way == "gsam" else {}, {"lr": 0.1, "momentum": 0.9}, 2.0**-20
    if way == "SAM":
        base: Any = torch.optim.SGD(ours.parameters(), **sgd)
        sam: Any = SAM(base, rho=0.1)
    else:
        near, cls = 10 * 2 * 64 * 2.0**-24, optgen.compile(find_spec(f"{way}(sgd)"), plan="fp32")
        sam = base = cls(ours.float().parameters(), rho=0.1, **sgd, **alpha)
        theirs.load_state_dict(ours.state_dict())
    if way == "gsam":
        inner = torch.optim.SGD(theirs.parameters(), **sgd)
        rho = type("Rho", (), {"step": lambda self: 0.1})()
        other = pytorch_optimizer.GSAM(theirs.parameters(), inner, theirs, rho, **alpha)
    else:
        other = pytorch_optimizer.SAM(theirs.parameters(), torch.optim.SGD, rho=0.1, adaptive=way == "asam", **sgd)
    for t in range(10):
        loss = sam.step(closure_of(ours, base, t))
        closure = closure_of(theirs, other, t)
        if way == "gsam":
            other.step(lambda closure=closure: (None, closure()))
        else:
            first = closure()
            assert float(loss.detach()) == pytest.approx(float(first.detach()), rel=near)
            other.step(closure)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, rtol=near, atol=0.1 * near)


def test_rules_of_two_phases_refuse_what_would_leave_one_out() -> None:
    net = torch.nn.Linear(4, 3)
    opt = optgen.make("sam(adamw)", net, plan="fp32", rho=0.0)
    for act in (opt.step, opt.second_step, opt.release_gradients):
        with pytest.raises(RuntimeError, match="first_step"):
            act()
    net(torch.ones(4)).sum().backward()
    before = net.weight.detach().clone()
    opt.first_step()
    assert same_bits(before, net.weight.detach())  # of the rate in the group
    opt.train()
    copying = (opt.dense_state_dict, opt.full_weights, lambda: copy.deepcopy(opt), opt.eval)
    for act in (opt.step, opt.state_dict, opt.first_step, lambda: opt.load_state_dict({}), *copying):
        with pytest.raises(RuntimeError, match=r"second_step\(\)"):
            act()
    with pytest.raises(ValueError, match=r"optgen.SAM\(opt, rho=...\) goes around them"):
        optgen.make({"weight": "sam(adamw)", "*": "adamw"}, net)
    with pytest.raises(TypeError, match=r"expected an optimizer, got Linear: write SAM\(AdamW"):
        SAM(net)
    with pytest.raises(UserError, match="gsam and sam_adamw both have a first step"):
        find_spec("gsam(sam(adamw))")
    with pytest.raises(UserError, match="the ascent adamw has states or flags"):
        wrapper(ascent=find_spec("adamw"))


@pytest.mark.parametrize("rule", ["schedule_free_adamw", {"weight": "schedule_free_adamw", "*": "adamw"}], ids=str)
def test_there_is_no_first_step_in_evaluation(rule: Any) -> None:
    net = torch.nn.Linear(96, 64)
    opt = optgen.make(rule, net, lr=0.1, plan="fp32")
    sam = SAM(opt)
    for _ in range(3):
        for step in (sam.first_step, sam.second_step):
            net(torch.ones(2, 96)).square().mean().backward()
            step()
    trained = net.weight.detach().clone()
    opt.eval()
    assert not same_bits(net.weight.detach(), trained)
    with pytest.raises(RuntimeError, match=r"first_step\(\) in evaluation: call train\(\)"):
        sam.first_step()
    opt.train()
    assert same_bits(net.weight.detach(), trained)


@pytest.mark.parametrize("of_rule", [True, False])
def test_gradients_are_unscaled_between_the_steps_alone(of_rule: bool) -> None:
    """The bits of steps without a scaler, since the scale is a power of 2; one weight freezes after a step."""
    drawn = torch.randn(2, 2, 8, 5, generator=torch.Generator().manual_seed(5))
    ends = []
    for unscaled in ("without", "never", "between"):
        first, second = drawn if unscaled == "without" else 1024 * drawn
        p, q = (torch.nn.Parameter(torch.ones(8, 5)) for _ in range(2))
        sam: Any = optgen.compile(find_spec("gsam(sgd)"), plan="fp32")([p, q], lr=0.1, rho=0.7, alpha=0.3)
        sam = sam if of_rule else SAM(torch.optim.SGD([p, q], lr=0.1), rho=0.7)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        for t in range(2):
            p.grad, q.grad = first[0].clone(), None if t else first[1].clone()
            sam.first_step(scaler if unscaled == "between" else None)
            p.grad, q.grad = second[0].clone(), None if t else second[1].clone()
            if unscaled == "between":
                scaler.unscale_(sam.optimizer)
            sam.second_step(None if unscaled == "without" else scaler)
            if unscaled != "without":
                scaler.update()
            q.requires_grad_(False)
        ends.append(p.detach().clone())
    assert same_bits(ends[0], ends[1]) and same_bits(ends[0], ends[2])
    p.grad = first[0].clone()
    scaler.unscale_(sam.optimizer)
    for given in (scaler, None):
        with pytest.raises(RuntimeError, match=r"between first_step\(scaler\) and second_step\(scaler\)"):
            _ = sam.first_step(given), sam.second_step(scaler)
        assert same_bits(p.detach(), ends[0])


def test_weights_come_back_from_an_error_in_the_second_closure() -> None:
    net = model().float()
    opt = optgen.make("sam(adamw)", net, plan="fp32", rho=0.5)
    before, calls = [p.detach().clone() for p in net.parameters()], iter([None])

    def closure() -> None:
        backward(net, 0)
        next(calls)

    with pytest.raises(StopIteration):
        opt.step(closure)
    assert opt.state_dict()["state"] == {}
    opt.first_step()
    assert not same_bits(before[0], net[0].weight.detach())
    opt.zero_grad()
    opt.second_step()  # of no gradients
    assert all(same_bits(p.detach(), x) for p, x in zip(net.parameters(), before, strict=True))
    with pytest.raises(TypeError, match="SamAdamW has first_step"):
        SAM(opt)


@optimizer(cite="none: an input whose name ends as that of the first gradient does")
def own_first(p, g, my_first_grad=input(), first_grad=input(), *, lr=hyper(1.0, ge=0)):
    p = p - lr * g * my_first_grad * first_grad
    return p


def test_inputs_of_the_rule_are_its_own() -> None:
    p = torch.nn.Parameter(torch.ones(4))
    opt = optgen.compile(wrappers.gsam(own_first), plan="fp32")([p], rho=0.0)
    opt.feed(my_first_grad=[torch.full((4,), 7.0)], first_grad=[torch.ones(4)])
    for g, step in ((3.0, opt.first_step), (1.0, opt.second_step)):
        p.grad = torch.full((4,), g)
        step()
    assert p.eq(-6).all()


def test_steps_out_of_order_and_released_gradients_are_refused() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    opt = AdamW([p])
    sam = SAM(opt)
    with pytest.raises(RuntimeError, match="second_step"):
        sam.second_step()
    p.grad = torch.ones(3)
    sam.first_step()
    for step in (opt.step, sam.first_step):
        with pytest.raises(RuntimeError, match="the weights are moved"):
            step()
    p.grad = torch.ones(3)
    sam.second_step()
    handle = opt.release_gradients()
    with pytest.raises(RuntimeError, match="released"):
        sam.first_step()
    handle.remove()
    with pytest.raises(ValueError, match="rho"):
        SAM(opt, rho=-1.0)


def backward(net: Any, t: int, scale: float = 1.0) -> None:
    """Add up the gradients of two micro-batches."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(t))
    for part in x.to(next(net.parameters()).dtype).chunk(2):
        (scale / 2 * net(part).float().square().mean()).backward()


def test_an_infinity_in_the_first_gradient_makes_a_plain_step_and_in_the_second_none() -> None:
    net = model().float()
    sam = SAM(AdamW(net.parameters(), lr=1e-3, plan="fp32"), rho=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    before = [p.detach().clone() for p in net.parameters()]
    for bad in (1, 0):
        for i in range(2):
            backward(net, 9, scaler.get_scale())
            next(net.parameters()).grad[0, 0] = torch.inf if i == bad else 0.0
            sam.second_step(scaler) if i else sam.first_step()
            stays = all(same_bits(p.detach(), x) for p, x in zip(net.parameters(), before, strict=True))
            assert stays == ((bad, i) in ((1, 1), (0, 0)))
        scaler.update()
        sam.optimizer.zero_grad()


def test_moved_weights_are_neither_saved_nor_evaluated() -> None:
    net = torch.nn.Linear(96, 96).bfloat16()
    several = optgen.make({"weight": "schedule_free_adamw", "*": "adamw"}, net, lr=1e-2)
    average = several.parts["weight"]
    for opt in (several, average, torch.optim.AdamW(net.parameters())):
        sam = SAM(opt, rho=1.0)
        for step in (sam.first_step, sam.second_step):
            net(torch.ones(2, 96).bfloat16()).float().square().mean().backward()
            before = net.weight.detach().clone()
            step()
            if step == sam.first_step:
                with pytest.raises(RuntimeError, match="second_step"):
                    opt.state_dict()
                for part in getattr(opt, "_members", ()):
                    with pytest.raises(RuntimeError, match="second_step"):
                        part.eval()
        assert not same_bits(net.weight.detach(), before)
        if opt is several:
            sam.first_step()
            with pytest.raises(RuntimeError, match="second_step"):
                average.master_state_dict(net)
            sam.second_step()
        opt.zero_grad()


def test_16_bit_weights_are_moved_right_in_the_mean() -> None:
    """The mean of 96^2 moves by chance, of one ulp of 2^-7 or none, has a deviation below 2^-8 / 96."""
    p = torch.nn.Parameter(torch.ones(96, 96).bfloat16())
    p.grad = torch.ones_like(p)
    optgen.compile(find_spec("sam(adamw)"))([p], rho=0.096).first_step()
    assert abs(p.double().mean() - 1.001) <= 5 * 2.0**-8 / 96
