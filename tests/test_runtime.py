"""The contract of torch.optim, asked of AdamW in eager torch: what it takes, refuses, saves and loads."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from optgen.optim import SGD, SGDW, SOAP, AdamW, Muon
from optgen.runtime.layout import layout, plans
from optgen.runtime.records import keys
from tests import training
from tests.harness import ROOT, python
from tests.training import DTYPES, bits, everything, give, states, train

SHAPES = [(), (1,), (7,), (8,), (0,), (3, 0), (5, 7), (65, 64), (2, 3, 5), (2, 4, 3, 3)]
"""One of them is kept in codes where a plan has any."""


@pytest.fixture(autouse=True, scope="module")
def no_provider() -> Iterator[None]:
    """The runtime alone: another test of this process may have registered the compiler."""
    before, plans.provider = plans.provider, None
    yield
    plans.provider = before


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES, seed: int = 0) -> list[nn.Parameter]:
    return training.parameters(shapes, dtype, seed)


# -- the numbers --------------------------------------------------------------------------------------
@given(shape=st.lists(st.integers(0, 6), max_size=4).map(tuple), chunk=st.integers(1, 40))
def test_chunks_of_encode_and_decode_change_nothing(shape: tuple[int, ...], chunk: int) -> None:
    pair = plans.load(AdamW, "int8_split24")
    p = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16())
    values = {name: torch.rand(shape) for name in ("exp_avg", "exp_avg_sq")}
    variant = next(v for v in pair.variants if v.param == "bfloat16" and not v.small)
    made = []
    for size in (2**24, chunk):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "CHUNK", size)
            fields = layout.encode(pair, variant, p, values, variant.names)
            made.append((fields, layout.decode(pair, variant, p, fields, ("p", *variant.states))))
    assert bits(made[0]) == bits(made[1])
    assert torch.equal(made[0][1]["p"], p.float())


# -- memory layouts, gradients --------------------------------------------------------------------------
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda x: x.clone(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda x: torch.stack([x, x], dim=-1)[..., 0],
}


@pytest.mark.parametrize("order", LAYOUTS)
def test_strides_change_nothing(order: str) -> None:
    (plain,), (p,) = (parameters(torch.bfloat16, [(2, 240, 3, 4)]) for _ in range(2))
    p = nn.Parameter(LAYOUTS[order](p.detach()))
    stride = p.stride()
    opt, other = AdamW([p], lr=0.1), AdamW([plain], lr=0.1)
    for step in range(3):
        give([plain], step)
        p.grad = LAYOUTS["channels_last"](plain.grad)
        opt.step()
        other.step()
    assert bits(p) == bits(plain)
    assert p.stride() == stride
    assert states(opt) == states(other)
    assert all(v.is_contiguous() for v in opt.state[p].values() if isinstance(v, Tensor))
    other.load_state_dict(opt.state_dict())
    assert states(opt) == states(other)


# -- what is refused, before anything changes --------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s.pop("exp_avg_scale"), "exp_avg_scale: expected int16 [65, 1], it is missing"),
        (lambda s: s.update(exp_avg_codes=s["exp_avg_codes"].float()), "expected uint8 [65, 64], got float32 [65, 64]"),
        (lambda s: s.update(weight_low=s["weight_low"].t().contiguous().t()), "expected a contiguous tensor"),
        (lambda s: s.update(weight_low=3.0), "weight_low: expected uint8 [65, 64], got 3.0"),
        (lambda s: s.update(step=1.5), "step must be a whole number"),
        (lambda s: s.update({k: v.to("meta") for k, v in s.items() if isinstance(v, Tensor)}), "were made on meta"),
    ],
)
def test_states_that_somebody_changed(change: Callable[[dict[str, Any]], object], text: str) -> None:
    params = parameters(torch.bfloat16, [(4, 9), (65, 64)])
    opt = AdamW(params)
    train(opt, range(1))
    change(opt.state[params[1]])
    before = bits(params)
    give(params, 1)
    with pytest.raises(RuntimeError) as caught:
        opt.step()
    assert text in str(caught.value)
    assert "parameter 1 (bfloat16 [65, 64])" in str(caught.value)
    assert bits(params) == before


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda p: AdamW([p], lr=-1.0), ValueError, "AdamW: lr must be >= 0, got -1.0"),
        (lambda p: AdamW([p], lr=math.nan), ValueError, "lr must be >= 0, got nan"),
        (lambda p: AdamW([p], lr="fast"), TypeError, "lr must be a number, got 'fast'"),
        (lambda p: AdamW([p], lr=torch.ones(2)), TypeError, "lr must be a number"),
        (lambda p: AdamW([p], betas=(0.9, 1.0)), ValueError, r"betas\[1\] must be >= 0 and < 1, got 1.0"),
        (lambda p: AdamW([p], betas=(0.9,)), ValueError, r"betas must be 2 numbers, got \(0.9,\)"),
        (lambda p: AdamW([p], betas=0.9), TypeError, "betas must be 2 numbers, got 0.9"),
        (lambda p: AdamW([p], amsgrad=1), TypeError, "amsgrad must be True or False, got 1"),
        (lambda p: AdamW([p], maximize=None), TypeError, "maximize must be True or False"),
        (lambda p: AdamW([p], seed=1.5), TypeError, "seed must be an int"),
        (lambda p: AdamW([p], backend="cuda"), ValueError, "backend must be one of auto, reference, triton"),
        (lambda p: AdamW([p], differentiable=True), ValueError, "does not support differentiable=True"),
        (lambda p: AdamW([p], fused="yes"), TypeError, "AdamW: fused must be True or False, got 'yes'"),
        (lambda p: AdamW([p], capturable=1), TypeError, "capturable must be True or False"),
        (lambda p: AdamW([p], fused=True, foreach=True), ValueError, "fused and foreach cannot both be True"),
        (lambda p: AdamW([{"params": [p], "eps": -1}]), ValueError, "eps must be >= 0, got -1.0"),
        (lambda p: Muon([p], ns_steps=1.5), ValueError, "ns_steps must be a whole number >= 1 and < 100, got 1.5"),
        (lambda p: Muon([p], ns_steps=100), ValueError, "must be a whole number >= 1 and < 100, got 100$"),
        (lambda p: AdamW([p], plan="in8"), ValueError, r"no plan 'in8': did you mean 'int8'\?"),
        (lambda p: AdamW([p], plan="absent"), ValueError, "--plan PLAN --out FOLDER` names what is built"),
        (lambda p: AdamW([p], plan=8), TypeError, "plan must be a plan's name"),
        (lambda p: AdamW([p], plan={"float32": "fp32"}), TypeError, "a group of their own"),
        (lambda p: AdamW([p.double().detach().requires_grad_()]), TypeError, "not built for float64 parameters"),
        (lambda p: AdamW([nn.Parameter(p.detach() * 1j)]), TypeError, "complex parameters"),
        (lambda p: AdamW([nn.Parameter(p.detach().to_sparse())]), TypeError, "parameters of layout torch.sparse_coo"),
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
    give(params, 0)
    before = bits(params)
    with pytest.raises(RuntimeError, match=r"does not run on cpu tensors .*TRITON_INTERPRET=1"):
        opt.step()
    assert bits(params) == before


class Subclass(AdamW):
    """A user's own class."""


@pytest.mark.parametrize("cls", [AdamW, Subclass])
def test_warnings_point_at_the_line_of_the_user(cls: type[AdamW]) -> None:
    """The place that Python prints, whichever way the call took from there."""
    params = parameters(shapes=[(3,), (4,)])
    opt = cls(params)
    give(params[:1], 0)
    opt.step()
    partly = opt.state_dict()  # the second parameter has made no step
    give(params, 0)
    opt.step()
    partly["state"][1] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        here = sys._getframe().f_lineno
        cls([{"params": params, "weigth_decay": 0.0}])
        opt.load_state_dict(partly)
    assert [(w.filename, w.lineno - here) for w in said] == [(__file__, 1), (__file__, 2)]


def test_misspelt_group_option_is_mentioned() -> None:
    with pytest.warns(UserWarning, match="'weigth_decay' has no effect; did you mean 'weight_decay'"):
        AdamW([{"params": parameters(shapes=[(3,)]), "weigth_decay": 0.0}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdamW([{"params": parameters(shapes=[(3,)]), "name": "body", "initial_lr": 0.1, "lr_scale": 0.5}])


# -- step: closure, schedulers ------------------------------------------------------------------------------------
def test_a_rate_that_rounding_puts_below_zero_is_zero() -> None:
    """torch's LinearLR multiplies the rate by factors whose product is 0, but for their rounding."""
    (p,) = parameters(shapes=[(4, 5)])
    opt = AdamW([p], lr=0.1, weight_decay=0.0)
    give([p], 0)
    before = p.detach().clone()
    for value in (-1e-20, torch.tensor(-1e-14)):
        opt.param_groups[0]["lr"] = value
        opt.step()
        opt.load_state_dict(opt.state_dict())
    assert torch.equal(p, before)
    opt.param_groups[0]["lr"] = -1e-11
    with pytest.raises(ValueError, match=r"lr must be >= 0, got -1e-11"):
        opt.step()


def test_default_and_named_plans_are_recorded() -> None:
    fp32, bf16 = parameters(torch.float32, [(4, 9)]), parameters(torch.bfloat16, [(4, 9)])
    assert AdamW(bf16).param_groups[0]["plan"] == "int8_split24"
    assert AdamW([*fp32, *bf16], plan="fp32").param_groups[0]["plan"] == "fp32"
    groups = AdamW([{"params": fp32, "plan": "int8"}, {"params": bf16, "plan": "fp32"}]).param_groups
    assert [g["plan"] for g in groups] == ["int8", "fp32"]
    assert AdamW([nn.Parameter(torch.ones(3), requires_grad=False)]).param_groups[0]["plan"] == "int8_split24"


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


# -- checkpoints ------------------------------------------------------------------------------------------------
def fresh(dtype: torch.dtype, names: bool = False, **options: Any) -> tuple[AdamW, list[nn.Parameter]]:
    params = parameters(dtype)
    given: Any = [(f"p{i}", p) for i, p in enumerate(params)] if names else params
    return AdamW([{"params": given[:5]}, {"params": given[5:], "lr": 0.01}], lr=0.1, **options), params


def test_saved_options_win_but_backend_stays() -> None:
    opt, _ = fresh(torch.float32, plan="int8", backend="reference", betas=(0.5, 0.6))
    torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5)
    train(opt, range(1))
    opt.param_groups[1]["lr"] = torch.tensor(0.5)
    other, _ = fresh(torch.float32, foreach=True)
    saved = opt.state_dict()
    other.load_state_dict(saved)
    other.param_groups[1]["lr"].fill_(0.25)
    assert saved["param_groups"][1]["lr"] == 0.5  # a copy was loaded
    group = other.param_groups[0]
    assert (group["plan"], group["betas"], group["initial_lr"], group["lr"]) == ("int8", (0.5, 0.6), 0.1, 0.05)
    assert group["backend"] == "auto"


def test_the_way_an_optimizer_runs_is_not_a_checkpoints() -> None:
    """Not of its own checkpoints, whose other options win; and a dense one says nothing of storage and random bits."""
    options: Any = {"plan": "int8_split24", "seed": 5, "stagger": True, "workspace": "1MiB", "overrides": {"w": "fp32"}}
    p, q = parameters(shapes=[(64, 64)] * 2)
    opt = SOAP([("w", p), ("x", q)], backend="cpp", lr=0.5, **options)
    saved = SOAP(list(zip("wx", parameters(shapes=[(64, 64)] * 2), strict=True)), lr=0.25, plan="fp32")
    own, dense, before = saved.state_dict(), saved.dense_state_dict(), dict(opt.param_groups[0])
    running = {"backend": "reference", "capturable": True, "fused": True, "foreach": True, "offload": True,
               "workspace": 4096}  # fmt: skip
    for found in (own, dense):
        found["param_groups"][0].update(running)
    opt.load_state_dict(dense)
    assert {**opt.param_groups[0], "lr": 0.5} == before and opt.param_groups[0]["lr"] == 0.25
    opt.load_state_dict(own)
    group = opt.param_groups[0]
    assert all(group.get(key) == before.get(key) for key in running)
    assert (group["plan"], group["seed"], group.get("overrides")) == ("fp32", 0, None)


# -- copies ----------------------------------------------------------------------------------------------------
def test_the_class_may_be_set_to_a_subclass() -> None:
    """Lightning makes one of two for an object with all that the optimizer holds."""
    (opt, params), (plain, others) = fresh(torch.bfloat16), fresh(torch.bfloat16)
    for one in (opt, plain):
        train(one, range(2))
    opt.__class__ = type("Wrapped", (type("Wrapper", (), {}), AdamW), {})
    for one in (opt, plain):
        train(one, range(2, 4))
        one.load_state_dict(copy.deepcopy(one.state_dict()))
        train(one, range(4, 6))
    assert type(copy.deepcopy(opt)) is type(opt) is not AdamW
    assert (bits(params), states(opt)) == (bits(others), states(plain))


@pytest.mark.parametrize("backend", ["reference", "triton", "cpp"])
def test_foreach_has_no_effect(backend: str) -> None:
    found = []
    for foreach in (None, False, True):
        params = parameters(shapes=[(3, 9), (9,)])
        opt = AdamW(params, lr=0.1, plan="bf16_sr", backend=backend, foreach=foreach)
        train(opt, range(2))
        found.append((bits(params), states(opt)))
    assert found[0] == found[1] == found[2]


def test_the_dict_of_a_group_is_copied() -> None:
    """torch keeps it, and fills it with its defaults."""
    params = parameters(shapes=[(3,), (4,)])
    given_groups: list[dict[str, Any]] = [{"params": [p], "lr": 0.5} for p in params]
    opts = [AdamW(given_groups[:1], plan="fp32") for _ in range(2)]
    for opt in opts:
        opt.add_param_group(given_groups[1])
    assert all(group.keys() == {"params", "lr"} for group in given_groups)
    given_groups[0]["lr"] = given_groups[1]["lr"] = 0.25
    opts[0].param_groups[1]["lr"] = 0.125
    assert [[group["lr"] for group in opt.param_groups] for opt in opts] == [[0.5, 0.125], [0.5, 0.5]]


def test_add_param_group_is_all_or_nothing() -> None:
    params = parameters(shapes=[(3,), (4,), (5,)])
    opt = AdamW(params[:1])
    given_group = {"params": iter(params[1:2]), "lr": np.float64(0.5)}
    opt.add_param_group(given_group)
    assert type(opt.param_groups[1]["lr"]) is float
    before = everything(opt)
    for bad in ({"params": params[2], "plan": "none"}, {"params": params[2], "lr": -1}, {"params": params[0]}):
        with pytest.raises(ValueError, match=r"none|lr|more than one"):
            opt.add_param_group(bad)
        assert everything(opt) == before
    with pytest.raises(TypeError, match="must be a dict"):
        opt.add_param_group(params[2:])  # type: ignore[arg-type]


# -- memory, import ---------------------------------------------------------------------------------------------
def test_memory_counts_what_is_there() -> None:
    params = [p for dtype in DTYPES for p in parameters(dtype)]
    opt = AdamW([(f"p{i}", p) for i, p in enumerate(params)])
    promised = opt.memory()
    train(opt, range(1))
    assert opt.memory() == promised
    for p, row in zip(params, promised.parameters, strict=True):
        held = {k: v.numel() * v.element_size() for k, v in opt.state[p].items() if isinstance(v, Tensor)}
        assert row.states == held
        assert row.weight == p.numel() * p.element_size()
    assert promised.total == sum(row.total for row in promised.parameters)
    text = str(promised)
    assert repr(promised) == text
    assert text.startswith("30 tensors, 12,942 elements, plan int8_split24\n") and "exp_avg_scale" in text
    assert str(AdamW([params[0]]).memory()).startswith("1 tensor, ")
    assert AdamW(nn.Linear(64, 64).bfloat16().parameters()).memory().per_element == pytest.approx(5.1, abs=0.1)
    assert str(AdamW([nn.Parameter(torch.ones(1), requires_grad=False)]).memory()).startswith("0 tensors")


@pytest.mark.parametrize("saved", [[1], None])
def test_what_is_no_state_dict_is_refused_and_nothing_changes(saved: object) -> None:
    opt = AdamW([nn.Parameter(torch.ones(3))], lr=0.1)
    before = opt.state_dict()
    with pytest.raises(TypeError, match="takes the dict that state_dict"):
        opt.load_state_dict(saved)  # type: ignore[arg-type]
    assert opt.state_dict() == before
    with pytest.raises(ValueError, match="each with 'params'"):
        opt.load_state_dict({"state": {}, "param_groups": [{"params": 3}]})


def test_nesterov_needs_a_momentum_and_no_dampening_as_in_torch() -> None:
    for cls in (SGD, SGDW, torch.optim.SGD):
        for options in ({"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}):
            with pytest.raises(ValueError, match=r"(?i)nesterov.*needs|Nesterov momentum requires"):
                cls([nn.Parameter(torch.ones(3))], lr=0.1, nesterov=True, **options)
        cls([nn.Parameter(torch.ones(3))], lr=0.1, nesterov=True, momentum=0.9)


def test_import_loads_nothing_that_torch_has_not_loaded_but_the_runtime_itself() -> None:
    """So that it costs no more than its own files: modules are counted, a clock would depend on the machine."""
    count = python("""
        import sys, torch
        before = set(sys.modules)
        import optgen.runtime
        new = {m for m in set(sys.modules) - before if m.partition(".")[0] not in sys.stdlib_module_names}
        bad = {m for m in new - {"optgen"} if not m.startswith("optgen.runtime")}
        assert not bad, bad
        print(len(new))
    """)
    assert int(count) <= 1 + len(list((ROOT / "optgen" / "runtime").rglob("*.py")))


def test_another_plan_after_steps_is_said_to_be_the_cause() -> None:
    params = parameters(torch.bfloat16)
    opt = AdamW(params, plan="int8_split24", backend="reference")
    train(opt, range(1))
    opt.param_groups[0]["plan"] = "fp32_master"
    with pytest.raises(RuntimeError, match="was it made under another plan"):
        train(opt, range(1))


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("backend", "gpu", "backend must be one of auto, reference, triton, cpp, got 'gpu'"),
        ("seed", "a", "seed must be an int, got 'a'"),
        ("maximize", "no", "maximize must be True or False, got 'no'"),
        ("lr", -1.0, "group 1: lr must be >= 0, got -1.0"),
        ("lr", 10**400, "group 1: lr must be a number, got 10+"),
        ("betas", 0.9, "group 1: betas must be 2 numbers, got 0.9"),
        ("eps", None, "group 1: eps must be a number, got None"),
    ],
)
def test_what_is_put_into_a_group_later_is_refused_as_at_the_start(
    released: bool, name: str, value: object, said: str
) -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    opt = AdamW([{"params": [p]} for p in params], plan="fp32")
    if released:
        opt.release_gradients()
    opt.param_groups[1][name] = value
    with pytest.raises((TypeError, ValueError), match=f"^(AdamW: )?{said}"):  # noqa: PT012
        params[1].sum().backward()
        opt.step()
    assert torch.equal(params[1], torch.ones(3)) and not opt.state
