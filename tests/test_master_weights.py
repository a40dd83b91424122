"""Full weights: kept through a cast until an optimizer takes them, read out, and put back in."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optgen import cast_model
from optgen.optim import AdamW, ScheduleFreeAdamW
from optgen.runtime.checkpoint import weights
from optgen.runtime.states import low_bits
from tests.training import alike, everything, through_file, train

NARROW = [torch.bfloat16, torch.float16]


class Net(nn.Module):
    """Tied weights, a vector, a matrix that is large enough for 8-bit states, a norm that stays fp32, buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 520)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3, 4), requires_grad=False)
        self.register_buffer("scale", torch.randn(5))
        self.register_buffer("ids", torch.arange(4))


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def still(model: nn.Module, plan: str, **options: Any) -> AdamW:
    """An optimizer whose step changes no weight."""
    return AdamW(trained(model), lr=0.0, weight_decay=0.0, plan=plan, **options)


def zero_step(opt: Any) -> None:
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    opt.step()


def patterns(t: Tensor) -> Tensor:
    return t.detach().contiguous().view(torch.int32)


# -- what a cast keeps ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", NARROW)
def test_every_bit_comes_back(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns around every value of the narrow dtype (ties above all), random ones, subnormals, Inf and NaN."""
    monkeypatch.setattr(low_bits, "CHUNK", 10_000)
    near = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).to(torch.float32).view(torch.int32)
    half = 2 ** (15 if dtype == torch.bfloat16 else 12)
    drawn = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    every = torch.cat([near + d for d in (0, 1, -1, half - 1, half, half + 1, -half, -half - 1)] + [drawn])
    exact = every.view(torch.float32).reshape(3, -1)
    p = nn.Parameter(exact.to(dtype))
    low_bits.keep(p, exact)
    back = low_bits.exact(p)
    assert back is not None
    assert torch.equal(patterns(back), patterns(exact))
    if dtype == torch.bfloat16:  # ties that were rounded down, and NaNs, are all that does not fit 16 bits
        apart = p.__dict__[low_bits.ATTRIBUTE]["at"].numel()
        assert apart < 2**17


EDITS: dict[str, Callable[[nn.Parameter], object]] = {
    "copy": lambda p: p.copy_(torch.randn_like(p)),
    "data": lambda p: p.data.copy_(torch.randn_like(p)),
    "swap": lambda p: p.data.copy_(p.data.flip(0)),
    "one": lambda p: p.view(-1)[3].add_(1),
    "dtype": lambda p: setattr(p, "data", p.data.float()),
    "shape": lambda p: setattr(p, "data", p.data[:3].clone()),
}


@pytest.mark.parametrize("edit", EDITS)
def test_another_weight_has_no_low_bits(edit: str) -> None:
    model = cast_model(nn.Linear(8, 8), torch.bfloat16)
    assert low_bits.exact(model.weight) is not None
    with torch.no_grad():
        EDITS[edit](model.weight)
    assert low_bits.exact(model.weight) is None
    opt = AdamW(model.named_parameters(), lr=0.0, weight_decay=0.0, plan="split32")
    shown = model.weight.detach().float()
    assert torch.equal(opt.full_weights()[0], shown)


def test_a_cast_that_no_optimizer_meets() -> None:
    model = Net()
    exact = {name: t.detach().clone() for name, t in model.state_dict().items()}
    cast_model(model, torch.bfloat16)
    assert set(model.state_dict()) == set(exact)
    assert {n for n, _ in model.named_buffers()} == {n for n, _ in Net().named_buffers()}
    assert low_bits.ATTRIBUTE not in model.frozen.__dict__
    assert low_bits.ATTRIBUTE not in model.norm.weight.__dict__
    loaded = through_file({"sd": model.state_dict(), "parameter": model.body.weight})
    assert torch.equal(loaded["parameter"], model.body.weight)
    assert list(loaded["sd"]) == list(exact)
    ref = weakref.ref(model.body.weight.__dict__[low_bits.ATTRIBUTE]["low"])
    cast_model(model, torch.bfloat16)  # again: nothing is lost by it
    assert ref() is not None
    model.body.weight = nn.Parameter(torch.zeros(1))  # who drops a parameter drops its bits
    gc.collect()
    assert ref() is None
    cast_model(model, torch.float32)
    assert torch.equal(model.embed.weight, exact["embed.weight"])  # back, it is the fp32 model that it was
    assert low_bits.ATTRIBUTE not in model.embed.weight.__dict__
    off = cast_model(Net(), torch.bfloat16, low_bits=False)
    assert all(low_bits.ATTRIBUTE not in p.__dict__ for p in off.parameters())


@pytest.mark.parametrize("saved", [False, True])
def test_pickles_of_a_cast_model_start_from_the_same_weights(saved: bool) -> None:
    model = Net()
    exact = {name: p.detach().clone() for name, p in trained(model)}
    both = cast_model(model, torch.bfloat16), still(model, "split32")
    made, opt = through_file(both, weights_only=False) if saved else pickle.loads(pickle.dumps(both))
    assert made.head.weight is made.embed.weight
    zero_step(opt)
    assert alike(opt.full_weights(), list(exact.values()))
    assert not any(low_bits.ATTRIBUTE in p.__dict__ for p in made.parameters())  # taken
    assert low_bits.ATTRIBUTE in model.body.weight.__dict__


def test_copies_have_no_low_bits() -> None:
    model = cast_model(nn.Linear(8, 8), torch.bfloat16)
    for made in (model.weight.clone(), copy.deepcopy(model.weight), copy.deepcopy(model).weight):
        assert low_bits.exact(made) is None
    assert low_bits.exact(model.weight) is not None


# -- from fp32 weights through a first step --------------------------------------------------------------------
# What is kept is made by the same code for every backend; few cases show that their kernels go on from it.
@pytest.mark.parametrize("backend", ["reference", "triton", "cpp"])
def test_starting_from_fp32_loses_nothing(backend: str) -> None:
    model = Net()
    before = {name: t.detach().clone() for name, t in model.state_dict().items()}
    cast_model(model, torch.bfloat16)
    opt = still(model, "split32", backend=backend)
    rounded = {name: before[name].bfloat16().float() for name in ("frozen", "scale")}
    assert alike(opt.master_state_dict(model), before | rounded)
    zero_step(opt)
    after = opt.master_state_dict(model)
    assert list(after) == list(before) and alike(after, before | rounded)
    assert not any(weights.edited(p, after[name]) for name, p in trained(model))
    fp32 = Net(1)
    fp32.load_state_dict(after)
    assert torch.equal(fp32.body.weight, after["body.weight"])


PRECISION: dict[str, list[tuple[float, float]]] = {
    "fp32_master": [(0.0, 0.0), (0.0, 0.0)],
    "split32": [(0.0, 0.0), (0.0, 2.0**-41)],
    "int8_split24": [(2.0**-16, 0.0), (2.0**-19, 2.0**-33)],
    "int8_rn_split24": [(2.0**-16, 0.0), (2.0**-19, 2.0**-33)],
}
"""The table of docs/checkpoints.md: errors relative to the weight, and absolute ones below 2^-14; for each of
NARROW."""


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("plan", PRECISION)
def test_a_first_step_keeps_as_much_of_every_weight_as_the_page_says(plan: str, dtype: torch.dtype) -> None:
    """Weights are of every size that fp16 has, and below."""
    draw = torch.Generator().manual_seed(0)
    signs = torch.randn(64, 96, generator=draw).sign()
    exact = signs * torch.exp2(torch.empty(64, 96).uniform_(-30, 15, generator=draw))
    model = nn.Linear(96, 64, bias=False)
    model.weight.data = exact.clone()
    opt = still(cast_model(model, dtype), plan)
    zero_step(opt)
    relative, least = PRECISION[plan][NARROW.index(dtype)]
    of = exact.abs()
    bound = torch.where(of < 2.0**-14, (relative * of).clamp(min=least), relative * of)
    assert ((opt.full_weights()[0].double() - exact.double()).abs() <= bound).all()


def test_states_that_start_as_the_weight_start_as_the_full_one() -> None:
    model = nn.Linear(9, 5)
    exact = model.weight.detach().clone()
    cast_model(model, torch.bfloat16)
    opt = ScheduleFreeAdamW(model.named_parameters(), lr=0.0, weight_decay=0.0, plan="int8_split24")
    zero_step(opt)
    dense = opt.dense_state_dict()["state"][0]
    (start,) = [name for name, first in _variant(opt, model.weight).init.items() if first == "param"]
    assert torch.equal(dense[start], exact)


def _variant(opt: Any, p: Tensor) -> Any:
    from optgen.runtime.checkpoint import checkpoint

    return checkpoint.select(type(opt), opt.param_groups[0], p)[2]


# -- putting weights in ----------------------------------------------------------------------------------------
def ready(when: str, plan: str = "split32") -> tuple[Net, AdamW]:
    model = cast_model(Net(), torch.bfloat16)
    opt = AdamW(trained(model), lr=0.01, plan=plan)
    if when == "running":
        for p in model.parameters():
            p.grad = torch.randn_like(p) if p.requires_grad else None
        opt.step()
    return model, opt


@pytest.mark.parametrize("when", ["fresh", "running"])
@pytest.mark.parametrize("plan", ["split32", "fp32_master", "int8_split24"])
def test_loaded_weights_are_exact(when: str, plan: str) -> None:
    model, opt = ready(when, plan)
    other = Net(3).state_dict()
    other["norm.running_mean"] += 1
    moments = {name: dict(opt.state.get(p, {})) for name, p in trained(model)}
    opt.load_master_state_dict(model, other)
    for name, p in trained(model):
        assert (p in opt.state) is (when == "running")
        assert opt.state.get(p, {}) == moments[name]  # the same tensors: low halves are written in place
    assert torch.equal(model.norm.running_mean, other["norm.running_mean"])
    assert torch.equal(model.ids, other["ids"])
    zero = [dict(group) for group in opt.param_groups]
    for group in opt.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    zero_step(opt)
    got = opt.master_state_dict(model)
    for name in other:
        if name in ("frozen", "scale"):
            assert torch.equal(got[name], other[name].bfloat16().float())
        elif plan == "int8_split24" and other[name].is_floating_point() and not name.startswith("norm"):
            assert ((patterns(got[name]).long() - patterns(other[name]).long()).abs() <= 2**7).all()
        else:
            assert torch.equal(got[name], other[name]), name
    assert zero[0]["lr"] == 0.01


def test_moments_of_torch_meet_low_bits_of_the_cast() -> None:
    """torch.optim's checkpoint has no low bits; those that the cast kept are taken when it is loaded."""
    model = Net()
    oracle = torch.optim.AdamW(trained(model), lr=0.01)
    zero_step(oracle)
    exact = {name: p.detach().clone() for name, p in trained(model)}
    cast_model(model, torch.bfloat16)
    opt = AdamW(trained(model), plan="split32")
    saved = copy.deepcopy(oracle.state_dict())
    saved["param_groups"][0].pop("plan", None)
    opt.load_state_dict(saved)
    assert alike(opt.full_weights(), list(exact.values()))
    assert not any(low_bits.ATTRIBUTE in p.__dict__ for p in model.parameters())


MISFITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "missing": (lambda s: s.pop("body.bias"), "body.bias: expected bfloat16 [520], it is missing"),
    "extra": (lambda s: s.update(mu=torch.ones(1)), "mu: not expected"),
    "shape": (lambda s: s.update({"body.weight": torch.ones(8, 520)}), "[520, 8], got float32 [8, 520]"),
    "integers": (lambda s: s.update({"body.bias": torch.ones(520).int()}), "expected bfloat16 [520], got int32"),
    "no tensor": (lambda s: s.update({"body.bias": 3}), "body.bias: expected bfloat16 [520], got 3"),
    "buffer": (lambda s: s.update({"ids": torch.ones(4)}), "ids: expected int64 [4], got float32 [4]"),
    "tied": (lambda s: s.update({"head.weight": s["head.weight"] + 1}), "head.weight: it is tied to embed.weight"),
    "meta": (lambda s: s.update({"body.bias": s["body.bias"].to("meta")}), "[520], got one on the meta device"),
    "sparse": (lambda s: s.update({"body.bias": s["body.bias"].to_sparse()}), "got one of layout torch.sparse_coo"),
    "freed": (lambda s: s["body.bias"].untyped_storage().resize_(0), "[520], got one whose memory was freed"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_weights_that_do_not_fit_change_nothing(case: str) -> None:
    model, opt = ready("running" if case > "m" else "fresh")
    saved = {name: t.clone() for name, t in Net(3).state_dict().items()}
    change, text = MISFITS[case]
    change(saved)
    before = everything(opt, model)
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        opt.load_master_state_dict(model, saved)
    assert text in str(caught.value)
    assert everything(opt, model) == before
    if case in ("missing", "extra"):
        opt.load_master_state_dict(model, saved, strict=False)
        assert torch.equal(opt.master_state_dict(model)["embed.weight"], saved["embed.weight"])


def test_all_weights_that_do_not_fit_are_listed() -> None:
    model, opt = ready("fresh")
    saved = {name: t.clone() for name, t in Net(3).state_dict().items()}
    cases = ("missing", "extra", "shape", "buffer", "tied")
    for case in cases:
        MISFITS[case][0](saved)
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        opt.load_master_state_dict(model, saved)
    assert [case for case in cases if MISFITS[case][1] not in str(caught.value)] == []


def freed(t: Tensor) -> Tensor:
    t.untyped_storage().resize_(0)
    return t


UNWRITABLE: dict[str, tuple[Callable[[Net], object], str]] = {
    "freed weight": (lambda m: freed(m.body.bias), "body.bias: the model's is one whose memory was freed"),
    "meta weight": (lambda m: m.body.to("meta"), "body.bias: the model's is one on the meta device"),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_what_torch_cannot_write_in_the_model_is_seen_before_the_rest_is_written(case: str) -> None:
    model = Net().bfloat16()
    spoil, text = UNWRITABLE[case]
    saved = {name: t.clone() for name, t in Net(3).state_dict().items()}
    before = {name: t.clone() for name, t in model.state_dict().items()}
    spoil(model)
    opt = AdamW(trained(model), plan="int8_split24")
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        opt.load_master_state_dict(model, saved)
    assert text in str(caught.value)
    found = model.state_dict()
    assert all(torch.equal(found[name], before[name]) for name in before.keys() - {"body.weight", "body.bias"})


@pytest.mark.usefixtures("one_rank")
def test_dtensors_that_do_not_fit_change_nothing() -> None:
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

    mesh, other = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1))
    full = {f"{i}.weight": torch.randn(4, 3) for i in range(2)}
    for sharded, said in ((False, "got a DTensor over"), (True, "got a DTensor over another mesh")):
        model = nn.Sequential(*(nn.Linear(3, 4, bias=False) for _ in range(2))).bfloat16()
        if sharded:
            for layer in model:
                layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh))
        opt = AdamW(model.named_parameters(), plan="int8_split24")
        before = [p.detach().clone() for p in model.parameters()]
        saved = {**full, "1.weight": DTensor.from_local(full["1.weight"], other, [Replicate(), Replicate()])}
        with pytest.raises(ValueError, match=rf"1.weight: expected .*{said}"):
            opt.load_master_state_dict(model, saved)
        assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
        assert not opt.state and not any(low_bits.ATTRIBUTE in p.__dict__ for p in model.parameters())
        opt.load_master_state_dict(model, full)


def test_another_model_is_refused() -> None:
    model, opt = ready("running")
    other = copy.deepcopy(model)
    for call in (lambda: opt.master_state_dict(other), lambda: opt.load_master_state_dict(other, Net().state_dict())):
        with pytest.raises(ValueError, match="none of the model's 6 parameters is in this optimizer"):
            call()
    with pytest.raises(TypeError, match="takes a state dict, got 3"):
        opt.load_master_state_dict(model, 3)  # type: ignore[arg-type]


# -- weights that somebody else changes ------------------------------------------------------------------------
def test_an_edit_that_contradicts_the_kept_weight_is_found() -> None:
    model, opt = ready("running", "fp32_master")
    with torch.no_grad():
        model.body.weight.data[0, 0] = 3.0
    for call in (opt.full_weights, lambda: opt.master_state_dict(model)):
        with pytest.raises(RuntimeError, match=r"'body.weight' .* was changed by something else than the optimizer"):
            call()
    shown = model.state_dict()
    opt.load_master_state_dict(model, shown)  # the way on that the error names
    got = opt.master_state_dict(model)
    assert all(torch.equal(got[name], shown[name].float()) for name, _ in trained(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_is_changed_where_it_is_two_places_from_the_kept_one(dtype: torch.dtype) -> None:
    """No rounding, of which the stochastic ones reach both neighbours of the nearest number, is that far off."""
    kept = torch.tensor([1.0, -1.0, 0.0, 3e-5])  # beside a power of two, a zero, and a subnormal number of fp16
    places = kept.to(dtype).view(torch.int16)
    for off, changed in ((0, False), (1, False), (2, True), (3, True)):
        assert weights.edited((places + off).view(dtype), kept) is changed


def test_calls_by_name_refuse_names_of_several_parameters() -> None:
    models = [nn.Linear(64, 80), nn.Linear(64, 80)]
    plans = zip(models, ("fp32", "int8"), strict=True)
    opt = AdamW([{"params": model.named_parameters(), "plan": plan} for model, plan in plans])
    with pytest.raises(ValueError, match="two parameters are called 'weight'"):
        opt.plans()
    assert all(torch.equal(opt.master_state_dict(m)["weight"], m.weight) for m in models)


@pytest.mark.parametrize("plan", ["int8_split24", "fp32_master"])
def test_states_begin_anew_and_weights_stay(plan: str) -> None:
    """The advice of docs/contract.md in the place of opt.state[p]["exp_avg"].zero_()."""
    model = nn.Linear(72, 64).bfloat16()
    opt, new = (AdamW(model.named_parameters(), plan=plan, backend="reference") for _ in range(2))
    train(opt, range(3))
    kept = opt.master_state_dict(model)
    found = []
    for one in (opt, new):
        one.state.clear()
        one.load_master_state_dict(model, kept)
        assert alike(one.full_weights(), list(kept.values()))
        train(one, range(1))
        found.append([one.dense_state_dict()["state"], one.full_weights()])
    assert alike(*found)


# -- rows scaled
KEPT_BITS = {"fp32_master": 24, "split32": 24, "int8_split24": 16, "bf16_sr": 8}
"""Significant bits that a plan keeps of a bf16 weight, with which nearest is within 2^-bits."""


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("plan", KEPT_BITS)
def test_rows_are_scaled_with_all_that_is_kept_of_them(plan: str, started: bool) -> None:
    """QK-clip: every head's rows by their factor, moments as they are, and the next step goes on from there."""
    torch.manual_seed(0)
    exact = torch.randn(96, 64)
    p = nn.Parameter(exact.bfloat16())
    low_bits.keep(p, exact)
    opt = AdamW([p], plan=plan, lr=0.1)
    if started:
        p.grad = torch.randn(96, 64).bfloat16()
        opt.step()
    moments = {k: v.clone() for k, v in opt.state[p].items() if k.startswith("exp_avg")}
    (before,) = opt.full_weights()
    factors = torch.tensor([0.3, 1.0, 0.77, 0.0])
    opt.scale_rows(p, factors)
    expected = before * factors.repeat_interleave(24)[:, None]
    (after,) = opt.full_weights()
    bits = KEPT_BITS[plan] if started or plan == "bf16_sr" else 24
    assert ((after - expected).abs() <= 2.0**-bits * expected.abs()).all()
    assert ((p.detach() - after).abs() <= 2.0**-8 * after.abs()).all()
    assert torch.equal(after[24:48], before[24:48]) or not started  # a plan may drop what a cast has left
    assert all(torch.equal(opt.state[p][k], v) for k, v in moments.items())
    zero_step(opt)
    opt.scale_rows(p, torch.full((96,), 0.5))  # a power of two loses nothing
    (half,) = opt.full_weights()
    opt.scale_rows(p, [2.0])
    assert torch.equal(opt.full_weights()[0], 2 * half)


def test_rows_that_cannot_be_scaled() -> None:
    p, other = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6))
    opt = AdamW([("q", p)], plan="fp32")
    for of, factors, says in (
        (other, [1.0], "no parameter of this optimizer"), (p, [1.0] * 4, r"each of 6 rows.*shape \(4,\)"),
        (p, 2.0, "each of 6 rows"), (p, [1.0, float("nan")], "not all finite"), (p, [], "each of 6 rows"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            opt.scale_rows(of, factors)
    with pytest.raises(ValueError, match="keeps other weights beside p"):
        ScheduleFreeAdamW([p], plan="fp32").scale_rows(p, [2.0])
    assert torch.equal(p, torch.ones(6, 4))


@pytest.mark.parametrize("plan", ["fp32_master", "split32", "int8_split24", "flashoptim", "bf16_sr"])
def test_full_weights_loaded_back_show_another_value_only_half_way_between_two(plan: str) -> None:
    """Every full weight is the same. Where two values are as near, a step may show one and the load the other."""
    made = torch.Generator().manual_seed(0)
    model = nn.Linear(64, 96).bfloat16()
    opt = AdamW(model.named_parameters(), lr=1e-3, plan=plan, backend="reference")
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=made).to(p.dtype)
        opt.step()
    full, shown = opt.master_state_dict(model), copy.deepcopy(model.state_dict())
    opt.load_master_state_dict(model, full)
    assert alike(opt.master_state_dict(model), full)
    for name, now in model.state_dict().items():
        was, x = shown[name], full[name]
        assert bool(((was == now) | ((was.double() - x).abs() == (now.double() - x).abs())).all()), name


@pytest.mark.parametrize("plan", ["fp32_master", "int8_split24", "bf16"])
def test_a_model_of_frozen_parameters_has_its_weights_as_they_are(plan: str) -> None:
    """It is the optimizer's model all the same; one of other parameters is refused."""
    model = nn.Linear(8, 9).bfloat16().requires_grad_(False)
    opt = AdamW(model.named_parameters(), plan=plan)
    full = opt.master_state_dict(model)
    assert alike(full, {name: value.float() for name, value in model.state_dict().items()})
    opt.load_master_state_dict(model, {name: value + 1 for name, value in full.items()})
    assert alike(opt.master_state_dict(model), {k: (v + 1).bfloat16().float() for k, v in full.items()})
    for call in (opt.master_state_dict, lambda other: opt.load_master_state_dict(other, full)):
        with pytest.raises(ValueError, match="made for another model"):
            call(copy.deepcopy(model))
