"""Views: each is what torch's or torchao's quantizer makes of the weight, all backends write it alike, and none is ever
stale."""

from __future__ import annotations

import copy
import io
import math
import random
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import optgen
from optgen.base.errors import UserError
from optgen.formats import Blocked, LogMinMax, Native, Plan, Split
from optgen.formats.views import VIEWS
from optgen.integrations.torchao import mx_tensor, scaled_tensor
from optgen.runtime.cpu import native
from specs import plans
from tests.training import give, through_file, train

mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")

VIEWED = plans.int8_split24.but("With a view of the weight.", views=("mxfp8_rows",), name="viewed")
PLAIN = plans.fp32.but("With a view of the weight.", views=("mxfp8_rows",), name="plain")
ROUNDED = plans.bf16_sr.but("With a view of the weight.", views=("mxfp8_rows",), name="rounded")
ALL = plans.int8_split24.but("With all views of the weight.", views=tuple(VIEWS), name="all_views")
COLUMNS = plans.fp32.but("With a view along columns.", views=("mxfp8_columns",), name="along_columns")
SCALED = plans.fp32.but("With views under a scale of the tensor.", views=("nvfp4", "fp8"), name="scaled")
FP8_AND_COLUMNS = plans.bf16_sr.but("With two views.", views=("fp8", "mxfp8_columns"), name="fp8_and_columns")
FP8 = plans.bf16_sr.but("With a view in FP8.", views=("fp8",), name="with_fp8")
BF16, FP32 = torch.bfloat16, torch.float32
FLOATS = {"fp8": (torch.float8_e4m3fn, 448), "fp8_e5m2": (torch.float8_e5m2, 57344)}


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return torchao's codes and scales of a matrix, as bytes."""
    scales, codes = mx.to_mx(x.detach().contiguous(), torch.float8_e4m3fn, 32, mx.ScaleCalculationMode.RCEIL)
    return codes.view(torch.uint8), scales.view(torch.uint8).view(x.shape[0], -1)


def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the format's codes and scales of a matrix."""
    made = VIEWS["mxfp8_rows"].encode(x.to(FP32).view(-1, 32))
    return torch.as_tensor(made[""]).view(x.shape), torch.as_tensor(made["scale"]).view(x.shape[0], -1)


def quantized_under(x: Tensor, name: str, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of blocks, as bytes, that torch (fp8) or torchao (nvfp4) makes of a matrix under
    a scale of the tensor."""
    x = x.detach().contiguous()
    if name in FLOATS:
        kind, most = FLOATS[name]
        codes = (x.float() * scale.reciprocal()).clamp(-most, most).to(kind)
        return codes.view(torch.uint8), torch.zeros(0, dtype=torch.uint8)
    scales, codes = nv.nvfp4_quantize(x, 16, scale)
    return codes, scales.view(torch.uint8).view(x.shape[0], -1)


HALF = {"fp8": 224, "fp8_e5m2": 28672, "nvfp4": 1344}
"""Half of the largest number under a scale of 1."""


def exact_scale(x: Tensor, name: str) -> float:
    """Return the smallest power of two under which a weight has room to double, in fp64; of zeros 2^-12."""
    top = float(x.detach().double().abs().max())
    fraction, exponent = math.frexp(top / HALF[name])
    return 2.0 ** (exponent - (fraction == 0.5)) if top else 2.0**-12


def exact_scales(x: Tensor) -> Tensor:
    """Return the exponents of the smallest powers of two under which no number of a block is beyond 448, in fp64."""
    top = x.double().view(x.shape[0], -1, 32).abs().amax(-1)
    fraction, exponent = torch.frexp(top / 448)
    found = (exponent - (fraction == 0.5).int() + 127).clamp(0, 254)
    found = torch.where(top == 0, 0, torch.where(top.isinf(), 254, found))
    return torch.where(top.isnan(), 255, found).to(torch.uint8)


def same(x: Tensor, ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> Tensor:
    """Return in which blocks of x two encodings are equal; the sign of a NaN, which none defines, left out."""
    nan = (ours[0] & 0x7F == 0x7F) & (theirs[0] & 0x7F == 0x7F)
    codes = ((ours[0] == theirs[0]) | nan).view(x.shape[0], -1, 32).all(-1)
    return codes & (ours[1] == theirs[1])


def drawn(dtype: torch.dtype, rows: int, seed: int) -> Tensor:
    """Draw rows of 1024: any patterns, numbers of all sizes, and single odd ones among them."""
    draw = torch.Generator().manual_seed(seed)
    integers = torch.int16 if dtype is BF16 else torch.int32
    some = torch.iinfo(integers)
    patterns = torch.randint(some.min, some.max + 1, (rows, 1024), generator=draw).to(integers).view(dtype)
    sizes = torch.exp2(40 * torch.randn(rows, 32, 1, generator=draw)).expand(-1, -1, 32).reshape(rows, 1024)
    x = (torch.randn(rows, 1024, generator=draw) * sizes).to(dtype)
    x = torch.where(torch.rand(rows, 1024, generator=draw) < 1e-3, patterns, x)
    x[rows // 2 :] = torch.where(patterns.isnan(), 0, patterns)[rows // 2 :]
    x[:, :32] = 0
    x[0, 32:64], x[1, 33], x[2, 40], x[3, 50] = -0.0, torch.inf, -torch.inf, torch.nan
    return x


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("rows", [100, pytest.param(10_000, marks=pytest.mark.full)])
def test_a_view_is_what_torchao_makes_of_the_weight(dtype: torch.dtype, rows: int) -> None:
    """torchao rounds the quotient of fp32 by 448, and its logarithm: up to 4 places above 448 * 2^k it takes less."""
    x = drawn(dtype, rows, rows)
    ours, theirs = encoded(x), quantized(x)
    alike = same(x, ours, theirs)
    top = x.float().view(rows, -1, 32).abs().amax(-1)
    places = top.view(torch.int32) - ((top.view(torch.int32) >> 23 << 23) + 0x600000)
    assert dtype is FP32 or alike.all()
    assert (alike | ((places > 0) & (places <= 4))).all()
    assert torch.equal(ours[1], exact_scales(x))


def test_scales_are_exact_at_every_corner() -> None:
    """Largest numbers next to 448 * 2^k and to powers of two, for every exponent and both signs."""
    exponents = torch.arange(256, dtype=torch.int32)[:, None]
    near = torch.tensor([m + d for m in (0, 0x400000, 0x600000, 0x7FFFFF) for d in range(-3, 4)], dtype=torch.int32)
    top = ((exponents << 23) + near).clamp(0, 0x7F800000).view(FP32).reshape(-1, 1)
    x = torch.cat([top, -top / 3, top / 1000, -top, torch.zeros(len(top), 28)], 1)
    ours = encoded(x)
    assert torch.equal(ours[1], exact_scales(x))
    odd = ~same(x, ours, quantized(x)).view(-1)
    assert torch.equal(odd & ((near - 0x600000 < 1) | (near - 0x600000 > 3)).repeat(256), torch.zeros_like(odd))


def test_every_code_reads_as_its_number() -> None:
    """All 256 codes under all scales against torch's own dtypes, and the bound of storing a number."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    view = VIEWS["mxfp8_rows"]
    read = torch.as_tensor(view.decode({"": codes.view(256, 8, 32), "scale": scales[:, :, None]})).view(256, 256)
    want = codes.view(torch.float8_e4m3fn).float() * scales.view(torch.float8_e8m0fnu).float()
    finite = want.isfinite()
    assert torch.equal(read[finite], want[finite])
    assert read[want.isnan() & (scales == 255)].isnan().all()
    x = drawn(FP32, 100, 1).view(-1, 32)
    bound = view.bound()
    assert bound is not None
    x = x[(x.abs() <= bound.high).all(-1)]
    made = encoded(x)
    kept = torch.as_tensor(view.decode({"": made[0], "scale": made[1]}))
    top = x.abs().amax(-1, keepdim=True).double().clamp(min=bound.low) * (1 + bound.excess)
    share = ((kept.double() - x.double()).abs() / (top * bound.value)).max()
    assert 0.5 < share <= 1


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("rows", [60, pytest.param(10_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", HALF)
def test_a_view_under_a_scale_of_the_tensor_is_what_quantizers_make(name: str, rows: int, dtype: torch.dtype) -> None:
    """Under scales from the smallest to the largest; the codes of a block with a NaN are any in NVFP4.

    torchao makes no number of zeros under scales below 2^-122: its reciprocal is Inf.
    """
    x, view = drawn(dtype, rows, rows), VIEWS[name]
    for exponent in (-126 if name in FLOATS else -120, -12, -3, 0, 7, 60, 126):
        scale = torch.tensor(2.0**exponent)
        made = view.encode((x.to(FP32) * scale.reciprocal()).view(-1, view.block))
        codes, scales = quantized_under(x, name, scale)
        ours = torch.as_tensor(made[""]).view(x.shape)
        nan = x.isnan()
        if name == "nvfp4":
            ours = ours[:, ::2] | ours[:, 1::2] << 4
            assert torch.equal(torch.as_tensor(made["scale"]).view(scales.shape), scales)
            nan = nan.view(rows, -1, 16).any(-1).repeat_interleave(8, 1)
        assert torch.equal(ours[~nan], codes[~nan])
        assert name == "nvfp4" or torch.as_tensor(ours[nan]).view(FLOATS[name][0]).float().isnan().all()
        top = (x.double() / scale).view(rows, -1, view.block).abs().amax(-1)
        inside = (top > 2.0**-100) & (top < 2.0**120)
        found = torch.as_tensor(made["top"]).view(rows, -1)[inside].double() - 127
        reach = HALF[name] * torch.exp2(found)
        assert ((top[inside] <= reach) & (top[inside] > reach / 2)).all()


SHAPES = [(34, 128), (44, 96), (130, 64), (8, 32), (3, 22, 64), (40, 80), (4160,), (7,), (2, 0)]
FEW = [(34, 128), (9, 96), (40, 80), (64, 40)]
BACKENDS = ["reference", "triton", *(["cpp"] if native.compiler() else [])]
CASES = [
    ("adamw", VIEWED, SHAPES), ("muon", VIEWED, SHAPES[:4]), ("lamb", ROUNDED, SHAPES), ("sgd", PLAIN, SHAPES),
    ("adamw", ALL, FEW), ("muon", FP8, FEW[:2]), ("sgd", SCALED, [(8, 32), (3, 22, 64), (35, 48), (4160,)]),
    ("lamb", COLUMNS, [*SHAPES[:3], *SHAPES[4:], (32, 1), (96, 33), (64, 96)]),
    pytest.param("muon", ALL, FEW, marks=pytest.mark.full),
    pytest.param("came", VIEWED, FEW, marks=pytest.mark.full),
    pytest.param("adamw", PLAIN, SHAPES, marks=pytest.mark.full),
    pytest.param("lamb", ALL, SHAPES, marks=pytest.mark.full),
]  # fmt: skip


def weights(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, generator=draw) for shape in shapes]
    return [nn.Parameter((x * torch.exp(3 * torch.randn(x.shape, generator=draw))).to(dtype)) for x in made]


def stepped(cls: Any, backend: str, dtype: torch.dtype, shapes: list[tuple[int, ...]], **options: Any) -> Any:
    opt = cls(weights(shapes, dtype), lr=1e-2, backend=backend, **options)
    train(opt, range(2))
    return opt


def stored(p: Tensor, name: str = "mxfp8_rows") -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of blocks of a parameter's view, as rows of bytes."""
    view = p.__dict__["_optgen_views"][name]
    rows = p.shape[0] if p.ndim > 1 else 1
    scales = view.get(f"{name}_scale", torch.zeros(rows, 0, dtype=torch.uint8))
    return view[f"{name}_codes"].reshape(rows, -1), scales.view(rows, -1).view(torch.uint8)


def scale_of(p: Tensor, name: str) -> Tensor:
    """Return the tensor's scale of a parameter's view."""
    found: Tensor = p.__dict__["_optgen_views"][name][f"{name}_tensor"]
    return found


def check(p: Tensor, before: Tensor, name: str) -> None:
    """Assert that a view is what a quantizer makes of the weight, the tensor's scale that of the weight `before`."""
    if name == "mxfp8_columns":
        found = [p.__dict__["_optgen_views"][name][f"{name}_{part}"] for part in ("codes", "scale")]
        if p.ndim == 2 and p.shape[0] % 32 == 0:
            assert all(map(torch.equal, found, quantized(p.t())))
        else:
            assert not any(x.numel() for x in found)
        return
    codes, scales = stored(p, name)
    size = 32 if name == "mxfp8_rows" else 16
    rows, columns = codes.shape[0], p.numel() // codes.shape[0]
    blocks = -(-columns // size)
    x = nn.functional.pad(p.detach().reshape(rows, columns), (0, size * blocks - columns))
    if name == "mxfp8_rows":
        made = quantized(x)
    else:
        made = quantized_under(x, name, scale_of(p, name))
        assert float(scale_of(p, name)) == exact_scale(before, name)
    width = columns if name != "nvfp4" else -(-columns // 8) * 4
    padded = nn.functional.pad(made[0], (0, max(0, width - made[0].shape[1])))
    assert torch.equal(codes, padded[:, :width])
    if made[1].numel():
        assert torch.equal(scales[:, :blocks], made[1])
        assert name == "nvfp4" or not scales[:, blocks:].any()


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("rule", "plan", "shapes"), CASES, ids=str)
def test_all_backends_write_the_view_of_the_weight_that_they_store(
    rule: str, plan: Plan, shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Fast maths: the weights of backends may differ, but each view is that of its weight; rows of any length."""
    cls = optgen.compile(rule, plan)
    for side in BACKENDS:
        few = shapes if side != "triton" else [s for s in shapes if s[0] < 100]
        opt = cls(weights(few, dtype), lr=1e-2, backend=side)
        for step in range(2):
            before = [p.detach().clone() for p in opt.param_groups[0]["params"]]
            train(opt, range(step, step + 1))
            for p, old in zip(opt.param_groups[0]["params"], before, strict=True):
                for name in plan.views if p.numel() else ():
                    check(p, old, name)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("rows", [100, pytest.param(10_000, marks=pytest.mark.full)])
def test_all_backends_write_the_columns_that_torchao_makes_of_any_weight(dtype: torch.dtype, rows: int) -> None:
    """A step without gradient and rate leaves each number as it was drawn, but of an Inf a NaN (0 * Inf)."""
    x = drawn(dtype, rows, rows).t().contiguous()
    cls = optgen.compile("sgd", COLUMNS)
    for side in BACKENDS:
        p = nn.Parameter(x.clone())
        p.grad = torch.zeros_like(p)
        cls([p], lr=0.0, backend=side).step()
        view = p.__dict__["_optgen_views"]["mxfp8_columns"]
        ours = view["mxfp8_columns_codes"], view["mxfp8_columns_scale"]
        turned = p.detach().t().contiguous()
        assert same(turned, ours, encoded(turned)).all()
        assert same(turned, ours, quantized(turned)).all() or dtype is FP32  # see the test of rows
        assert torch.equal(p.detach()[x.isfinite()], x[x.isfinite()])


def corners(name: str) -> Tensor:
    """Return the numbers of a view, the middles between them, their neighbours, and what is larger or no number."""
    kind, most = FLOATS[name]
    numbers = torch.arange(128, dtype=torch.uint8).view(kind).float()
    numbers = numbers[numbers <= most]
    middles = torch.cat([(numbers[1:] + numbers[:-1]) / 2, torch.tensor([most * 17 / 16, 2 * most, 1e30])])
    near = torch.cat([numbers, middles]).view(torch.int32)
    some = torch.cat([near.view(FP32), (near + 1).view(FP32), (near - 1)[1:].view(FP32), torch.tensor([torch.inf])])
    draw = torch.exp2(40 * torch.rand(5000, generator=torch.Generator().manual_seed(7)) - 25)
    x = torch.cat([torch.cat([some, -some, draw, -draw]), torch.full((3,), torch.nan)])
    return nn.functional.pad(x, (0, -len(x) % 64)).view(-1, 64)


@pytest.mark.parametrize("name", FLOATS)
def test_all_backends_round_every_corner_alike(name: str) -> None:
    """Machines with instructions that convert, too: a step from zeros, whose scale is 2^-12, to any numbers."""
    cls = optgen.compile("sgd", plans.fp32.but("With two views.", views=("mxfp8_rows", name), name=f"rows_{name}"))
    for side in BACKENDS:
        p = nn.Parameter(torch.zeros_like(corners(name)))
        p.grad = corners(name) * -(2.0**-12)
        cls([p], lr=1.0, backend=side).step()
        x = p.detach()
        assert x.isinf().any() and x.isnan().any() and float(scale_of(p, name)) == 2.0**-12
        made, codes = torch.as_tensor(VIEWS[name].encode(x.view(-1, 32) * 2.0**12)[""]), stored(p, name)[0]
        assert torch.equal(codes, made.view(x.shape)) and torch.equal(stored(p)[0], encoded(x)[0])
        numbers = ~x.isnan()
        assert torch.equal(codes[numbers], quantized_under(x, name, torch.tensor(2.0**-12))[0][numbers])


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 9))])
def test_drawn_rules_write_drawn_views(seed: int) -> None:
    draw = random.Random(seed)
    rule, base = draw.choice(["adamw", "lion", "muon", "lamb", "came", "sgd"]), draw.choice(["int8_split24", "bf16_sr"])
    views = tuple(draw.sample(list(VIEWS), draw.randint(2, 4)))
    plan = getattr(plans, base).but("With views.", views=views, name=f"drawn_{seed}")
    shapes = [(draw.choice([8, 32, 64, 70, 96]), draw.choice([32, 40, 64, 100])) for _ in range(4)]
    cls = optgen.compile(rule, plan)
    for side in BACKENDS:
        opt = cls(weights([*shapes, (64, 96)], draw.choice([BF16, FP32])), lr=1e-2, backend=side)
        for step in range(2):
            before = [p.detach().clone() for p in opt.param_groups[0]["params"]]
            train(opt, range(step, step + 1))
            for p, old in zip(opt.param_groups[0]["params"], before, strict=True):
                for name in views:
                    check(p, old, name)


@pytest.mark.parametrize("views", [("mxfp8_rows",), ("mxfp8_columns",)])
@pytest.mark.parametrize("name", ["int8_split24", "fp32", "bf16_sr"])
def test_a_view_changes_no_bit_of_the_step(name: str, views: tuple[str, ...]) -> None:
    base = getattr(plans, name)
    plan = base.but("With a view.", views=views, name="viewed")
    shapes = [(96, 128), (64, 64), (70, 256)]
    one, other = (stepped(optgen.compile("adamw", x), "reference", BF16, shapes) for x in (base, plan))
    pairs = zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert one.state_dict()["state"][0].keys() == other.state_dict()["state"][0].keys()


# -- as users have them


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 128), nn.LayerNorm(128), nn.Linear(128, 32)
    return nn.Sequential(*layers).to(BF16)


def trained(m: nn.Module, opt: Any, steps: int) -> float:
    draw, loss = torch.Generator().manual_seed(1), torch.zeros(())
    x, y = torch.randn(16, 64, generator=draw).to(BF16), torch.randn(16, 32, generator=draw).to(BF16)
    for _ in range(steps):
        loss = nn.functional.mse_loss(m(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return loss.item()


def test_linear_layers_compute_with_views_and_learn() -> None:
    m = model()
    opt = optgen.compile("adamw", VIEWED)(m.named_parameters(), lr=1e-2)
    x = torch.randn(5, 64, dtype=BF16)
    with opt.use_views(m) as handle:
        first = trained(m, opt, 1)
        assert trained(m, opt, 20) < 0.1 * first
        p = m[0].weight
        view = opt.views(p)["mxfp8_rows"]
        assert torch.equal(m[0](x), nn.functional.linear(x, view.dequantize(BF16), m[0].bias))
        assert torch.equal(view.dequantize(), mx_tensor(view).dequantize(FP32))
        rceil, emulated = mx.ScaleCalculationMode.RCEIL, mx.KernelPreference.EMULATED
        how = mx.QuantizeTensorToMXKwargs(torch.float8_e4m3fn, 32, rceil, emulated)
        theirs = mx.MXTensor.to_mx(p.detach(), torch.float8_e4m3fn, 32, rceil, emulated, act_quant_kwargs=how)
        bias = m[0].bias.detach()
        assert torch.equal(nn.functional.linear(x, mx_tensor(view), bias), nn.functional.linear(x, theirs, bias))
        assert not torch.equal(view.dequantize(BF16), p)
        m[0](x).sum().backward()
        given, shown = p.grad, nn.Parameter(view.dequantize(BF16))
        nn.functional.linear(x, shown).sum().backward()
        assert torch.equal(given, shown.grad)
        assert len(handle.layers) == 3
    assert all(type(layer) in (nn.Linear, nn.GELU, nn.LayerNorm) for layer in m)


def test_the_view_along_columns_is_the_factor_of_gradients_of_inputs() -> None:
    """As torchao makes it of the transposed weight; a layer that computes with it has the weight that it reads as."""
    m, plan = model(), VIEWED.but("With both views.", views=("mxfp8_rows", "mxfp8_columns"), name="both_views")
    opt = optgen.compile("adamw", plan)(m.named_parameters(), lr=1e-2)
    trained(m, opt, 2)
    p, grad, x = m[0].weight, torch.randn(5, 96, dtype=BF16), torch.randn(5, 64, dtype=BF16)
    view = opt.views(p)["mxfp8_columns"]
    assert (view.codes.shape, view.scales.shape) == ((64, 96), (64, 3))
    rceil, emulated = mx.ScaleCalculationMode.RCEIL, mx.KernelPreference.EMULATED
    how = mx.QuantizeTensorToMXKwargs(torch.float8_e4m3fn, 32, rceil, emulated)
    turned = p.detach().t().contiguous()
    theirs = mx.MXTensor.to_mx(turned, torch.float8_e4m3fn, 32, rceil, emulated, act_quant_kwargs=how)
    linear = nn.functional.linear
    assert torch.equal(linear(grad, mx_tensor(view)), linear(grad, theirs))
    assert torch.equal(view.dequantize(), theirs.dequantize(FP32))
    with opt.use_views(m, "mxfp8_columns"):
        assert torch.equal(m[0](x), linear(x, view.dequantize(BF16).t().contiguous(), m[0].bias))
        assert torch.equal(torch.compile(m[0], backend="aot_eager", fullgraph=True)(x), m[0](x))
        trained(m, opt, 1)
        m(x)
        m.load_state_dict(m.state_dict())
        with pytest.raises(RuntimeError, match="was written to since the view mxfp8_columns"):
            m(x)
        stale = opt.views(p)["mxfp8_columns"]
        assert torch.equal(stale.codes.view(torch.uint8), quantized(p.t())[0])
    small = nn.Linear(64, 40).weight
    found = optgen.compile("adamw", plan)([p, small, nn.Parameter(torch.zeros(2, 32, 64))])
    assert [x.states["mxfp8_columns_codes"] for x in found.memory().parameters] == [p.numel(), 0, 0]
    with pytest.raises(ValueError, match=r"\[40, 64\] the columns are no multiple of 32 long; pad the layer"):
        found.views(small)
    with pytest.raises(ValueError, match=r"mxfp8_columns is of matrices, and its shape is \[2, 32, 64\]; keep it"):
        found.views(found.param_groups[0]["params"][2])


def test_compiled_models_compute_with_the_view_of_each_step() -> None:
    """In one graph, which is traced before the steps and the edit."""
    m, x = model(), torch.randn(5, 64, dtype=BF16)
    opt = optgen.compile("adamw", VIEWED)(m.named_parameters(), lr=1e-2)
    opt.use_views(m)
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    first = compiled(x)
    for _ in range(2):
        compiled(x).square().mean().backward()
        given = m[0].weight.grad
        opt.zero_grad()
        m(x).square().mean().backward()
        assert torch.equal(given, m[0].weight.grad)
        opt.step()
        opt.zero_grad()
        assert torch.equal(compiled(x), m(x))
    assert not torch.equal(compiled(x), first)
    with torch.no_grad():
        m[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"0\.weight was written to since"):
        compiled(x)


@pytest.mark.parametrize("name", HALF)
def test_linear_layers_compute_with_views_under_a_scale_of_the_tensor(name: str) -> None:
    m = model()
    opt = optgen.compile("adamw", ALL)(m.named_parameters(), lr=1e-2)
    with opt.use_views(m, name):
        first = trained(m, opt, 1)
        assert trained(m, opt, 20) < 0.2 * first
        view, x = opt.views(m[2].weight)[name], torch.randn(5, 96, dtype=BF16)
        assert torch.equal(m[2](x), nn.functional.linear(x, view.dequantize(BF16), m[2].bias))
        assert torch.equal(view.dequantize(), scaled_tensor(view, FP32).dequantize(FP32))
        error = (view.dequantize() - m[2].weight).abs() / m[2].weight.abs().amax()
        assert 0.4 < error.max() / {"fp8": 1 / 17, "fp8_e5m2": 1 / 9, "nvfp4": 17 / 16 / 6}[name] <= 1


@pytest.mark.parametrize("backend", BACKENDS[::2])
def test_the_scale_of_a_tensor_is_that_of_the_weight_before_the_step(backend: str) -> None:
    """Whatever has happened to the weight between steps; what more than doubles in a step is cut, for that step."""
    cls = optgen.compile("sgd", FP8)
    draw = torch.Generator().manual_seed(2)
    p = nn.Parameter(torch.zeros(64, 128, dtype=BF16))
    opt = cls([("w", p)], lr=1.0, backend=backend)
    changes = {
        "zeros": lambda: None,
        "steps": lambda: None,
        "grown": lambda: None,
        "edited": lambda: p.mul_(64),
        "loaded": lambda: p.copy_(torch.randn(64, 128, generator=draw) * 1e-4),
        "restored": lambda: opt.load_state_dict(opt.state_dict()),
        "moved": lambda: setattr(p, "data", p.detach() * 512),
        "zeroed": lambda: p.zero_(),
        "broken": lambda: p[0].fill_(torch.nan),
        "mended": lambda: p.nan_to_num_(0.5),
        "unseen": lambda: opt.views(p),
    }
    sizes = {"zeros": 0.02, "grown": 40.0}
    for change, make in changes.items():
        with torch.no_grad():
            make()
        before = p.detach().clone()
        size = sizes.get(change, 0.1 * float(before.nan_to_num().abs().max()))
        p.grad = (torch.randn(64, 128, generator=draw) * size).to(BF16)
        opt.step()
        if change == "broken":
            codes = stored(p, "fp8")[0]
            assert (codes[0] & 0x7F == 0x7F).all() and (codes[1:] & 0x7F != 0x7F).all()
            continue
        check(p, before, "fp8")
        share = p.detach().abs().max() / scale_of(p, "fp8")
        assert (share > 448) == (change == "grown"), change
    view = opt.views(p)["fp8"]
    assert view.codes.dtype is torch.float8_e4m3fn and view.scales.shape == () and view.scales.dtype is FP32


def test_a_stale_view_is_an_error_until_it_is_made_again() -> None:
    m = model()
    opt = optgen.compile("adamw", VIEWED)(m.named_parameters(), lr=1e-2)
    opt.use_views(m)
    trained(m, opt, 2)
    kept, x = {k: v.clone() for k, v in m.state_dict().items()}, torch.randn(2, 64, dtype=BF16)

    def replace() -> None:
        m[2].weight = nn.Parameter(m[2].weight.detach().clone())

    def move() -> None:
        m[2].weight.data = m[2].weight.detach().clone()

    def move_twice() -> None:  # the second time to where it was, or near it
        for _ in range(2):
            move()

    def edit() -> None:
        with torch.no_grad():
            m[2].weight[3] *= 2

    for change in (lambda: m.load_state_dict(kept), edit, move, move_twice, replace):
        change()
        with pytest.raises(RuntimeError, match=r"\.weight was written to since the view mxfp8_rows .* use_views"):
            m(x)
        if change is not replace:  # of a parameter that the optimizer does not have
            opt.use_views(m)
            m(x)


@pytest.mark.parametrize("backend", BACKENDS[::2])
def test_checkpoints_hold_the_weight_once(backend: str) -> None:
    """Bytes are those without views, and a run goes on with the bits that it would have had."""
    cls = optgen.compile("adamw", VIEWED)
    runs = []
    for again in (False, True):
        m = model()
        opt = cls(m.named_parameters(), lr=1e-2, backend=backend)
        opt.use_views(m)
        trained(m, opt, 3)
        if again:
            saved = io.BytesIO()
            torch.save([m.state_dict(), opt.state_dict()], saved)
            assert not any("mxfp8" in key for entry in opt.state_dict()["state"].values() for key in entry)
            saved.seek(0)
            m = model()
            opt = cls(m.named_parameters(), lr=1e-2, backend=backend)
            weights, states = torch.load(saved)
            m.load_state_dict(weights)
            opt.load_state_dict(states)
            opt.use_views(m)
        trained(m, opt, 2)
        runs.append([*m.state_dict().values(), *stored(m[0].weight)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_way_to_step_writes_the_same_views(backend: str) -> None:
    """Steps counted on the device, with released gradients, and with states moved off and back, bit for bit."""
    interpreted = backend == "triton"
    cls = optgen.compile("adamw", FP8_AND_COLUMNS if interpreted else ALL)

    def run(way: str) -> list[Tensor]:
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(64, 32)).to(BF16)
        capturable = {"capturable": True} if way == "capturable" else {}
        opt = cls(m.named_parameters(), lr=1e-2, backend=backend, **capturable)
        if way == "released":
            opt.release_gradients(m)
        draw = torch.Generator().manual_seed(1)
        for _ in range(3):
            m(torch.randn(4, 64, generator=draw).to(BF16)).square().sum().backward()
            opt.step()
            opt.zero_grad()
            if way == "moved":
                opt.offload_states()
                opt.reload_states()
        found = (p.__dict__["_optgen_views"] for p in m.parameters())
        return [x for views in found for view in views.values() for x in view.values() if isinstance(x, Tensor)]

    usual = run("")
    assert len(usual) == 2 * (3 + 2 if interpreted else 2 + 2 + 3 + 3 + 4)
    for way in ("capturable",) if interpreted else ("released", "moved"):
        assert all(torch.equal(a, b) for a, b in zip(usual, run(way), strict=True)), way


def test_released_gradients_and_copies_write_views() -> None:
    """One step at a time within backward; parameters that are not contiguous are stepped as copies."""
    cls = optgen.compile("adamw", VIEWED)
    m = model()
    opt = cls(m.named_parameters(), lr=1e-2)
    opt.use_views(m)
    opt.release_gradients(m)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        m(torch.randn(4, 64, generator=draw).to(BF16)).sum().backward()
        opt.step()
    assert torch.equal(stored(m[4].weight)[0], quantized(m[4].weight)[0])
    p = nn.Parameter(torch.randn(64, 96).t())
    opt = optgen.compile("adamw", ALL)([p], lr=1e-2)
    before = p.detach().clone()
    train(opt, range(1))
    for name in VIEWS:
        check(p, before, name)
    assert opt.views(p)["mxfp8_rows"].codes.shape == p.shape


def test_a_copied_or_pickled_model_has_views_to_make_again() -> None:
    """The file is read with weights_only, too."""
    m = model()
    opt = optgen.compile("adamw", VIEWED)(m.named_parameters(), lr=1e-2)
    opt.use_views(m)
    x = torch.randn(2, 64, dtype=BF16)
    read = through_file(list(m.parameters()))
    assert torch.equal(read[0], m[0].weight)
    for other in (copy.deepcopy(m), through_file(m, weights_only=False)):
        with pytest.raises(RuntimeError, match="was written to since"):
            other(x)
        again = optgen.compile("adamw", VIEWED)(other.named_parameters(), lr=1e-2)
        again.use_views(other)
        assert torch.equal(other(x), m(x))


def test_what_a_view_takes() -> None:
    p = nn.Parameter(torch.randn(128, 256).to(BF16))
    opt = optgen.compile("adamw", VIEWED)([p])
    found = opt.memory().states
    assert (found["mxfp8_rows_codes"], found["mxfp8_rows_scale"]) == (p.numel(), p.numel() // 32)
    assert opt.memory().per_element == 2 + 1 + 2 * (1 + 2 / 64) + 1 + 1 / 32
    beside = VIEWED.but(master=Native("stochastic"), name="beside")
    assert optgen.compile("adamw", beside)([p]).memory().per_element == 2 + 2 * (1 + 2 / 64) + 1 + 1 / 32
    give([p], 0)
    opt.step()
    assert sum(x.nbytes for x in stored(p)) == p.numel() * 33 // 32


def test_what_has_no_view_is_said() -> None:
    cls = optgen.compile("adamw", VIEWED)
    odd, frozen = nn.Linear(80, 8), nn.Linear(64, 8)
    opt = cls([*odd.named_parameters(), ("frozen", frozen.weight)])
    with pytest.raises(ValueError, match=r"'weight'.*\[8, 80\] the rows are no multiple of 32 long; pad the layer"):
        opt.use_views(odd)
    with pytest.raises(ValueError, match=r"\[8\] the rows are no multiple"):
        opt.views(odd.bias)
    frozen.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="frozen, so no step writes one"):
        opt.use_views(frozen)
    with pytest.raises(ValueError, match="none of its parameters"):
        opt.views(torch.zeros(3))
    with pytest.raises(ValueError, match=r"no nn.Linear of this model"):
        opt.use_views(nn.Sequential(nn.Embedding(4, 64)))
    plain = nn.Linear(64, 8)
    with pytest.raises(ValueError, match="its plan makes none"):
        optgen.compile("adamw", plans.int8_split24)(plain.parameters()).views(plain.weight)
    with pytest.raises(ValueError, match=r"no nn.Linear of this model"):
        optgen.compile("adamw", plans.int8_split24)(plain.parameters()).use_views(plain)
    fine = nn.Linear(64, 8)
    with pytest.raises(ValueError, match="has no view 'nvfp4'; its plan makes mxfp8_rows"):
        cls(fine.parameters()).use_views(fine, "nvfp4")
    away = cls(fine.parameters(), offload=True)
    give(fine.parameters(), 0)
    with pytest.raises(ValueError, match=r"cannot write the views of .*stepped on the host"):
        away.step()


@pytest.mark.parametrize("views", ["mxfp8_rows", ("mx",), ("mxfp8_rows", "mxfp8_rows"), 3, (3,)], ids=str)
def test_a_plan_names_views_that_there_are(views: Any) -> None:
    with pytest.raises(UserError, match="`views` of a plan is a tuple of names, each once: mxfp8_rows"):
        Plan("Wrong.", views=views, name="wrong")


@pytest.mark.parametrize("block", [16, 256])
def test_blocks_of_states_hold_whole_blocks_of_views(block: int) -> None:
    states: dict[str, Any] = {"signed": Blocked(8, block), "nonneg": LogMinMax(8, block), "small_numel": 0}
    wrong = Plan("Wrong.", views=("mxfp8_rows",), name="wrong", **states)
    with pytest.raises(UserError, match=rf"beside states in blocks of {block} .*use blocks of 32 or 64 or 128"):
        optgen.compile("adamw", wrong)


def test_a_parameter_of_8_bits_is_refused_with_what_to_do() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        with pytest.raises(TypeError, match=r"not built for float8_\w+ parameters: keep weights in .*bfloat16.*views="):
            optgen.optim.AdamW([nn.Parameter(torch.ones(64, 64).to(dtype))], lr=1e-3)
    with pytest.raises(UserError, match=r"Split\('e4m3'\)") as found:
        Split(cast(Any, "e4m3"))
    assert "docs/views.md" in found.value.hint


def test_what_torch_does_to_parameters_of_8_bits() -> None:
    """Check the reasons that docs/views.md names: copies forget the gradients' dtype, and nothing knows the scale."""
    scale, layer = 2.0**-10, nn.Linear(32, 4, bias=False, dtype=BF16)
    given, x = copy.deepcopy(layer.state_dict()), torch.randn(3, 32, dtype=BF16)
    p = layer.weight = nn.Parameter((layer.weight.detach() / scale).to(torch.float8_e4m3fn))
    p.grad_dtype = BF16
    for _ in range(2):
        nn.functional.linear(x, p.to(BF16) * scale).sum().backward()
    assert p.grad is not None and p.grad.dtype == BF16
    forgetful = copy.deepcopy(p)
    nn.functional.linear(x, forgetful.to(BF16) * scale).sum().backward()
    assert forgetful.grad.dtype == p.dtype
    with pytest.raises(RuntimeError, match="Float8_e4m3fn"):
        nn.functional.linear(x, forgetful.to(BF16) * scale).sum().backward()
    for unknown in (p.detach().norm, p.isfinite, lambda: p.detach().lerp_(p.detach(), 0.5)):
        with pytest.raises(RuntimeError, match="Float8_e4m3fn"):
            unknown()
    with torch.autocast("cpu", BF16):
        assert layer(x.float()).abs().max() > 100 * nn.functional.linear(x, p.to(BF16) * scale).abs().max()
    layer.load_state_dict(given)
    assert p.to(BF16).abs().max() < 2 * given["weight"].abs().max()  # which reads as a weight of scale 1, not 2^-10
