"""Weights of which layers see 8 bits: their bits, the steps of all backends, and what a script does to a parameter that
is three tensors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import optgen
from optgen.base.errors import UserError
from optgen.formats import Blocked, LogMinMax, Plan, Split, SplitFp8
from optgen.runtime.cpu import native
from optgen.runtime.layout.fp8_weight import KINDS, Fp8Weight
from specs import plans
from tests.training import bits, through_file

KEPT = {
    kind: plans.int8_split24.but("Weights that show 8 bits.", name=f"shows_{kind}", master=SplitFp8(kind))
    for kind in KINDS
}
PLAIN = plans.fp32.but("Weights that show 8 bits.", name="plain_fp8", master=SplitFp8())
BF16, FP32 = torch.bfloat16, torch.float32
BACKENDS = ["reference", *["cpp"] * (native.compiler() is not None), "triton"]


def drawn(rows: int, seed: int = 0) -> Tensor:
    """Draw rows of 128: numbers of all sizes, zeros, infinities and NaNs among them."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(30 * torch.randn(rows, 2, 1, generator=draw)).expand(-1, -1, 64).reshape(rows, 128)
    x = torch.randn(rows, 128, generator=draw) * torch.exp(2 * torch.randn(rows, 128, generator=draw)) * sizes
    x = torch.where(torch.rand(rows, 128, generator=draw) < 0.05, 0.0, x).clamp(-1e38, 1e38)
    x[0, 3], x[1, 70], x[2], x[3, :64], x[4] = torch.nan, torch.inf, 0, -0.0, 2.0**-140
    for k, near in enumerate((448.0, 240.0, 232.0, 57344.0, 1.0)):  # ends of ranges, ties of e4m3, powers of two
        x[5 + k] *= 0
        x[5 + k, :64] = near * 2.0**k * (1 + torch.arange(-32, 32) * 2.0**-22)
    return x


def halved(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the exponents of scales, and codes: of finite rows of blocks of 64, in fp64; torch casts ties to even."""
    of, largest, *_ = KINDS[kind]
    fraction, exponent = torch.frexp(x.double().abs().amax(-1, keepdim=True) / largest)
    scale = (exponent - (fraction == 0.5).int() + 127).clamp(0, 254)
    number = (x.double() * torch.exp2(127.0 - scale.double())).float()
    up = torch.nextafter(number, torch.full_like(number, torch.inf).copysign(number))
    return scale.squeeze(-1), up.clamp(-largest, largest).to(of).view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1000, pytest.param(80_000, marks=pytest.mark.full)])
def test_codes_are_torchs_and_the_rest_is_within_the_bound(kind: Any, rows: int) -> None:
    x, master = drawn(rows), SplitFp8(kind)
    made = {k: torch.as_tensor(v) for k, v in master.encode(x.view(rows, 2, 64), master.codes).items()}
    ours = Fp8Weight.of(x, BF16, kind)
    for name, tensor in ours.parts().items():
        if name in ("codes", "scale", "low"):
            key = "" if name == "codes" else name
            assert torch.equal(tensor.view(-1), made[key].view(tensor.dtype).reshape(-1)), f"two texts differ in {name}"
    finite = x.view(rows, 2, 64).isfinite().all(-1)
    blocks = x.view(rows, 2, 64)[finite]
    scale, codes = halved(blocks, kind)
    used = blocks.abs().amax(-1) > 0
    assert torch.equal(ours.scale[finite][used], scale[used].to(torch.uint8))
    assert torch.equal(ours.codes.view(rows, 2, 64)[finite][used], codes[used])
    bound = master.bound(master.codes)
    assert bound is not None
    top = blocks.abs().amax(-1, keepdim=True)
    inside = ((top >= bound.low) & (top <= bound.high)).squeeze(-1)
    error = (ours.read().view(rows, 2, 64)[finite] - blocks).abs() / (top * (1 + bound.excess))
    assert inside.any() and error[inside].max() <= bound.total
    error, least = (ours.read().view(rows, 2, 64)[finite] - blocks).abs(), 2.0 ** -(16 + KINDS[kind].mantissa)
    assert (error <= torch.maximum(blocks.abs() * least, top * 2.0**-32))[inside].all()
    read = torch.as_tensor(master.decode(made, master.codes)).view(rows, 128)
    assert torch.equal(read.isnan(), ours.read().isnan()) and torch.equal(
        read[~read.isnan()], ours.read()[~read.isnan()]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_and_taken_again_is_the_same_number(kind: Any) -> None:
    """Also where the largest number was rounded to one that a finer scale holds."""
    w = Fp8Weight.of(drawn(2000, 2).nan_to_num(0, 1, -1), BF16, kind)
    again = Fp8Weight.of(w.read(), BF16, kind)
    assert torch.equal(again.read(), w.read())


def coded(kind: str = "e4m3", bias: bool = True, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 192, bias), nn.Tanh(), nn.Linear(192, 64, bias)).to(BF16)
    optgen.fp8_weights(model, kind=cast(Any, kind))
    return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": x for name, p in model.named_parameters()
        for key, x in (p.parts() if isinstance(p, Fp8Weight) else {"": p.detach()}).items() if isinstance(x, Tensor)
    }  # fmt: skip


def trained(model: nn.Sequential, opt: Any, steps: int, seed: int = 3) -> None:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = torch.randn(16, 128, generator=draw).to(BF16), torch.randn(16, 64, generator=draw).to(BF16)
        (model(x) - y).float().pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize(
    ("rule", "kind"), [("adamw", "e4m3"), ("adamw", "e5m2"), ("lamb", "e4m3"), ("muon", "e4m3"), ("came", "e4m3")]
)
def test_all_backends_store_the_same_bits(rule: str, kind: str) -> None:
    found = []
    for backend in BACKENDS if rule in ("adamw", "lamb") else BACKENDS[:-1]:
        model = coded(kind)
        opt = optgen.compile(rule, KEPT[kind], maths="strict")(model.named_parameters(), lr=1e-2, backend=backend)
        trained(model, opt, 3)
        found.append(bits(weights(model)))
    assert all(x == found[0] for x in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_takes_the_exact_weight_and_leaves_the_nearest(backend: str) -> None:
    """SGD by hand, of the numbers that three tensors hold: the step's are those that Fp8Weight makes of the result."""
    model = coded(bias=False)
    opt = optgen.compile("sgd", PLAIN, maths="strict")(model.named_parameters(), lr=0.25, backend=backend)
    for seed in range(3):
        torch.manual_seed(seed)
        grads = {name: torch.randn(p.shape).to(BF16) * 2.0**-6 for name, p in model.named_parameters()}
        exact = {name: p.read() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.grad = grads[name]
        opt.step()
        want = {n: Fp8Weight.of(x - 0.25 * grads[n].float(), BF16) for n, x in exact.items()}
        for name, p in model.named_parameters():
            assert bits(p.parts()) == bits(want[name].parts())


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_updates_below_a_place_of_the_codes_are_kept(backend: str) -> None:
    """100 updates of 2^-10 of a place, each of which the codes alone would lose."""
    p = nn.Parameter(Fp8Weight.of(torch.ones(64, 64), BF16))
    opt = optgen.compile("sgd", PLAIN)([p], lr=2.0**-13, backend=backend)
    for _ in range(100):
        p.grad = torch.full((64, 64), -1.0, dtype=BF16)
        opt.step()
    assert torch.equal(p.read(), torch.full((64, 64), 1 + 100 * 2.0**-13))
    assert torch.equal(p.float(), torch.ones(64, 64))


def test_layers_see_codes_and_operators_in_place_the_exact_weight() -> None:
    model = coded()
    p: Any = model[0].weight
    codes = p.codes.view(torch.float8_e4m3fn).float().view(192, 2, 64) * torch.exp2(p.scale.float() - 127).unsqueeze(-1)
    x = torch.randn(5, 128, dtype=BF16, requires_grad=True)
    plain = codes.view(192, 128).to(BF16).requires_grad_()
    out, want = model[0](x), nn.functional.linear(x, plain, model[0].bias)
    assert torch.equal(out, want) and torch.equal(p.float(), plain.float())
    out.sum().backward()
    (grad,) = torch.autograd.grad(want.sum(), plain)
    assert type(p.grad) is Tensor and torch.equal(p.grad, grad)
    before = p.read()
    with torch.no_grad():
        p.mul_(0.5)
        assert torch.equal(p.read(), before * 0.5)
        torch._foreach_mul_([p], [2.0])
        p.t().add_(0)
        assert torch.equal(p.read(), before)
        p.copy_(before * 3)
        assert torch.equal(p.read(), Fp8Weight.of(before * 3, BF16).read())
        p.data.zero_()
    assert not p.read().any() and "Fp8Weight" in repr(p)
    for view in (lambda: p[0], lambda: p.view(-1), lambda: p.detach()[:, :4]):
        with pytest.raises(RuntimeError, match=r"Fp8Weight has no views.*p\.copy_"):
            view()
    compiled = torch.compile(coded(), backend="eager")
    y = torch.randn(3, 128, dtype=BF16)
    assert torch.equal(compiled(y), coded()(y))


def test_averages_and_copies_of_weights_are_of_the_exact_ones() -> None:
    w = nn.Parameter(Fp8Weight.of(1 + torch.rand(64, 64), BF16), requires_grad=False)
    average, copied = copy.deepcopy(w), Fp8Weight.of(torch.zeros(64, 64), BF16)
    for _ in range(50):
        average.lerp_(w, 0.25)
    torch._foreach_copy_([copied], [w])
    assert (average.read() - w.read()).abs().max() < 50 * 2.0**-18 and torch.equal(copied.read(), w.read())
    other = Fp8Weight.of(torch.zeros(64, 64), BF16, "e5m2").copy_(w)
    turned = Fp8Weight.of(torch.zeros(64, 64), BF16).copy_(w.t())
    assert (other.read() - w.read()).abs().max() < 2.0**-16 and (turned.read() - w.read().t()).abs().max() < 2.0**-17
    shown = optgen.compile("sgd", PLAIN)([w.requires_grad_()], lr=1.0).views(w)["mxfp8_rows"]
    before = shown.dequantize()
    w.data.mul_(64)
    assert torch.equal(shown.dequantize(), before)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_a_step_follows_a_weight_to_other_memory(backend: str) -> None:
    found = []
    for moved in (False, True):
        model = coded()
        opt = optgen.compile("adamw", KEPT["e4m3"])(model.named_parameters(), lr=1e-2, backend=backend)
        trained(model, opt, 2)
        other = coded(seed=5)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            with torch.no_grad():
                if moved:
                    p.data = q.detach()
                else:
                    p.copy_(q)
        trained(model, opt, 2)
        found.append((bits(weights(model)), bits(opt.state_dict()["state"])))
    assert found[0] == found[1]


def test_codes_and_scales_are_an_mxfp8_weight() -> None:
    model = coded()
    opt = optgen.compile("adamw", KEPT["e4m3"])(model.named_parameters(), lr=1e-3)
    shown = opt.views(model[0].weight)["mxfp8_rows"]
    assert (shown.codes.dtype, shown.scales.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    assert shown.scales.shape == (192, 4) and torch.equal(shown.dequantize(BF16), model[0].weight.to(FP32).to(BF16))


WAYS: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "torch.save": lambda both: through_file(both, weights_only=False),
}


@pytest.mark.parametrize("way", ["state dicts", "files", "checkpoint", "itself", "masters", *WAYS])
@pytest.mark.parametrize("rule", ["adamw", "schedule_free_adamw"])
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_a_run_goes_on_with_the_bits_that_it_would_have_had(rule: str, way: str, backend: str, tmp_path: Path) -> None:
    cls = optgen.compile(rule, KEPT["e4m3"])

    def begun(seed: int = 0) -> tuple[nn.Sequential, Any]:
        model = coded(seed=seed)
        return model, cls(model.named_parameters(), lr=1e-2, backend=backend)

    model, opt = begun()
    trained(model, opt, 2)
    saved = opt.state_dict()
    assert all("weight_scale" not in entry for entry in saved["state"].values())  # the model has it
    if way in WAYS:
        other, again = WAYS[way]((model, opt))
    elif way == "itself":
        opt.load_state_dict(opt.state_dict())
        other, again = model, opt
    else:
        other, again = begun(1)
        if way == "checkpoint":
            optgen.save_checkpoint(tmp_path / "run.pt", opt, model)
            optgen.load_checkpoint(tmp_path / "run.pt", again, other)
        elif way == "masters":
            trained(other, again, 1)  # states to write beside
            again.load_state_dict(opt.state_dict())
            again.load_master_state_dict(other, opt.master_state_dict(model))
        else:
            of_files = way == "files"
            other.load_state_dict(through_file(model.state_dict()) if of_files else model.state_dict())
            again.load_state_dict(through_file(opt.state_dict()) if of_files else opt.state_dict())
    straight, alone = begun()
    trained(straight, alone, 2)
    for m, o in ((other, again), (straight, alone)):
        trained(m, o, 2, seed=9)
    if way == "masters":  # the same numbers, and codes of a scale that may be finer
        assert all(
            torch.equal(a.float(), b.float()) for a, b in zip(other.parameters(), straight.parameters(), strict=True)
        )
    else:
        assert bits(weights(other)) == bits(weights(straight))
    assert bits(again.state_dict()["state"]) == bits(alone.state_dict()["state"])


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_every_way_to_step_has_the_same_bits(backend: str) -> None:
    found = []
    for way in ("plain", "release", "away", "closure", "eval"):
        model = coded()
        rule = "schedule_free_adamw"
        opt = optgen.compile(rule, KEPT["e4m3"])(model.named_parameters(), lr=1e-2, backend=backend)
        handle = opt.release_gradients() if way == "release" else None
        for k in range(3):
            if way == "away" and k:
                opt._offload.resident = ()
                opt.offload_states()
                opt.reload_states()
            if way == "eval":
                opt.eval()
                copy.deepcopy(opt.state_dict())
                opt.train()
            trained(model, opt, 1, seed=k)
        if handle is not None:
            handle.remove()
        found.append((bits(weights(model)), bits(opt.state_dict()["state"])))
    assert all(x == found[0] for x in found)


def test_bits_that_a_cast_kept_are_taken_and_tied_weights_stay_tied() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(96, 64), nn.Linear(64, 64), nn.Linear(64, 96, bias=False))
    model[2].weight = model[0].weight
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    optgen.cast_model(model, BF16)
    assert optgen.fp8_weights(model) is model and model[2].weight is model[0].weight
    for name, p in model.named_parameters():
        if name != "1.bias":
            assert isinstance(p, Fp8Weight) and isinstance(p, nn.Parameter)
            assert bits(p.parts()) == bits(Fp8Weight.of(exact[name], BF16).parts())
    opt = optgen.compile("adamw", KEPT["e4m3"])(model.named_parameters(), lr=1e-2)
    model(torch.arange(96)).float().pow(2).mean().backward()
    opt.step()
    full = opt.master_state_dict(model)
    assert full["0.weight"].dtype is FP32 and torch.equal(full["0.weight"], model[0].weight.read())
    fp32 = nn.Sequential(nn.Embedding(96, 64), nn.Linear(64, 64), nn.Linear(64, 96, bias=False))
    fp32.load_state_dict(full)
    assert torch.equal(fp32[2].weight, model[2].weight.read())


def test_what_hung_on_the_old_parameter_is_kept_or_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)).to(BF16)
    model[1].weight = model[0].weight
    model[2].weight.no_decay, model[2].weight.grad = True, torch.ones(64, 64, dtype=BF16)
    optgen.fp8_weights(model, keep=["1.weight"])  # the other name of the first
    assert type(model[0].weight) is nn.Parameter and model[1].weight is model[0].weight
    p: Any = model[2].weight
    assert isinstance(p, Fp8Weight) and p.no_decay and torch.equal(p.grad, torch.ones(64, 64, dtype=BF16))
    assert optgen.fp8_weights(model, keep=["0.weight"])[2].weight is p  # once more
    model[0].weight.register_hook(lambda g: g)
    with pytest.raises(ValueError, match="have hooks, which would be lost: register them afterwards"):
        optgen.fp8_weights(model)


def test_a_model_is_made_on_the_meta_device_or_shared() -> None:
    with torch.device("meta"):
        model = optgen.fp8_weights(nn.Sequential(nn.Linear(64, 64, dtype=BF16)))
    given = optgen.fp8_weights(nn.Sequential(nn.Linear(64, 64, dtype=BF16)))
    model.to_empty(device="cpu").load_state_dict(given.state_dict())
    assert isinstance(model[0].weight, Fp8Weight) and bits(weights(model)) == bits(weights(given))
    shared: Any = model.share_memory()[0].weight
    assert all(x.is_shared() for x in (shared.codes, shared.scale, shared.low))


def test_low_bits_of_other_weights_are_not_taken_for_none() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(128, 192), nn.Tanh(), nn.Linear(192, 64)).to(BF16)
    cls = optgen.compile("adamw", KEPT["e4m3"])
    opt = cls(plain.named_parameters(), lr=1e-2)
    trained(plain, opt, 1)
    model = coded()
    again = cls(model.named_parameters(), lr=1e-2)
    with pytest.raises(ValueError, match="weight_low: not expected"):
        again.load_state_dict(opt.state_dict())
    model.load_state_dict(opt.master_state_dict(plain))
    again.load_state_dict(opt.dense_state_dict())
    trained(model, again, 1)
    saved = again.state_dict(weights_only=True)
    again.load_state_dict(saved)
    trained(model, again, 1)


def test_adamw_in_8_bits_takes_5_08_bytes() -> None:
    """1 of the code, 2 beside it, 2 + 4 / 64 of the moments, and 1 / 64 of the weight's scale."""
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False, dtype=BF16))
    opt = optgen.compile("adamw", KEPT["e4m3"])(optgen.fp8_weights(model).named_parameters(), lr=1e-3)
    model(torch.randn(1, 1024, dtype=BF16)).sum().backward()
    opt.step()
    assert opt.memory().total == 1024 * 1024 * (5 + 5 / 64)
    p: Any = model[0].weight
    assert sum(x.nbytes for x in (p.codes, p.scale, p.low)) == 1024 * 1024 * (3 + 1 / 64)


def test_what_is_refused() -> None:
    linear = lambda *size: nn.Sequential(nn.Linear(*size, dtype=BF16))  # noqa: E731
    for model, error, words in (
        (linear(96, 64), ValueError, r"'0.weight' \(\[64, 96\]\) have rows that are no multiple of 64 long.*keep="),
        (nn.Sequential(nn.LazyLinear(64)), ValueError, "have no shape yet: make a forward pass"),
        (nn.Sequential(weight_norm(nn.Linear(64, 64, dtype=BF16))), ValueError, "'0.weight' are computed of other"),
        (nn.Sequential(nn.Linear(64, 64)), TypeError, r"'0.weight' is a torch.float32 .*cast_model"),
        (nn.Sequential(nn.Embedding(4, 64)), ValueError, "no nn.Linear with a weight to train"),
        (linear(64, 64).requires_grad_(False), ValueError, "no nn.Linear with a weight to train"),
    ):
        with pytest.raises(cast(Any, error), match=words):
            optgen.fp8_weights(model)
    with pytest.raises(ValueError, match="fp8_weights: keep pattern 'x' matches no weight"):
        optgen.fp8_weights(linear(64, 64), ["x"])
    model = coded()
    with pytest.raises(ValueError, match="layers read the codes of Fp8Weights already"):
        optgen.compile("adamw", KEPT["e4m3"])(model.named_parameters(), lr=1e-3).use_views(model)
    with pytest.raises(TypeError, match=r"plan 'int8_split24' was not built for e4m3 Fp8Weight .*SplitFp8\('e4m3'\)"):
        optgen.optim.AdamW(model.named_parameters(), lr=1e-3)
    with pytest.raises(
        TypeError, match=r"not built for e4m3 Fp8Weight parameters: use one of master=SplitFp8\('e4m3'\)"
    ):
        optgen.compile("adamw", KEPT["e5m2"])(model.named_parameters(), lr=1e-3)
    opt = optgen.compile("adamw", KEPT["e4m3"])(model.named_parameters(), lr=1e-3, offload=True)
    with pytest.raises(
        ValueError, match=r"cannot write the codes of .*host \(offload=True\); leave it out of fp8_weights"
    ):
        trained(model, opt, 1)
    with pytest.raises(TypeError, match=r"SamAdamW does not support an Fp8Weight.*optgen\.SAM\(opt\)"):
        optgen.compile("sam(adamw)", KEPT["e4m3"])(model.named_parameters(), lr=1e-3)
    with pytest.raises(UserError, match=r"views beside SplitFp8\(\)"):
        KEPT["e4m3"].but(views=("fp8",))
    blocks: dict[str, Any] = {"signed": Blocked(8, 128), "nonneg": LogMinMax(8, 128), "small_numel": 0}
    with pytest.raises(UserError, match="128"):
        optgen.compile("adamw", Plan("Wrong.", master=SplitFp8(), name="wrong", **blocks))
    with pytest.raises(UserError) as found:
        Split(cast(Any, "e4m3"))
    assert "SplitFp8" in found.value.hint
    with pytest.raises(UserError, match="SplitFp8"):
        SplitFp8(cast(Any, "e3m4"))
