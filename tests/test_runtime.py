"""The torch.optim contract, with a hand-written stand-in for a generated package (tests/runtime_standin)."""

from __future__ import annotations

import copy
import io
import math
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from runtime_standin import AdamW, int8
from runtime_standin.int8 import reference
from torch import Tensor, nn

from optgen.runtime import Hyper, Variant
from optgen.runtime.layout import layout, plans
from optgen.runtime.options import overrides
from optgen.runtime.records import keys
from optgen.runtime.records.join import Pair

ROOT = Path(__file__).resolve().parent.parent
INT8 = plans.load(AdamW, "int8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(), (1,), (7,), (8,), (9,), (0,), (3, 0), (5, 7), (4, 16), (2, 3, 5), (2, 4, 3, 3)]


@pytest.fixture(autouse=True, scope="module")
def no_provider() -> Iterator[None]:
    """The runtime alone: another test of this process may have registered the compiler."""
    before, plans.provider = plans.provider, None
    yield
    plans.provider = before


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def clones(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(opt: AdamW, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        opt.step()


def bits(value: object) -> object:
    """A state, parameter list or number in a form whose == means the same bits."""
    if isinstance(value, Tensor):
        plain = value.detach().contiguous()
        return str(plain.dtype), tuple(plain.shape), plain.flatten().view(torch.uint8).tolist() if plain.numel() else []
    if isinstance(value, dict):
        return {key: bits(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(v) for v in value]
    return value


def snapshot(opt: AdamW) -> object:
    """Everything an optimizer has: parameters, states and groups."""
    return bits([[g["params"] for g in opt.param_groups], opt.state_dict()])


# -- the numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_same_bits_as_torch(decay: float, amsgrad: bool, maximize: bool) -> None:
    ours = parameters()
    theirs = clones(ours)
    options: dict[str, Any] = {"lr": 3e-2, "weight_decay": decay, "amsgrad": amsgrad, "maximize": maximize}
    groups = lambda ps: [{"params": ps[:4]}, {"params": ps[4:], "lr": 1e-3, "betas": (0.8, 0.9)}]  # noqa: E731
    opt = AdamW(groups(ours), **options)
    oracle = torch.optim.AdamW(groups(theirs), foreach=False, **options)
    for step in range(20):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        for p in [*ours[step % 3 :: 3], *theirs[step % 3 :: 3]]:
            p.grad = None  # so that one group has parameters of unequal step counts
        opt.step()
        oracle.step()
    assert bits(ours) == bits(theirs)
    assert len({opt.state[p]["step"] for p in ours[:4]}) > 1
    for p, q in zip(ours, theirs, strict=True):
        for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
            assert torch.equal(opt.state[p][name], oracle.state[q][name])


@pytest.mark.parametrize("lr", [torch.tensor(0.01), torch.tensor([[0.01]]), np.float64(0.01), np.float32(0.01)])
def test_lr_of_any_kind_of_number(lr: Any) -> None:
    one, two = parameters(), parameters()
    opt = AdamW(one, lr=lr, betas=[np.float64(0.9), torch.tensor(0.5)], eps=torch.tensor(1e-8), seed=np.int64(3))
    group = opt.param_groups[0]
    assert (group["lr"] is lr) == isinstance(lr, Tensor)
    assert all(type(v) is float for v in (*group["betas"], group["eps"]))
    assert type(group["seed"]) is int
    train(opt, one, range(3))
    train(AdamW(two, lr=float(lr), betas=(0.9, 0.5), eps=float(torch.tensor(1e-8))), two, range(3))
    assert bits(one) == bits(two)


def test_options_are_read_at_every_step() -> None:
    one, two = parameters(), parameters()
    opt, other = AdamW(one, lr=1.0), AdamW(two, lr=1e-3)
    opt.param_groups[0]["lr"] = torch.tensor(1e-3)
    opt.param_groups[0]["betas"] = [0.9, 0.999]
    opt.param_groups[0]["weight_decay"] = np.float64(0.5)
    other.param_groups[0]["weight_decay"] = 0.5
    other.param_groups[0]["lr"] = float(torch.tensor(1e-3))
    train(opt, one, range(2))
    train(other, two, range(2))
    assert bits(one) == bits(two)


def test_mixed_dtypes_sizes_and_missing_gradients_in_one_optimizer() -> None:
    params = [p for dtype in DTYPES for p in parameters(dtype)]
    frozen = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    late = nn.Parameter(torch.ones(5, 5, dtype=torch.bfloat16))
    opt = AdamW([*params, frozen, late], lr=0.1)
    train(opt, params, range(2))
    assert late not in opt.state
    assert frozen not in opt.state
    give_gradients([*params, late], 7)
    opt.step()
    assert opt.state[late]["step"] == 1
    for p in params:
        state = opt.state[p]
        assert state["step"] == 3
        small = p.dtype != torch.float32 and p.numel() < int8.SMALL_NUMEL
        if p.dtype == torch.float32:
            assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        else:
            assert ("exp_avg_scale" not in state) == small
            assert state["decay_product"] == pytest.approx(0.9**3, rel=1e-15)
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "exp_avg_scale":
                assert value.shape == p.shape
    alone = AdamW([params[15]], lr=0.1)  # one step of the others leaves a parameter's own step as it is
    assert alone.param_groups[0]["plan"] == "int8"


def test_states_start_where_the_rule_says() -> None:
    p = nn.Parameter(torch.randn(4, 9).half())
    opt = AdamW([p], lr=0.0, weight_decay=0.0)
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.equal(p, before)
    assert torch.equal(opt.state[p]["weight_master"], before.float())
    assert (opt.state[p]["exp_avg"] == 128).all()
    assert opt.state[p]["exp_avg_scale"].shape == (4, 2)


@pytest.mark.parametrize("names", [False, True])
def test_what_a_kernel_is_given(names: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero states, scalars rounded to fp32 from fp64, and the keys of (seed, this step) and of the parameter."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(reference, "adamw_bfloat16", lambda *args: calls.append(bits(args)))  # type: ignore[arg-type]
    params = parameters(torch.bfloat16, [(4, 9), (3, 0), (2, 8)])
    given_params: Any = [(f"p{i}", p) for i, p in enumerate(params)] if names else params
    opt = AdamW(given_params, lr=0.1, betas=(0.3, 0.7), maximize=True, seed=5)
    train(opt, params, range(2))
    assert len(calls) == 4  # nothing for the empty one
    for i, call in enumerate(calls):
        step, number = i // 2 + 1, (0, 2)[i % 2]
        p = params[number]
        low, code, scale, square = call[2:6]
        blocks = -(-p.shape[1] // 8)
        assert low == bits(torch.zeros(p.shape, dtype=torch.int16))
        assert code == bits(torch.full(p.shape, 128, dtype=torch.uint8))
        assert scale == bits(torch.zeros(p.shape[0], blocks))
        assert square == bits(torch.zeros(p.shape))
        want = int8.rule.host(
            step, -1.0, lr=0.1, betas=(0.3, 0.7), eps=1e-8, weight_decay=1e-2, decay_product=0.3 ** (step - 1)
        )
        assert call[6:-2] == [float(np.float32(value)) for value in want[:-1]]
        assert call[-2:] == [keys.step_key(5, step), keys.stream_key(f"p{number}" if names else number)]
        assert opt.state[p]["step"] == 2
        assert opt.state[p]["decay_product"] == 0.3 * 0.3


@given(
    shape=st.lists(st.integers(0, 6), max_size=4).map(tuple),
    chunk=st.integers(1, 40),
)
def test_chunks_of_encode_and_decode_change_nothing(shape: tuple[int, ...], chunk: int) -> None:
    p = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16())
    values = {name: torch.rand(shape) for name in ("exp_avg", "exp_avg_sq")}
    variant = next(v for v in INT8.variants if v.param == "bfloat16" and not v.small)
    made = []
    for size in (2**24, chunk):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "CHUNK", size)
            fields = layout.encode(INT8, variant, p, values, variant.names)
            made.append((fields, layout.decode(INT8, variant, p, fields, ("p", *variant.states))))
    assert bits(made[0]) == bits(made[1])
    assert torch.equal(made[0][1]["p"], p.float())
    assert made[0][0]["exp_avg_scale"].shape == layout.field_shape(variant.fields[2], p.shape)


# -- memory layouts, gradients --------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "channels_last": lambda x: x.clone(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda x: torch.stack([x, x], dim=-1)[..., 0],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout_g", LAYOUTS)
@pytest.mark.parametrize("layout_p", LAYOUTS)
def test_strides_change_nothing(layout_p: str, layout_g: str, dtype: torch.dtype) -> None:
    (plain,), (p,) = parameters(dtype, [(2, 5, 3, 4)]), parameters(dtype, [(2, 5, 3, 4)])
    p = nn.Parameter(LAYOUTS[layout_p](p.detach()))
    stride = p.stride()
    opt, other = AdamW([p], lr=0.1), AdamW([plain], lr=0.1)
    for step in range(3):
        give_gradients([plain], step)
        assert plain.grad is not None
        p.grad = LAYOUTS[layout_g](plain.grad)
        opt.step()
        other.step()
    assert bits(p) == bits(plain)
    assert p.stride() == stride
    assert bits(opt.state[p]) == bits(other.state[plain])
    assert all(v.is_contiguous() for v in opt.state[p].values() if isinstance(v, Tensor))
    other.load_state_dict(opt.state_dict())
    assert bits(opt.state[p]) == bits(other.state[plain])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad", [*DTYPES, torch.float64])
def test_gradients_of_another_dtype(dtype: torch.dtype, grad: torch.dtype) -> None:
    values = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, 7.0, -1.0, 1.5, 9.0]).repeat(3, 1)  # exact in every dtype
    (p,), (q,) = parameters(dtype, [(3, 9)]), parameters(dtype, [(3, 9)])
    p.grad_dtype = None
    p.grad, q.grad = values.to(grad), values.to(dtype)
    kept, version = p.grad.clone(), p.grad._version
    AdamW([p], lr=0.1).step()
    AdamW([q], lr=0.1).step()
    assert bits(p) == bits(q)
    assert torch.equal(p.grad, kept)
    assert p.grad._version == version


@pytest.mark.parametrize("dtype", DTYPES)
def test_autograd_sees_the_step(dtype: torch.dtype) -> None:
    (p,) = parameters(dtype, [(3, 9)])
    opt = AdamW([p])
    loss = (p * p).sum()
    p.grad = torch.ones_like(p)
    version = p._version
    opt.step()
    assert p._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- what is refused, before anything changes --------------------------------------------------------------


def sparse(p: nn.Parameter) -> Tensor:
    values = torch.ones(1, *p.shape[1:], dtype=p.dtype)
    return torch.sparse_coo_tensor(torch.tensor([[0]]), values, p.shape, check_invariants=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_gradient_is_refused_before_anything_changes(dtype: torch.dtype) -> None:
    params = parameters(dtype, [(4, 5), (4, 5)])
    opt = AdamW(params)
    train(opt, params, range(1))
    before = snapshot(opt)
    params[1].grad = sparse(params[1])
    with pytest.raises(RuntimeError, match=r"sparse gradients: parameter 1 \("):
        opt.step()
    assert snapshot(opt) == before


def test_parameter_of_a_dtype_changed_later() -> None:
    model = nn.Linear(5, 5)
    opt = AdamW(model.named_parameters())
    model(torch.ones(5)).sum().backward()
    opt.step()
    before = snapshot(opt)
    model.to(torch.bfloat16)
    model(torch.ones(5).bfloat16()).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"'weight' \(bfloat16 \[5, 5\]\) was float32 when the optimizer was created"
    ):
        opt.step()
    model.to(torch.float32)
    assert bits(opt.state_dict()["state"]) == before[1]["state"]  # type: ignore[index]


def test_dtype_changed_after_a_copy() -> None:
    opt = copy.deepcopy(AdamW(parameters(shapes=[(5, 5)]), plan="int8"))
    (p,) = opt.param_groups[0]["params"]
    p.data = p.data.bfloat16()
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="was float32 when the optimizer was created"):
        opt.step()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s.pop("exp_avg_scale"), "exp_avg_scale: expected float32 [4, 2], it is missing"),
        (lambda s: s.update(exp_avg=s["exp_avg"].float()), "exp_avg: expected uint8 [4, 9], got float32 [4, 9]"),
        (lambda s: s.update(exp_avg_scale=s["exp_avg_scale"][:, :1]), "expected float32 [4, 2], got float32 [4, 1]"),
        (lambda s: s.update(exp_avg_sq=torch.ones(9, 4).t()), "expected a contiguous tensor"),
        (lambda s: s.update(exp_avg_sq=3.0), "exp_avg_sq: expected float32 [4, 9], got 3.0"),
        (lambda s: s.update(step=1.5), "step must be a whole number"),
    ],
)
def test_states_that_somebody_changed(change: Callable[[dict[str, Any]], object], text: str) -> None:
    params = parameters(torch.bfloat16, [(4, 9), (4, 9)])
    opt = AdamW(params)
    train(opt, params, range(1))
    change(opt.state[params[1]])
    before = bits(params)
    give_gradients(params, 1)
    with pytest.raises(RuntimeError) as caught:
        opt.step()
    assert text in str(caught.value)
    assert "parameter 1 (bfloat16 [4, 9])" in str(caught.value)
    assert bits(params) == before


def test_partial_and_cleared_states_are_filled() -> None:
    one, two = parameters(torch.bfloat16, [(4, 9)]), parameters(torch.bfloat16, [(4, 9)])
    opt, other = AdamW(one), AdamW(two)
    opt.state[one[0]]["exp_avg_sq"] = torch.zeros(4, 9)
    opt.state[one[0]]["step"] = torch.tensor(0.0)
    train(opt, one, range(3))
    train(other, two, range(3))
    assert snapshot(opt) == snapshot(other)
    opt.state.clear()
    train(opt, one, range(1))
    assert opt.state[one[0]]["step"] == 1


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda p: AdamW([p], lr=-1.0), ValueError, "AdamW: lr must be >= 0, got -1.0"),
        (lambda p: AdamW(None, lr=-1.0), ValueError, "lr must be"),  # type: ignore[arg-type]
        (lambda p: AdamW([p], lr=math.nan), ValueError, "lr must be >= 0, got nan"),
        (lambda p: AdamW([p], lr="fast"), TypeError, "lr must be a number, got 'fast'"),
        (lambda p: AdamW([p], lr=torch.ones(2)), TypeError, "lr must be a number"),
        (lambda p: AdamW([p], betas=(0.9, 1.0)), ValueError, r"betas\[1\] must be >= 0 and < 1, got 1.0"),
        (lambda p: AdamW([p], betas=(0.9,)), ValueError, "betas must be 2 numbers, got 1"),
        (lambda p: AdamW([p], betas=0.9), TypeError, "betas must be 2 numbers, got 0.9"),
        (lambda p: AdamW([p], amsgrad=1), TypeError, "amsgrad must be True or False, got 1"),
        (lambda p: AdamW([p], maximize=None), TypeError, "maximize must be True or False"),
        (lambda p: AdamW([p], seed=1.5), TypeError, "seed must be an int"),
        (lambda p: AdamW([p], backend="cuda"), ValueError, "backend must be one of auto, reference, triton"),
        (lambda p: AdamW([p], differentiable=True), ValueError, "does not support differentiable=True"),
        (lambda p: AdamW([p], capturable=1), TypeError, "capturable must be True or False"),
        (lambda p: AdamW([p], fused=True, foreach=True), ValueError, "fused and foreach cannot both be True"),
        (lambda p: AdamW([{"params": [p], "differentiable": True}]), ValueError, "does not support differentiable"),
        (lambda p: AdamW([{"params": [p], "eps": -1}]), ValueError, "eps must be >= 0, got -1.0"),
        (lambda p: AdamW([p], plan="in8"), ValueError, r"no plan 'in8': did you mean 'int8'\?"),
        (lambda p: AdamW([p], plan="q4"), ValueError, "optgen build adamw --plan q4"),
        (lambda p: AdamW([p], plan="absent"), ValueError, "optgen build adamw --plan absent"),
        (lambda p: AdamW([p], plan=8), TypeError, "plan must be a plan's name"),
        (lambda p: AdamW([p], plan={"float31": "fp32"}), ValueError, "unknown parameter dtype 'float31'"),
        (lambda p: AdamW([p.bfloat16().detach().requires_grad_()], plan="probe"), TypeError, "not built for bfloat16"),
        (lambda p: AdamW([p.double().detach().requires_grad_()]), TypeError, "no plan for float64 parameters"),
        (lambda p: AdamW([nn.Parameter(p.detach() * 1j)]), TypeError, "complex parameters"),
        (lambda p: AdamW([nn.Parameter(torch.ones(1).expand(3))]), ValueError, "its elements overlap"),
        (lambda p: AdamW([p, p]), ValueError, "contains a parameter twice"),
        (lambda p: AdamW([{"params": [p]}, {"params": [p]}]), ValueError, "more than one parameter group"),
        (lambda p: AdamW([]), ValueError, "empty parameter list"),
        (lambda p: AdamW(p), TypeError, "iterable of Tensors or dicts"),
        (lambda p: AdamW([{"params": {p}}]), TypeError, "ordered collections"),
        (lambda p: AdamW([p, 3]), TypeError, "can only optimize Tensors"),
        (lambda p: AdamW([p * 1]), ValueError, "non-leaf"),
        (lambda p: AdamW([("a", p), nn.Parameter(torch.ones(1))]), ValueError, "with/without names"),
    ],
)
def test_bad_arguments(make: Callable[[nn.Parameter], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(nn.Parameter(torch.ones(3)))


def test_triton_asked_for_where_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    params = parameters(shapes=[(3,)])
    opt = AdamW(params, backend="triton", plan="fp32")
    give_gradients(params, 0)
    before = bits(params)
    with pytest.raises(RuntimeError, match=r"does not run on cpu tensors .*TRITON_INTERPRET=1"):
        opt.step()
    opt.param_groups[0]["plan"] = "int8"
    with pytest.raises(RuntimeError, match="built without Triton kernels"):
        opt.step()
    assert bits(params) == before


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_parameters_of_which_ranks_hold_summands_are_refused() -> None:
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.tensor import DTensor, Partial, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        p = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
        with pytest.raises(ValueError, match="summand"):
            AdamW([p])
    finally:
        distributed.destroy_process_group()


def test_foreach_and_fused_are_accepted() -> None:
    params = parameters(shapes=[(3,)])
    opt = AdamW([{"params": params, "foreach": True, "fused": None}], foreach=True, fused=False)
    train(opt, params, range(1))


class Plain(AdamW):
    """A user's own class."""


@pytest.mark.parametrize("cls", [AdamW, Plain])
def test_warnings_point_at_the_line_of_the_user(cls: type[AdamW]) -> None:
    """Which is the place that Python prints, whichever way the call took from there."""
    params = parameters(shapes=[(3,), (4,)])
    opt = cls(params)
    give_gradients(params[:1], 0)
    opt.step()
    partly = opt.state_dict()  # the second parameter has made no step
    give_gradients(params, 0)
    opt.step()
    partly["state"][1] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        here = sys._getframe().f_lineno
        cls([{"params": params, "weigth_decay": 0.0}])
        opt.load_state_dict(partly)
        idle = cls(parameters(shapes=[(5,)]))
        idle.step(lambda: 0.0)
        idle.step()
    assert [(w.filename, w.lineno - here) for w in said] == [(__file__, 1), (__file__, 2), (__file__, 5)]


def test_misspelt_group_option_is_mentioned() -> None:
    with pytest.warns(UserWarning, match="'weigth_decay' has no effect; did you mean 'weight_decay'"):
        AdamW([{"params": parameters(shapes=[(3,)]), "weigth_decay": 0.0}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdamW([{"params": parameters(shapes=[(3,)]), "name": "body", "initial_lr": 0.1, "lr_scale": 0.5}])


# -- step: closure, hooks, schedulers ------------------------------------------------------------------------


def test_closure_runs_once_with_gradients_before_they_are_read() -> None:
    (p,) = parameters(shapes=[(3,)])
    opt = AdamW([p], lr=0.1)
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        opt.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss.item()

    before, want = p.detach().clone(), (p * p).sum().item()
    with torch.no_grad():
        assert opt.step(closure) == want
    assert calls == [True]
    assert not torch.equal(p, before)
    assert opt.step() is None


def test_hooks_run_as_torch_runs_them() -> None:
    params = parameters(shapes=[(3,)])
    opt = AdamW(params)
    seen: list[str] = []
    opt.register_step_pre_hook(lambda *a: seen.append("step pre"))
    opt.register_step_post_hook(lambda *a: seen.append("step post"))
    opt.register_state_dict_pre_hook(lambda o: seen.append("state pre"))
    opt.register_state_dict_post_hook(lambda o, s: seen.append("state post"))
    opt.register_load_state_dict_pre_hook(lambda o, s: seen.append("load pre"))
    opt.register_load_state_dict_post_hook(lambda o: seen.append("load post"))
    train(opt, params, range(1))
    opt.load_state_dict(opt.state_dict())
    assert seen == ["step pre", "step post", "state pre", "state post", "load pre", "load post"]

    def doubled(o: Any, s: dict[str, Any]) -> dict[str, Any]:
        return {**s, "param_groups": [{**g, "lr": 0.5} for g in s["param_groups"]]}

    opt.register_load_state_dict_pre_hook(doubled)
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0]["lr"] == 0.5


def test_schedulers() -> None:
    params = parameters()
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 1e-5}]
    opt = AdamW(groups, lr=1e-3)
    constant = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
    train(opt, params, range(1))
    constant.step()
    assert [g["lr"] for g in opt.param_groups] == [1e-3, 1e-5]
    opt = AdamW(params)
    one_cycle = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=10)
    other_params = parameters()
    other = torch.optim.AdamW(other_params, foreach=False)
    other_cycle = torch.optim.lr_scheduler.OneCycleLR(other, max_lr=1e-2, total_steps=10)
    seen = set()
    for step in range(8):
        give_gradients(params, step)
        give_gradients(other_params, step)
        opt.step()
        other.step()
        one_cycle.step()
        other_cycle.step()
        seen.add(opt.param_groups[0]["betas"][0])
    assert len(seen) == 8
    assert [g["lr"] for g in opt.param_groups] == [g["lr"] for g in other.param_groups]


def test_lr_tensor_that_a_scheduler_fills() -> None:
    one, two = parameters(), parameters()
    opt, other = AdamW(one, lr=torch.tensor(0.5)), AdamW(two, lr=0.5)
    for each, params in ((opt, one), (other, two)):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(each, 0.5)
        train(each, params, range(1))
        scheduler.step()
    assert isinstance(opt.param_groups[0]["lr"], Tensor)
    train(opt, one, range(2))
    train(other, two, range(2))
    assert bits(one) == bits(two)


def test_grad_scaler_skips_a_whole_step() -> None:
    params = parameters(shapes=[(4, 9)])
    opt = AdamW(params, plan="int8")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(params[0].sum()).backward()
    scaler.step(opt)
    scaler.update()
    before = snapshot(opt)
    assert opt.state[params[0]]["step"] == 1
    opt.zero_grad()
    scaler.scale((params[0] * math.inf).sum()).backward()
    scaler.step(opt)
    assert snapshot(opt) == before


# -- plans -----------------------------------------------------------------------------------------------------


def test_default_and_named_plans_are_recorded() -> None:
    fp32, bf16 = parameters(torch.float32, [(4, 9)]), parameters(torch.bfloat16, [(4, 9)])
    assert AdamW(fp32).param_groups[0]["plan"] == "fp32"
    assert AdamW(bf16).param_groups[0]["plan"] == "int8"
    assert AdamW([*fp32, *bf16]).param_groups[0]["plan"] == {"float32": "fp32", "bfloat16": "int8"}
    assert AdamW([*fp32, *bf16], plan="fp32").param_groups[0]["plan"] == "fp32"
    given_dict = AdamW([*fp32, *bf16], plan={"float32": "int8"})
    assert given_dict.param_groups[0]["plan"] == {"float32": "int8", "bfloat16": "int8"}
    groups = AdamW([{"params": fp32, "plan": "int8"}, {"params": bf16, "plan": "fp32"}]).param_groups
    assert [g["plan"] for g in groups] == ["int8", "fp32"]
    assert AdamW([nn.Parameter(torch.ones(3), requires_grad=False)]).param_groups[0]["plan"] is None


def test_provider_makes_plans_that_were_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def provider(cls: type, plan: str) -> Pair:
        asked.append((cls, plan))
        return Pair(plan, INT8.variants, reference=INT8.reference)

    monkeypatch.setattr(plans, "provider", provider)
    params = parameters(torch.bfloat16, [(4, 9)])
    opt = type("Mine", (AdamW,), {})(params, plan="custom")
    train(opt, params, range(2))
    assert asked == [(AdamW, "custom")]
    assert opt.param_groups[0]["plan"] == "custom"
    copy.deepcopy(opt).step()
    monkeypatch.setattr(plans, "provider", None)
    with pytest.raises(ValueError, match="optgen build adamw --plan custom"):
        AdamW(params, plan="custom")


def test_derived_flag_follows_its_hyper() -> None:
    (p,) = parameters(torch.bfloat16, [(4, 9)])
    opt = AdamW([p], weight_decay=0.0)
    assert opt.memory().parameters[0].kernel == "adamw_bfloat16"
    assert plans.variant(INT8, torch.bfloat16, False, (("amsgrad", False), ("has_decay", False))).flags == {
        "amsgrad": False,
        "has_decay": False,
    }
    with pytest.raises(ValueError, match=r"no kernel for bfloat16 parameters with .*'amsgrad': True"):
        AdamW([p], amsgrad=True).memory()


# -- random keys --------------------------------------------------------------------------------------------------


def test_keys_are_signed_words_and_differ() -> None:
    words = [keys.step_key(seed, step) for seed in (-1, 0, 1, 2**63) for step in range(1, 200)]
    words += [keys.stream_key(i) for i in range(500)] + [keys.stream_key(f"layer.{i}.weight") for i in range(500)]
    assert all(-(2**31) <= word < 2**31 for word in words)
    assert len(set(words)) >= len(words) - 2  # 2000 of 2^32: a clash is a matter of 1 in 2000
    assert keys.step_key(0, 1) == keys.step_key(2**64, 1)
    # a changed definition would change every stochastic checkpoint: these are part of the format
    assert (keys.step_key(0, 1), keys.stream_key(0), keys.stream_key("weight")) == STABLE


STABLE = (1210155648, -501176263, 539432606)


@settings(max_examples=20)
@given(order=st.permutations(range(6)), cut=st.integers(1, 5))
def test_named_parameters_draw_the_same_bits_in_any_order(order: list[int], cut: int) -> None:
    def run(numbers: list[int], at: int) -> dict[int, object]:
        params = parameters(torch.bfloat16, [(4, 9)] * 6)
        grads = torch.randn(6, 4, 9, generator=torch.Generator().manual_seed(5)).bfloat16()
        named = [(f"p{i}", params[i]) for i in numbers]
        opt = AdamW([{"params": named[:at]}, {"params": named[at:]}], lr=0.1)
        for _ in range(3):
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            opt.step()
        return {i: bits([params[i], opt.state[params[i]]]) for i in range(6)}

    assert run(order, cut) == run(list(range(6)), 3)


def test_seeds_and_streams_differ() -> None:
    def codes(seed: int, name: str) -> list[int]:
        (p,) = parameters(torch.bfloat16, [(8, 64)])
        opt = AdamW([(name, p)], seed=seed)
        train(opt, [p], range(1))
        return opt.state[p]["exp_avg"].flatten().tolist()

    assert codes(0, "a") == codes(0, "a")
    assert codes(0, "a") != codes(1, "a")
    assert codes(0, "a") != codes(0, "b")


# -- checkpoints ------------------------------------------------------------------------------------------------


def fresh(dtype: torch.dtype, names: bool = False, **options: Any) -> tuple[AdamW, list[nn.Parameter]]:
    params = parameters(dtype)
    given: Any = [(f"p{i}", p) for i, p in enumerate(params)] if names else params
    return AdamW([{"params": given[:5]}, {"params": given[5:], "lr": 0.01}], lr=0.1, **options), params


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", [False, True])
def test_resume_is_bit_identical(dtype: torch.dtype, names: bool) -> None:
    opt, params = fresh(dtype, names, seed=7)
    train(opt, params, range(3))
    saved = through_file(opt.state_dict())
    other, others = fresh(dtype, names)
    for p, q in zip(others, params, strict=True):
        p.data.copy_(q.data)
    source = bits(saved)
    other.load_state_dict(saved)
    assert snapshot(other) == snapshot(opt)
    assert other.param_groups[0]["seed"] == 7
    train(opt, params, range(3, 6))
    train(other, others, range(3, 6))
    assert snapshot(other) == snapshot(opt)
    assert bits(saved) == source  # nothing is shared with what was loaded
    assert all(v.is_contiguous() for s in saved["state"].values() for v in s.values() if isinstance(v, Tensor))


def test_saved_options_win_but_backend_stays() -> None:
    opt, params = fresh(torch.float32, plan="int8", backend="reference", betas=(0.5, 0.6))
    torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5)
    train(opt, params, range(1))
    other, _ = fresh(torch.float32, foreach=True)
    other.load_state_dict(opt.state_dict())
    group = other.param_groups[0]
    assert (group["plan"], group["betas"], group["initial_lr"], group["lr"]) == ("int8", (0.5, 0.6), 0.1, 0.05)
    assert group["backend"] == "auto"


def test_loaded_lr_tensor_is_a_copy() -> None:
    opt, _ = fresh(torch.float32)
    opt.param_groups[0]["lr"] = torch.tensor(0.5)
    saved = opt.state_dict()
    other, _ = fresh(torch.float32)
    other.load_state_dict(saved)
    other.param_groups[0]["lr"].fill_(0.25)
    assert saved["param_groups"][0]["lr"] == 0.5


MISFITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no groups": (lambda s: s.pop("param_groups"), "expected 'param_groups'"),
    "no state": (lambda s: s.pop("state"), "expected 'state'"),
    "group count": (lambda s: s["param_groups"].pop(), "expected 2 parameter groups, got 1"),
    "group size": (lambda s: s["param_groups"][0]["params"].pop(), "group 0: expected 5 parameters, got 4"),
    "range": (lambda s: s["param_groups"][1].update(eps=-1.0), "group 1: AdamW: eps must be >= 0, got -1.0"),
    "plan": (lambda s: s["param_groups"][0].update(plan="int9"), "group 0: AdamW has no plan 'int9'"),
    "other plan": (
        lambda s: s["param_groups"][1].update(plan="fp32"),
        "not expected (it has exp_avg, exp_avg_sq, step)",
    ),
    "unknown id": (lambda s: s["state"].update({99: {}}), "state of 99: expected parameters of the groups only"),
    "global": (lambda s: s["state"].update(total=3), "state of 'total'"),
    "missing": (
        lambda s: s["state"][7].pop("exp_avg_scale"),
        "parameter 7 (bfloat16 [5, 7]), plan int8: exp_avg_scale: expected float32 [5, 1], it is missing",
    ),
    "extra": (lambda s: s["state"][7].update(mu=torch.ones(1)), "mu: not expected"),
    "cast by torch": (
        lambda s: s["state"][7].update(exp_avg=s["state"][7]["exp_avg"].bfloat16()),
        "exp_avg: expected uint8 [5, 7], got bfloat16 [5, 7]",
    ),
    "shape": (
        lambda s: s["state"][7].update(exp_avg=torch.ones(7, 5, dtype=torch.uint8)),
        "exp_avg: expected uint8 [5, 7], got uint8 [7, 5]",
    ),
    "signedness": (
        lambda s: s["state"][7].update(weight_low=s["state"][7]["weight_low"].to(torch.uint16)),
        "weight_low: expected int16 [5, 7], got uint16",
    ),
    "step": (lambda s: s["state"][7].update(step=2.5), "step: expected a whole number >= 0, got 2.5"),
    "no step": (lambda s: s["state"][7].pop("step"), "step: expected a whole number >= 0, it is missing"),
    "host state": (lambda s: s["state"][7].pop("decay_product"), "decay_product: expected a number, got 'nothing'"),
    "not a dict": (lambda s: s["state"].update({7: 3}), "parameter 7 (bfloat16 [5, 7]): expected a dict of states"),
    "not a tensor": (lambda s: s["state"][7].update(exp_avg_sq=1.0), "exp_avg_sq: expected float32 [5, 7], got 1.0"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_checkpoint_that_does_not_fit_changes_nothing(case: str) -> None:
    change, text = MISFITS[case]
    opt, params = fresh(torch.bfloat16)
    train(opt, params, range(2))
    saved = copy.deepcopy(opt.state_dict())
    change(saved)
    train(opt, params, range(2, 3))
    before, objects = snapshot(opt), [id(g) for g in opt.param_groups]
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        opt.load_state_dict(saved)
    assert text in str(caught.value), str(caught.value)
    assert snapshot(opt) == before
    assert [id(g) for g in opt.param_groups] == objects


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_users_own_entries_are_kept_saved_and_loaded(device: str | None) -> None:
    """As torch keeps them; those of a parameter that has made no step, or never will, as well."""
    (opt, params), (plain, others) = fresh(torch.bfloat16), fresh(torch.bfloat16)
    frozen = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)
    opt.add_param_group({"params": [frozen]})
    opt.state[params[4]]["early"] = 3
    train(opt, params, range(2))
    train(plain, others, range(2))
    opt.state[params[0]]["ema"] = params[0].detach().clone()
    opt.state[params[1]]["window"] = [torch.ones(2), "text"]
    opt.state[frozen]["seen"] = 7
    opt.state["n"] = 5
    opt.state["mean"] = {"exp_avg": 1.0, "step": 3}
    opt.dense_state_dict(), opt.master_weights(), opt.memory()
    torch.set_default_device(device)
    try:
        opt.load_state_dict(through_file(opt.state_dict()))
    finally:
        torch.set_default_device(None)
    assert torch.equal(opt.state[params[0]]["ema"], params[0])
    assert opt.state[params[0]]["ema"].dtype is torch.bfloat16
    assert opt.state[params[1]]["window"][1] == "text"
    assert (opt.state[params[4]]["early"], opt.state[frozen], opt.state["n"]) == (3, {"seen": 7}, 5)
    assert opt.state["mean"] == {"exp_avg": 1.0, "step": 3}
    train(opt, params, range(2, 5))
    train(plain, others, range(2, 5))
    assert bits(params) == bits(others)
    assert opt.state["n"] == 5 and "early" in opt.state[params[4]] and "ema" in opt.state[params[0]]
    saved = copy.deepcopy(opt.state_dict())
    saved["param_groups"][0]["own_entries"].append("step")
    opt.load_state_dict(saved)
    assert opt.state[params[0]]["step"] == 5 and "own_entries" not in opt.param_groups[0]
    saved["state"][1]["mean"] = torch.ones(2)
    with pytest.raises(ValueError, match="mean: not expected"):
        opt.load_state_dict(saved)
    saved = copy.deepcopy(opt.state_dict())
    saved["state"]["m"] = 3
    with pytest.raises(ValueError, match="state of 'm': expected parameters of the groups only"):
        opt.load_state_dict(saved)


def test_hooks_may_name_the_states_of_a_checkpoint() -> None:
    """As distributed checkpoints do; a user's own entries beside them."""
    opt, params = fresh(torch.bfloat16)
    train(opt, params, range(2))
    opt.state["n"], opt.state[params[0]]["ema"] = 5, 0.5

    def named(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        states = {f"p{k}" if isinstance(k, int) else k: entry for k, entry in saved["state"].items()}
        groups = [{**group, "params": [f"p{k}" for k in group["params"]]} for group in saved["param_groups"]]
        return {"state": states, "param_groups": groups}

    opt.register_state_dict_post_hook(named)
    saved = opt.state_dict()
    assert set(saved["state"]) == {*(f"p{k}" for k in range(len(params))), "n"}
    before = bits([x for p in params for x in opt.state[p].values() if isinstance(x, torch.Tensor)])
    opt.load_state_dict(saved)
    assert bits([x for p in params for x in opt.state[p].values() if isinstance(x, torch.Tensor)]) == before
    assert (opt.state["n"], opt.state[params[0]]["ema"]) == (5, 0.5)


def test_misfits_are_listed_but_not_without_end() -> None:
    opt, params = fresh(torch.bfloat16)
    train(opt, params, range(1))
    saved = copy.deepcopy(opt.state_dict())
    for entry in saved["state"].values():
        entry["step"] = -1
    with pytest.raises(ValueError, match=r"\.\.\. and 3 more"):
        opt.load_state_dict(saved)


def test_names_decide_the_order() -> None:
    shapes = [(4, 9)] * 3
    params, others = parameters(torch.bfloat16, shapes), parameters(torch.bfloat16, shapes)
    opt = AdamW([(name, p) for name, p in zip("abc", params, strict=True)])
    train(opt, params, range(2))
    saved = opt.state_dict()
    other = AdamW([(name, p) for name, p in zip("cab", [others[2], others[0], others[1]], strict=True)])
    other.load_state_dict(saved)
    assert other.param_groups[0]["param_names"] == ["c", "a", "b"]
    assert [bits(opt.state[p]) for p in params] == [bits(other.state[p]) for p in others]
    renamed = AdamW([(f"module.{name}", p) for name, p in zip("abc", others, strict=True)])
    renamed.load_state_dict(saved)  # by position, and the saved names (and so the random numbers) go on
    assert renamed.param_groups[0]["param_names"] == ["a", "b", "c"]
    assert [bits(opt.state[p]) for p in params] == [bits(renamed.state[p]) for p in others]
    partly = AdamW([(name, p) for name, p in zip("abd", others, strict=True)])
    with pytest.raises(ValueError, match=r"expected parameters \['d'\], got \['c'\] in their place"):
        partly.load_state_dict(saved)
    unnamed = AdamW(others)
    unnamed.load_state_dict(saved)
    assert unnamed.param_groups[0]["param_names"] == ["a", "b", "c"]
    named = AdamW([(name, p) for name, p in zip("abc", others, strict=True)])
    named.load_state_dict(AdamW(parameters(torch.bfloat16, shapes)).state_dict())
    assert named.param_groups[0]["param_names"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["a.w", "b.w", "c"], ["c", "b.w", "a._orig_mod.w"]),
        (["a._orig_mod.w", "b._checkpoint_wrapped_module.w", "c"], ["a.w", "c", "b.w"]),
        (["a.w", "b.w", "c"], ["module.c", "module.a.w", "module.b.w"]),
    ],
)
def test_names_decide_the_order_where_layers_are_wrapped(before: list[str], after: list[str]) -> None:
    """The names that random bits go by are the saved ones from then on, in the present order."""
    shapes = [(64, 72), (72, 64), (5,)]
    params, others = (dict(zip(before, parameters(torch.bfloat16, shapes), strict=True)) for _ in range(2))
    bare = {overrides.bare(name): name for name in before}
    opt = AdamW(params.items())
    train(opt, list(params.values()), range(2))
    for p, q in zip(params.values(), others.values(), strict=True):
        q.data.copy_(p)
    order = [bare[overrides.bare(name)] for name in after]
    loaded = AdamW([(name, others[own]) for name, own in zip(after, order, strict=True)])
    loaded.load_state_dict(opt.state_dict())
    assert loaded.param_groups[0]["param_names"] == order
    train(opt, list(params.values()), range(2, 4))
    train(loaded, list(others.values()), range(2, 4))
    for name in before:
        assert torch.equal(params[name], others[name])
        assert bits(opt.state[params[name]]) == bits(loaded.state[others[name]])


def test_wrapped_layers_of_another_model_are_refused() -> None:
    opt = AdamW(list(zip(["a._orig_mod.w", "c"], parameters(torch.bfloat16, [(3,)] * 2), strict=True)))
    for names in (["b.w", "c"], ["w", "c"]):
        other = AdamW(list(zip(names, parameters(torch.bfloat16, [(3,)] * 2), strict=True)))
        with pytest.raises(ValueError, match=r"parameters \['a._orig_mod.w'\], got \['b?\.?w'\] in their place"):
            opt.load_state_dict(other.state_dict())
    turned = ["_orig_mod.a", "_orig_mod.b", "_orig_mod.d"], ["c", "b", "a"]
    opt, other = (AdamW(list(zip(names, parameters(torch.bfloat16, [(3,)] * 3), strict=True))) for names in turned)
    with pytest.raises(ValueError, match=r"parameters \['_orig_mod.d'\], got \['c'\] in their place"):
        opt.load_state_dict(other.state_dict())


def test_parameters_of_one_name_keep_their_order_among_themselves() -> None:
    """As those of two models in one optimizer do, whatever stands between them."""
    params, others = (parameters(torch.bfloat16, [(3,)] * 4) for _ in range(2))
    opt = AdamW(list(zip(["w", "b", "w", "b"], params, strict=True)))
    train(opt, params, range(2))
    turned = AdamW([("b", others[1]), ("w", others[0]), ("b", others[3]), ("w", others[2])])
    turned.load_state_dict(opt.state_dict())
    assert [bits(opt.state[p]) for p in params] == [bits(turned.state[p]) for p in others]
    assert turned.param_groups[0]["param_names"] == ["b", "w", "b", "w"]
    other = AdamW([("w", others[0]), ("w", others[1]), ("w", others[2]), ("b", others[3])])
    with pytest.raises(ValueError, match=r"expected parameters \['w'\], got \['b'\] in their place"):
        other.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("amsgrad", [False, True])
def test_torch_checkpoint_goes_on_as_torch(amsgrad: bool) -> None:
    ours, theirs = parameters(), parameters()
    oracle = torch.optim.AdamW(theirs, foreach=False, lr=0.01, amsgrad=amsgrad)
    for step in range(4):
        give_gradients(theirs, step)
        oracle.step()
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q.data)
    opt = AdamW(ours)
    opt.load_state_dict(through_file(oracle.state_dict()))
    assert opt.param_groups[0]["plan"] == "fp32"
    assert opt.param_groups[0]["amsgrad"] is amsgrad
    assert all(opt.state[p]["step"] == 4 for p in ours)
    for step in range(4, 8):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        opt.step()
        oracle.step()
    assert bits(ours) == bits(theirs)
    back = torch.optim.AdamW(theirs, foreach=False)
    back.load_state_dict(opt.dense_state_dict())
    assert bits([back.state[q] for q in theirs]) == bits([oracle.state[q] for q in theirs])
    assert back.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_checkpoint_is_encoded(dtype: torch.dtype) -> None:
    """Into an 8-bit plan: each state is what the plan's nearest encoding makes of torch's tensor."""
    theirs = parameters(dtype)
    oracle = torch.optim.AdamW(theirs, foreach=False)
    for step in range(3):
        give_gradients(theirs, step)
        oracle.step()
    saved = oracle.state_dict()
    for i in saved["state"]:
        saved["state"][i]["decay_product"] = torch.tensor(0.9**3)  # NAdam's checkpoints have such numbers
    ours = [nn.Parameter(p.detach().clone()) for p in theirs]
    opt = AdamW(ours, plan="int8")
    opt.load_state_dict(saved)
    dense = opt.dense_state_dict()["state"]
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        want = oracle.state[q]["exp_avg"].float()
        got = dense[i]["exp_avg"]
        assert torch.equal(dense[i]["exp_avg_sq"], oracle.state[q]["exp_avg_sq"].float())
        if p.numel() < int8.SMALL_NUMEL:
            assert torch.equal(got, want)
        else:
            # half a code of the block's scale, and four roundings on the way there and back
            scale = want.abs().max()
            assert ((got - want).abs() <= scale / 254 + 4 * 2**-24 * scale).all()
        assert opt.state[p]["decay_product"] == pytest.approx(0.9**3, rel=2**-23)
    assert bits(list(opt.master_weights().values())) == bits([p.float() for p in theirs])
    train(opt, ours, range(3, 5))
    assert all(opt.state[p]["step"] == 5 for p in ours)


def test_dense_export_and_import_between_plans() -> None:
    params = parameters(shapes=[(4, 9), (3,)])
    opt = AdamW([("a", params[0]), ("b", params[1])], plan="int8", lr=0.3)
    train(opt, params, range(3))
    exported = opt.dense_state_dict()
    assert {"plan", "seed", "backend"}.isdisjoint(exported["param_groups"][0])
    other = AdamW([("a", params[0]), ("b", params[1])], plan="int8")
    other.load_state_dict(exported)
    assert other.param_groups[0]["lr"] == 0.3
    for p in params:
        assert torch.equal(other.state[p]["exp_avg"], opt.state[p]["exp_avg"])  # encode(decode(.)) keeps codes
    untrained = AdamW(parameters(shapes=[(4, 9)]))
    assert untrained.dense_state_dict()["state"] == {}


def test_torch_state_that_lacks_something() -> None:
    params = parameters(shapes=[(3,)])
    oracle = torch.optim.AdamW(params)
    give_gradients(params, 0)
    oracle.step()
    saved = oracle.state_dict()
    saved["param_groups"][0]["amsgrad"] = True
    opt = AdamW(params)
    with pytest.raises(ValueError, match=r"max_exp_avg_sq: expected float32 \[3\], it is missing"):
        opt.load_state_dict(saved)
    assert opt.state == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_master_weights(dtype: torch.dtype) -> None:
    model = nn.Linear(9, 4).to(dtype)
    opt = AdamW(model.named_parameters(), lr=1e-4)
    start = opt.master_weights()
    assert set(start) == {"weight", "bias"}
    assert torch.equal(start["weight"], model.weight.float())
    for _ in range(3):
        model.weight.grad = torch.ones_like(model.weight)
        opt.step()
    kept = opt.master_weights()["weight"]
    assert kept.dtype == torch.float32
    assert torch.equal(kept.to(dtype), model.weight) or dtype == torch.bfloat16  # the split rounds half up
    # Under a constant gradient each step is lr, but for the decay of at most lr / 100 and the momentum's 8 bits; a
    # weight of 16 bits alone would stand still (half an ulp of 0.3 is 1e-3 in bfloat16).
    assert torch.allclose(kept - start["weight"], torch.full((4, 9), -3e-4), rtol=0.03)


# -- copies ----------------------------------------------------------------------------------------------------


class Subclass(AdamW):
    pass


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_go_on_alike(copier: Callable[[AdamW], AdamW], dtype: torch.dtype) -> None:
    params = parameters(dtype)
    opt = Subclass(params, lr=torch.tensor(0.1), seed=3)
    train(opt, params, range(2))
    other = copier(opt)
    assert type(other) is Subclass
    others = other.param_groups[0]["params"]
    assert others[0] is not params[0]
    train(opt, params, range(2, 4))
    train(other, others, range(2, 4))
    assert snapshot(opt) == snapshot(other)
    other.add_param_group({"params": parameters(dtype, [(3,)])})
    assert repr(other).startswith("Subclass (\n    group 0: 11 parameters, ")


def test_old_pickles_get_new_options() -> None:
    params = parameters(shapes=[(3,)])
    opt = AdamW(params)
    state = copy.deepcopy(opt.__getstate__())
    for group in state["param_groups"]:
        del group["seed"], group["maximize"]
    opt.__setstate__(state)
    train(opt, opt.param_groups[0]["params"], range(1))


def test_class_that_is_swapped_for_a_wrapper() -> None:
    """As Lightning does it: a class made of a mixin and the optimizer's own, put into the place of the latter."""
    params = parameters(torch.bfloat16)
    opt = AdamW(params)
    opt.__class__ = type("LightningAdamW", (type("Mixin", (), {}), AdamW), {})
    train(opt, params, range(2))


def test_parameters_swapped_in_the_groups() -> None:
    """As sharding wrappers do it: the groups get other parameters before the first step."""
    opt = AdamW(parameters(shapes=[(3,), (4,)]))
    for round_ in range(4):
        swapped = parameters(shapes=[(5, 2), (6,)], seed=round_)
        opt.param_groups[0]["params"][:] = swapped
        train(opt, swapped, range(2))
    assert len(opt._stepper.dtypes) <= 4


def test_add_param_group_is_all_or_nothing() -> None:
    params = parameters(shapes=[(3,), (4,), (5,)])
    opt = AdamW(params[:1])
    given_group = {"params": iter(params[1:2]), "lr": np.float64(0.5)}
    opt.add_param_group(given_group)
    assert type(opt.param_groups[1]["lr"]) is float
    before = snapshot(opt)
    for bad in ({"params": params[2], "plan": "none"}, {"params": params[2], "lr": -1}, {"params": params[0]}):
        with pytest.raises(ValueError, match=r"none|lr|more than one"):
            opt.add_param_group(bad)
        assert snapshot(opt) == before
    with pytest.raises(TypeError, match="must be a dict"):
        opt.add_param_group(params[2:])  # type: ignore[arg-type]


class Interrupted(RuleBasedStateMachine):
    """Two optimizers see the same gradients; one is saved, loaded, copied and pickled in between: same bits."""

    @initialize(dtype=st.sampled_from(DTYPES), plan=st.sampled_from([None, "fp32", "int8"]), names=st.booleans())
    def create(self, dtype: torch.dtype, plan: str | None, names: bool) -> None:
        self.dtype, self.plan, self.names, self.count = dtype, plan, names, 0
        self.straight, self.crooked = self.make(), self.make()

    def group(self, seed: int) -> dict[str, Any]:
        shapes = [(3, 9), (5,), (2, 2, 5), ()][: 1 + seed % 4]
        params: Any = parameters(self.dtype, shapes, seed)
        if self.names:
            params = [(f"g{seed}.{i}", p) for i, p in enumerate(params)]
        return {"params": params, "lr": 0.1 / (1 + seed)}

    def make(self) -> AdamW:
        return AdamW([self.group(0)], plan=self.plan, seed=11)

    def both(self) -> Iterator[AdamW]:
        yield from (self.straight, self.crooked)

    @rule(every=st.integers(1, 3))
    def step(self, every: int) -> None:
        self.count += 1
        for opt in self.both():
            params = [p for g in opt.param_groups for p in g["params"]]
            give_gradients(params, self.count)
            for p in params[1::every] if every > 1 else []:
                p.grad = None
            opt.step()

    @rule()
    def add_group(self) -> None:
        if len(self.straight.param_groups) < 4:
            for opt in self.both():
                opt.add_param_group(self.group(len(opt.param_groups)))

    @rule(lr=st.floats(0, 1), beta=st.floats(0, 0.99))
    def schedule(self, lr: float, beta: float) -> None:
        for opt in self.both():
            opt.param_groups[-1]["lr"] = lr
            opt.param_groups[0]["betas"] = (beta, 0.99)

    @rule()
    def deepcopy(self) -> None:
        self.crooked = copy.deepcopy(self.crooked)

    @rule()
    def pickle(self) -> None:
        self.crooked = pickle.loads(pickle.dumps(self.crooked))

    @rule()
    def save_and_load(self) -> None:
        saved = through_file(self.crooked.state_dict())
        groups = []
        for old in self.crooked.param_groups:
            params = [nn.Parameter(p.detach().clone()) for p in old["params"]]
            groups.append({"params": list(zip(old["param_names"], params, strict=True)) if self.names else params})
        self.crooked = AdamW(groups, plan=self.plan, seed=11)
        self.crooked.load_state_dict(saved)

    @rule()
    def load_into_itself(self) -> None:
        self.crooked.load_state_dict(self.crooked.state_dict())

    @invariant()
    def same_bits(self) -> None:
        if hasattr(self, "straight"):
            assert snapshot(self.straight) == snapshot(self.crooked)


TestInterrupted = Interrupted.TestCase
TestInterrupted.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)


# -- memory, import ---------------------------------------------------------------------------------------------


def test_memory_counts_what_is_there() -> None:
    params = [p for dtype in DTYPES for p in parameters(dtype)]
    opt = AdamW([(f"p{i}", p) for i, p in enumerate(params)])
    promised = opt.memory()
    train(opt, params, range(1))
    assert opt.memory() == promised
    for p, row in zip(params, promised.parameters, strict=True):
        held = {k: v.numel() * v.element_size() for k, v in opt.state[p].items() if isinstance(v, Tensor)}
        assert row.states == held
        assert row.weight == p.numel() * p.element_size()
    assert promised.total == sum(row.total for row in promised.parameters)
    text = str(promised)
    assert repr(promised) == text
    assert str(AdamW([params[0]]).memory()).startswith("1 tensor, ")
    assert text.startswith("33 tensors, ")
    assert "exp_avg_scale" in text
    assert "plan fp32, int8" in text
    assert AdamW(nn.Linear(64, 64).bfloat16().parameters()).memory().per_element == pytest.approx(9.5, abs=0.2)
    assert str(AdamW([nn.Parameter(torch.ones(1), requires_grad=False)]).memory()).startswith("0 tensors")


@pytest.mark.parametrize("saved", [[1], None, "state", 3])
def test_what_is_no_state_dict_is_refused_and_nothing_changes(saved: object) -> None:
    opt = AdamW([nn.Parameter(torch.ones(3))], lr=0.1)
    before = opt.state_dict()
    with pytest.raises(TypeError, match="takes the dict that state_dict"):
        opt.load_state_dict(saved)  # type: ignore[arg-type]
    assert opt.state_dict() == before
    with pytest.raises(ValueError, match="each with 'params'"):
        opt.load_state_dict({"state": {}, "param_groups": [{"params": 3}]})


def test_nesterov_needs_a_momentum_and_no_dampening_as_in_torch() -> None:
    from generated import SGD, SGDW

    for cls in (SGD, SGDW, torch.optim.SGD):
        for options in ({"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}):
            with pytest.raises(ValueError, match=r"(?i)nesterov.*needs|Nesterov momentum requires"):
                cls([nn.Parameter(torch.ones(3))], lr=0.1, nesterov=True, **options)
            group = {"params": [nn.Parameter(torch.ones(3))], "nesterov": True, **options}
            if cls is not torch.optim.SGD:  # which does not look into groups
                with pytest.raises(ValueError, match=r"nesterov=True needs"):
                    cls([group], lr=0.1)
        cls([nn.Parameter(torch.ones(3))], lr=0.1, nesterov=True, momentum=0.9)


def test_import_loads_nothing_that_torch_has_not_loaded_but_the_runtime_itself() -> None:
    """So that it costs no more than its own files: modules are counted, a clock would depend on the machine."""
    script = (
        "import sys, torch\nbefore = set(sys.modules)\nimport optgen.runtime\n"
        "new = {m for m in set(sys.modules) - before if m.partition('.')[0] not in sys.stdlib_module_names}\n"
        "bad = {m for m in new - {'optgen'} if not m.startswith('optgen.runtime')}\n"
        "assert not bad, bad\nprint(len(new))\n"
    )
    files = len(list((Path(__file__).parents[1] / "optgen" / "runtime").rglob("*.py")))
    assert int(_python(script, {})) <= 1 + files


def test_triton_launches_in_the_interpreter(interpreter: dict[str, str]) -> None:
    script = Path(__file__).parent / "runtime_standin" / "interpreted.py"
    out = _python(script.read_text(), interpreter, str(script))
    assert out.count("ok") == 4


def _python(script: str, environment: dict[str, str], file: str = "") -> str:
    import os

    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, file] if file else [sys.executable, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@given(value=st.floats(allow_nan=True, allow_infinity=True), low=st.floats(-5, 5), high=st.floats(-5, 5))
def test_ranges(value: float, low: float, high: float) -> None:
    hyper = Hyper("x", 0.0, gt=low, le=high)
    inside = low < value <= high
    if inside:
        assert hyper.check(value, "X") == value
    else:
        with pytest.raises(ValueError, match="X: x must be > "):
            hyper.check(value, "X")


def test_compiled_step_is_the_same_step() -> None:
    (p,), (q,) = parameters(torch.bfloat16, [(4, 9)]), parameters(torch.bfloat16, [(4, 9)])
    opt, other = AdamW([p], lr=0.1), AdamW([q], lr=0.1)
    compiled = torch.compile(opt.step, backend="eager")
    for step in range(3):
        give_gradients([p], step)
        give_gradients([q], step)
        compiled()
        other.step()
    assert snapshot(opt) == snapshot(other)


def test_variants_may_share_functions_and_give_the_kernel_scalars_of_its_own() -> None:
    def strict(*args: float) -> tuple[float, ...]:
        return (1.0, 2.0)

    def fast(*args: float) -> tuple[float, ...]:
        return (3.0,)

    alone = Variant("f", "float32", (), ("a", "b"), strict)
    assert alone.kernel_name == "f"
    assert alone.host_for("cpp") == alone.host_for("reference") == (strict, 2)
    shared = Variant("f", "float32", (), ("a", "b"), strict, kernel="k", kernel_scalars=("a",), kernel_host=fast)
    assert shared.kernel_name == "k"
    assert shared.host_for("reference") == (strict, 2)
    assert shared.host_for("cpp") == (fast, 1)


@pytest.mark.parametrize("lr", [3e-4, 1.0])
@pytest.mark.parametrize("end", [10, 100, 1000])
def test_a_rate_that_rounding_puts_below_zero_is_zero(lr: float, end: int) -> None:
    """torch's LinearLR multiplies the rate by factors whose product is 0, but for their rounding."""
    (p,) = parameters(shapes=[(4, 5)])
    opt = AdamW([p], lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, start_factor=1.0, end_factor=0.0, total_iters=end)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no step was made before the schedule's
        for _ in range(end):
            schedule.step()
    give_gradients([p], 0)
    before, reached = p.detach().clone(), opt.param_groups[0]["lr"]
    assert abs(reached) < 1e-12
    for value in (reached, -abs(reached) or -1e-20, torch.tensor(-1e-14)):
        opt.param_groups[0]["lr"] = value
        opt.step()
        opt.load_state_dict(opt.state_dict())
    assert reached > 0 or torch.equal(p, before)
    with pytest.raises(ValueError, match=r"AdamW: lr must be >= 0, got -1e-11"):
        AdamW([p], lr=-1e-11)
    opt.param_groups[0]["lr"] = -1e-11
    with pytest.raises(ValueError, match=r"lr must be >= 0, got -1e-11"):
        opt.step()


def test_a_hyper_parameter_set_out_of_range_stops_the_step_before_anything_changes() -> None:
    params = parameters()
    opt = AdamW(params, lr=1e-2)
    give_gradients(params, 0)
    opt.step()
    before = snapshot(opt)
    opt.param_groups[0]["lr"] = -1e-3
    with pytest.raises(ValueError, match=r"^AdamW: group 0: lr must be >= 0, got -0.001$"):
        opt.step()
    opt.param_groups[0]["lr"] = 1e-2
    assert snapshot(opt) == before


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("lr", -1.0, "lr must be >= 0, got -1.0"), ("betas", 0.9, "betas must be 2 numbers, got 0.9")],
)
def test_a_number_out_of_range_is_refused_with_its_group(released: bool, name: str, value: object, said: str) -> None:
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    opt = AdamW([{"params": [p]}, {"params": [q]}], plan="fp32")
    if released:
        opt.release_gradients()
    opt.param_groups[1][name] = value
    with pytest.raises((TypeError, ValueError), match=f"^AdamW: group 1: {said}$"):  # noqa: PT012
        (p.sum() + q.sum()).backward()
        opt.step()
