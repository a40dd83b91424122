"""Rules whose stages could get into each other's way: states handed on, sums that differ, groups that disagree.

Each rule is run by the eager reference and in C++, and held to the author's own function in fp64.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import optgen
from optgen.base.errors import UserError
from tests import harness

from optgen.lang import (  # isort: skip
    flag, hyper, lookahead, model_dot, model_norm, model_total, newton_schulz, norm, optimizer, row, row_sum,
    shape_flag, sqrt, state, tensor_state, where,
)  # fmt: skip
from optgen.lang.spec import Spec

BACKENDS = ("reference", "cpp")


@optimizer()
def row_history(p, g, n1=row(), n2=row(), *, lr=hyper(1e-2, ge=0), eps=hyper(1e-8, gt=0)):
    p = p - lr * g * n2
    n2 = n1
    n1 = sqrt(row_sum(g * g))
    p = p - lr * g / (n1 + 0.5 * n2 + eps)
    return p, n1, n2


@optimizer()
def swapped(p, g, c=tensor_state(init=1.0), d=tensor_state(init=2.0), *, lr=hyper(1e-2, ge=0)):
    size = norm(g)
    p = p - lr * (c + 2 * d) * g / (1 + size)
    old = c
    c = d
    d = old
    return p, c, d


@optimizer()
def two_gradients(p, g, last=state(), older=state(), *, lr=hyper(1e-2, ge=0)):
    p = p - lr * (g + 0.5 * last + 0.25 * older)
    older = last
    last = g
    return p, last, older


@optimizer()
def last_weight(p, g, last=state(init="param"), *, lr=hyper(1e-2, ge=0)):
    before = p
    p = p - lr * g + 0.5 * (p - last)
    last = before
    return p, last


@optimizer()
def named_like_arguments(p, g, m=state(), *, lr=hyper(1e-2, ge=0)):
    g_tensor = g / (norm(g) + 1e-8)
    few_sum = norm(m)
    m = 0.9 * m + g_tensor
    p = p - lr * m / (norm(m) + few_sum + 1e-8) - lr * g
    return p, m


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", [row_history, swapped, two_gradients, last_weight, named_like_arguments])
def test_states_that_are_handed_on_keep_their_old_value(spec: Spec, backend: str) -> None:
    draw = torch.Generator().manual_seed(3)
    start = torch.randn(40, 70, generator=draw)
    p = torch.nn.Parameter(start.clone())
    opt = optgen.compile(spec, plan="fp32")([p], plan="fp32", backend=backend)
    exact, states = start.double(), None
    for t in range(1, 5):
        g = torch.randn(40, 70, generator=draw)
        p.grad = g.clone()
        opt.step()
        exact, states, _ = spec.evaluate(exact, g.double(), t, states)
    # A few dozen roundings of terms no larger than the weight; a swapped state would be off by percents of a step.
    assert (p.detach() - exact).abs().max() <= 64 * 2.0**-24 * exact.abs().max()
    for name, value in states.items():
        kept = opt.state[p][name].double()
        assert (kept - value).abs().max() <= 64 * 2.0**-24 * value.abs().max(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_differs_between_groups_stays_inside_a_sum_over_the_model(backend: str) -> None:
    """`maximize` turns one group's gradients round before they are summed with the other's."""
    cls = optgen.compile("prodigy", plan="fp32")
    draw = torch.Generator().manual_seed(5)
    start = [torch.randn(20, 30, generator=draw), torch.randn(50, generator=draw)]
    steps = [[torch.randn(w.shape, generator=draw) for w in start] for _ in range(6)]

    def walk(turned: bool) -> tuple[list[torch.Tensor], set[float]]:
        a, b = (torch.nn.Parameter(w.clone()) for w in start)
        opt = cls([{"params": [a]}, {"params": [b], "maximize": turned}], plan="fp32", backend=backend, d0=1e-3)
        for first, second in steps:
            a.grad, b.grad = first.clone(), (-second if turned else second).clone()
            opt.step()
        return [a.detach(), b.detach()], {float(s["d"]) for s in opt.state.values()}

    (plain, d), (turned, e) = walk(False), walk(True)
    assert len(d) == len(e) == 1
    assert d == e
    assert all(torch.equal(x, y) for x, y in zip(plain, turned, strict=True))


@optimizer()
def wide_or_not(p, g, m=state(), *, lr=hyper(1e-2, ge=0), wide=shape_flag(lambda shape: len(shape) >= 2)):
    m = 0.9 * m + g
    if wide:
        p = p - lr * m / (model_total(abs(m)) + 1e-8)
        p = p - lr * g / (model_norm(g) + 1e-8)
    else:
        p = p - lr * g / (model_norm(g) + 1e-8)
        p = p - lr * m / (sqrt(model_norm(g * m)) + model_total(abs(m)) + 1e-8)
    return p, m


@optimizer()
def sum_for_vectors(p, g, *, lr=hyper(1.0, ge=0), wide=shape_flag(lambda shape: len(shape) >= 2)):
    if not wide:
        g = g / (model_norm(g) + 1e-8)
    p = p - lr * g
    return p


@pytest.mark.parametrize(
    ("spec", "backend", "said"),
    [
        *((wide_or_not, backend, "all groups need the same") for backend in BACKENDS),
        (sum_for_vectors, "reference", r"but parameter 0.* needs none: .*take it outside of `if` in the rule"),
    ],
)
def test_parameters_that_need_other_sums_are_refused_before_anything_changes(
    spec: Spec, backend: str, said: str
) -> None:
    params = [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(5))]
    opt = optgen.compile(spec, plan="fp32")(params, plan="fp32", backend=backend)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=said):
        opt.step()
    assert all(torch.equal(p.detach(), torch.ones_like(p)) for p in params)


def scaled(g: Any, size: Any, wide: bool) -> Any:
    """A sum of its own that only vectors use."""
    largest = model_total(abs(g))
    return g if wide else g * size / (size + largest)


@optimizer()
def sums_of_all(p, g, m=state(), *, lr=hyper(1.0, ge=0), wide=shape_flag(lambda shape: len(shape) >= 2)):
    """Two sums in another order of use, a third that depends on one of them, and one of a helper."""
    m = 0.5 * m + g
    one = model_norm(g) + 1e-8
    two = model_total(abs(m)) + 1e-8
    three = model_dot(m, g / one)
    by = two / one if wide else one / (1 + three) / two
    p = p - lr * by * scaled(g, one, wide)
    return p, m


@optimizer()
def sums_at_two_levels(p, g, *, lr=hyper(1.0, ge=0), wide=shape_flag(lambda shape: len(shape) >= 2)):
    """A first sum that matrices can take only after the second."""
    one = model_total(g * row_sum(g) if wide else g)
    two = model_total(p)
    p = p - lr * g * (one - 4 * two)
    return p


@optimizer()
def sums_that_vectors_have_once(p, g, *, lr=hyper(1.0, ge=0), wide=shape_flag(lambda shape: len(shape) >= 2)):
    """Two sums that are equal for vectors by chance, two sums of these, and one that is another's everywhere."""
    v = 3 * g if wide else g
    one = model_total(v)
    two = model_total(g)
    three = model_total(p * one)
    four = model_total(p * two)
    five = model_total(g)
    p = p - lr * g * (one - 2 * two + three - 3 * four + five)
    return p


@pytest.mark.parametrize(
    ("spec", "by"),
    [(sums_at_two_levels, 6 * 2 * 6 + 4 * 2 - 4 * 10), (sums_that_vectors_have_once, 44 - 40 + 10 * (44 - 60) + 20)],
)
@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_sums_over_the_model_are_taken_in_one_order(spec: Spec, by: float, backend: str) -> None:
    """The weights are whole numbers, of which no sum rounds."""
    params = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))]
    for p in params:
        p.grad = 2 * torch.ones_like(p)
    optgen.compile(spec, plan="fp32")(params, plan="fp32", backend=backend).step()
    assert all((p == 1 - 2 * by).all() for p in params)


def test_sums_over_the_model_that_are_always_equal_are_one() -> None:
    for wide in (True, False):
        assert len({node for node, *_ in sums_that_vectors_have_once.trace({"wide": wide}).sums}) == 4


def test_a_sum_over_the_model_in_both_branches_of_a_shape_is_refused() -> None:
    @optimizer()
    def of_branches(p, g, *, lr=hyper(1.0, ge=0), wide=shape_flag(lambda shape: len(shape) >= 2)):
        size = model_norm(g) if wide else model_norm(2 * g)
        p = p - lr * g / (size + 1)
        return p

    with pytest.raises(UserError, match=r"parameters of other shapes take a sum at .*, and all are added up"):
        of_branches.check()


@pytest.mark.parametrize("maths", ["strict", "fast"])
@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_a_sum_over_the_model_is_over_parameters_that_do_not_use_it(backend: str, maths: str) -> None:
    """The sums in numpy, fp64, over all parameters."""
    params = [torch.nn.Parameter(torch.ones(s)) for s in ((20, 6), (3,), (2, 2, 3), (70,))]
    opt = optgen.compile(sums_of_all, plan="fp32", maths=maths)(params, plan="fp32", backend=backend, lr=0.25)
    draw = np.random.default_rng(3)
    moment = [np.zeros(p.shape) for p in params]
    weight = [np.ones(p.shape) for p in params]
    for _ in range(2):
        grads = [draw.standard_normal(p.shape).astype(np.float32).astype(np.float64) for p in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.tensor(g, dtype=torch.float32)
        opt.step()
        moment = [0.5 * m + g for m, g in zip(moment, grads, strict=True)]
        one = np.sqrt(sum((g * g).sum() for g in grads))
        two = sum(abs(m).sum() for m in moment)
        three = sum((m * g / one).sum() for m, g in zip(moment, grads, strict=True))
        largest = sum(abs(g).sum() for g in grads)
        for k, g in enumerate(grads):
            step = two / one * g if g.ndim >= 2 else one / (1 + three) / two * g * one / (one + largest)
            weight[k] = weight[k] - 0.25 * step
    for p, w in zip(params, weight, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_sums_over_the_model_take_convolutions_and_nothing(backend: str) -> None:
    """Matrices of the first dimension, and tensors without elements: strict maths, the bits of the reference."""
    from optgen.lang import clipped
    from specs.muon import muon

    cls = optgen.compile(clipped(muon), plan="fp32", maths="strict")
    draw = torch.Generator().manual_seed(9)
    start = [torch.randn(s, generator=draw) for s in ((4, 3, 5, 2), (0, 3), (7,), (3, 6), (0,), (5,))]
    sides = {}
    for side in ("reference", backend):
        params = [torch.nn.Parameter(w.clone()) for w in start]
        sides[side] = params, cls(params, plan="fp32", backend=side)
    for _ in range(2):
        grads = [torch.randn(w.shape, generator=draw) for w in start]
        for params, opt in sides.values():
            for p, g in zip(params, grads, strict=True):
                p.grad = g.clone()
            opt.step()
    for p, q, w in zip(sides["reference"][0], sides[backend][0], start, strict=True):
        assert torch.equal(p, q)
        assert not p.numel() or not torch.equal(p.detach(), w)


def test_one_number_for_the_model_whatever_its_groups_say() -> None:
    cls = optgen.compile("prodigy", plan="fp32")
    params = [torch.nn.Parameter(torch.randn(6, 5)) for _ in range(3)]
    groups = [{"params": params[:1]}, {"params": params[1:2], "lr": 0.1}, {"params": params[2:], "d0": 1e-5}]
    opt = cls(groups, plan="fp32", d0=1e-3)
    for k in range(5):
        for p in params:
            p.grad = None if p is params[2] and k < 2 else torch.randn_like(p)
        opt.step()
        assert len({float(s["d"]) for s in opt.state.values()}) == 1


def test_a_wrapper_sees_the_names_of_tuples_parts() -> None:
    @optimizer()
    def inner(p, g, m=state(), *, lr=hyper(1e-2, ge=0), betas=hyper((0.1, 0.9), ge=0, lt=1)):
        alpha, beta = betas
        m = beta * m + alpha * g
        p = p - lr * m
        return p, m

    names = [h.name for h in lookahead(inner).hypers]
    assert names == ["lr", "betas", "lookahead_k", "lookahead_alpha"]


def averaging(plan: str = "fp32") -> tuple[list[torch.nn.Parameter], Any]:
    params = [torch.nn.Parameter(torch.randn(70, 80)), torch.nn.Parameter(torch.randn(9))]
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    opt = optgen.compile("schedule_free_sgd", plan=plan)(groups, plan=plan, lr=0.1)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        opt.step()
    return params, opt


def test_no_training_weights_are_loaded_while_other_weights_are_in_the_model() -> None:
    _, opt = averaging()
    saved = opt.state_dict()
    opt.eval()
    with pytest.raises((RuntimeError, ValueError), match=r"train\(\)"):
        opt.load_state_dict(saved)
    opt.train()
    opt.load_state_dict(copy.deepcopy(opt).state_dict())


def test_an_evaluation_that_fails_leaves_every_weight() -> None:
    params, opt = averaging()
    trained = [p.detach().clone() for p in params]
    opt.param_groups[1]["momentum"] = 0.0
    with pytest.raises(ValueError, match="momentum"):
        opt.eval()
    assert all(torch.equal(p, q) for p, q in zip(params, trained, strict=True))


@optimizer()
def orthogonal_everywhere(p, g, m=state(), *, lr=hyper(1e-2, ge=0), wide=shape_flag(lambda shape: len(shape) >= 2)):
    m = 0.9 * m + g
    p = p - lr * (newton_schulz(m) if wide else m)
    return p, m


@optimizer(matrix="first")
def orthogonal_outputs(p, g, m=state(), *, lr=hyper(1e-2, ge=0), wide=shape_flag(lambda shape: len(shape) >= 2)):
    m = 0.9 * m + g
    p = p - lr * (newton_schulz(m) if wide else m)
    return p, m


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("shape", [(6, 4), (3, 6, 4), (2, 3, 4, 6)], ids=str)
@pytest.mark.parametrize("spec", [orthogonal_everywhere, orthogonal_outputs], ids=["last", "first"])
def test_the_matrices_are_those_of_the_rule(spec: Spec, shape: tuple[int, ...], backend: str) -> None:
    """Each matrix by itself, in a rule that asks for nothing else of rows and columns."""
    made = torch.Generator().manual_seed(0)
    p, g = torch.randn(2, *shape, generator=made)
    param = torch.nn.Parameter(p.clone())
    opt = optgen.compile(spec, plan="fp32")([param], plan="fp32", backend=backend)
    param.grad = g.clone()
    opt.step()
    matrices = g.reshape((1, shape[0], -1) if spec is orthogonal_outputs else (-1, *shape[-2:]))
    wanted = torch.stack([newton_schulz(x) for x in matrices]).reshape(shape)
    torch.testing.assert_close(param.detach(), p - 1e-2 * wanted, rtol=0, atol=2.0**-22)
    torch.testing.assert_close(spec.evaluate(p, g, 1)[0], p - 1e-2 * wanted, rtol=0, atol=2.0**-22)


@optimizer()
def rows_at_times(p, g, *, lr=hyper(1e-2, ge=0), k=hyper(3, ge=1), sync=flag(every="k")):
    if sync:
        p = p - lr * g / (sqrt(row_sum(g * g)) + 1e-8)
    else:
        p = p - lr * g
    return p


def test_vectors_are_refused_where_any_step_needs_a_matrix() -> None:
    cls = optgen.compile(rows_at_times, plan="fp32")
    cls([torch.nn.Parameter(torch.ones(3, 2))], plan="fp32")
    with pytest.raises(ValueError, match="rows and columns"):
        cls([torch.nn.Parameter(torch.ones(3))], plan="fp32")


@optimizer()
def skips_spikes(p, g, m=state(), s=tensor_state(), *, lr=hyper(1e-2, ge=0)):
    n = norm(g)
    m = where(n > s + 1.0, m, 0.9 * m + g)
    s = 0.9 * s + 0.1 * n
    p = p - lr * m
    return p, m, s


@optimizer()
def near_gradient(p, g, prev=state(), *, lr=hyper(1e-2, ge=0)):
    n = norm(g + 0.5 * (g - prev))
    prev = g
    p = p - lr * g / (n + 1e-8)
    return p, prev


def test_the_gradient_is_not_read_back_in_8_bits() -> None:
    """A state that is the gradient itself may be stored early; the step goes on with the gradient."""
    cls = optgen.compile(near_gradient, plan="int8")
    p = torch.nn.Parameter(torch.zeros(80, 70))
    g = torch.randn(80, 70)
    p.grad = g.clone()
    cls([p], plan="int8", backend="reference", lr=1.0).step()
    exact = -g.double() / ((1.5 * g.double()).norm() + 1e-8)
    assert (p.detach() - exact).abs().max() <= 32 * 2.0**-24 * exact.abs().max()


def test_rules_that_choose_by_a_norm_compile_under_every_kind_of_plan() -> None:
    for plan in ("fp32", "int8_split24", "bf16_sr"):
        assert optgen.compile(skips_spikes, plan=plan)


def test_no_sum_is_left_to_atomics() -> None:
    """Their order would be that in which threads come by; every partial sum is one program's."""
    root = Path(__file__).parents[1]
    folders = root / "optgen" / "runtime" / "gpu", root / "optgen" / "runtime" / "cpu"
    files = [file for folder in folders for ending in ("*.py", "*.h") for file in folder.rglob(ending)]
    files += [file for ending in ("*.py", "*.h") for file in harness.texts("atomics", ending)]
    assert {"kernels.h", "triton.py", "stages.h", "prelude.py"} <= {file.name for file in files}
    assert [file for file in files if "atomic" in file.read_text().lower()] == []
