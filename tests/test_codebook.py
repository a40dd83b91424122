"""Codebooks and 8-bit floats: equal to the packages that they come from, on every backend, in strict and fast maths."""

import importlib
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import optgen
from optgen.base.errors import UserError
from optgen.formats import Codebook, Format, Fp8, Plan, codebooks, fp32, ue8m8
from optgen.formats.fp8 import numbers
from optgen.ir import node as ir
from optgen.ir.node import Node
from optgen.lang import values
from optgen.ops import dtypes, spaces
from optgen.ops.tables import CELL, EXACT, NEVER, after, book, cell_ends
from optgen.runtime.layout import workspace
from optgen.runtime.work import counting
from specs import plans
from tests import harness
from tests.training import bits

decompose = importlib.import_module("optgen.passes.decompose")

# The vector units for which torch rounds `linspace` as the packages' authors saw it.
WIDE = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def f32(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float32)


# -- the tables
@pytest.mark.parametrize(("signed", "bits"), [(True, 8), (False, 8), (True, 4), (False, 4)])
def test_dynamic_maps_are_those_of_the_packages(signed: bool, bits: int) -> None:
    """Every bit of every entry; on machines without AVX2 torch itself makes other last places of some."""
    from torchao.optim.quant_utils import create_dynamic_map

    ours, theirs = f32(codebooks.dynamic(signed, bits)), f32(create_dynamic_map(signed, bits - 1, bits))
    assert int((ours.view(torch.int32) - theirs.view(torch.int32)).abs().max()) <= (0 if WIDE else 2)
    if bits == 8:
        from bitsandbytes.functional import create_dynamic_map as of_bitsandbytes

        assert torch.equal(theirs, of_bitsandbytes(signed))


def test_what_the_missing_number_does_is_what_the_page_says() -> None:
    """A block whose largest magnitude is negative, stored ten times, as docs/formats.md has it."""
    for fmt, kept in ((plans.bnb8.signed, 0.9319), (plans.torchao4.signed, 0.8875**10)):
        assert isinstance(fmt, Codebook)
        x = torch.linspace(-1, 0.5, fmt.block)[None, None]
        for _ in range(10):
            x = fmt.decode(fmt.encode(x))
        assert float(x.min()) == pytest.approx(-kept, abs=1e-4)


# -- codes and numbers, beside the packages' own functions
def quantized_by_bitsandbytes(x: Tensor, fmt: Codebook) -> tuple[Tensor, Tensor]:
    """Its reference for dtypes without a kernel of their own, which fp64 is: the nearest entry, by trying all.

    Its kernels for fp32 on CPUs are not meant here: they look a number up among 65536 bins (docs/peers.md).
    """
    import bitsandbytes  # noqa: F401

    codes, scale = torch.ops.bitsandbytes.quantize_blockwise(x.double(), f32(fmt.table), fmt.block)
    return codes, scale


def quantized_by_torchao(x: Tensor, fmt: Codebook | Fp8) -> tuple[Tensor, Tensor]:
    from torchao.optim import quant_utils, subclass_fp8

    if isinstance(fmt, Fp8):
        codes, scale = subclass_fp8.quantize_fp8(x, fmt.block)
        return codes.view(torch.uint8), scale
    number, scale = quant_utils.scale_tensor(x, fmt.block)
    quantize = quant_utils.quantize_8bit_with_qmap if fmt.bits == 8 else quant_utils.quantize_4bit_with_qmap
    return quantize(number, f32(fmt.table)), scale


PEERS: dict[str, tuple[Plan, Callable[..., tuple[Tensor, Tensor]]]] = {
    "bnb8": (plans.bnb8, quantized_by_bitsandbytes),
    "torchao8": (plans.torchao8, quantized_by_torchao),
    "torchao4": (plans.torchao4, quantized_by_torchao),
    "torchao_fp8": (plans.torchao_fp8, quantized_by_torchao),
}
FORMATS = [pytest.param(name, kind, id=f"{name}-{kind}") for name in PEERS for kind in ("signed", "nonneg")]


def adversarial(fmt: Format, signed: bool) -> Tensor:
    """Blocks (n, size): of every magnitude, with zeros of both signs, subnormals, one element alone, equal ones."""
    draw = torch.Generator().manual_seed(zlib.crc32(str(fmt).encode()))
    x = torch.randn(48, fmt.block, generator=draw) * torch.logspace(-11, 18, 48)[:, None]
    x[:, 3] = 0.0
    x[::2, 5] = -0.0
    x[:8, 7] = 1e-42
    x[1] = 0.0
    x[1, 9] = 2.5
    x[2] = 1.0
    x[3] = torch.linspace(-1, 0.5, fmt.block)
    x[4, 11] = 1e30
    x[5] = torch.logspace(-12, 0, fmt.block)
    return x if signed else x.abs()


@pytest.mark.parametrize(("name", "kind"), FORMATS)
def test_codes_and_numbers_are_those_of_the_package(name: str, kind: str) -> None:
    plan, quantize = PEERS[name]
    fmt: Any = getattr(plan, kind)
    x = adversarial(fmt, kind == "signed")
    parts = fmt.encode(x[:, None])
    codes, scale = quantize(x, fmt)
    # bitsandbytes multiplies with 1 / largest where torchao divides: its numbers may be a place off, at a cell's end.
    ours = fmt.code(parts)[:, 0]
    theirs = fmt.code({"": codes}) if isinstance(fmt, Fp8) else codes.int()
    at = torch.arange(x.numel()).view(x.shape)[ours != theirs]
    if quantize is quantized_by_bitsandbytes:
        number, ends = (x / scale[:, None]).flatten()[at], f32(cell_ends(fmt.table, "down"))
        between = ends[torch.minimum(ours.flatten(), theirs.flatten())[at].long()]
        assert bool(((number - between).abs() <= 2.0**-22 * number.abs()).all())
        assert len(at) <= 8 * fmt.block // 256
    else:
        assert len(at) == 0
    assert torch.equal(parts["scale"][:, 0, 0], scale)
    if isinstance(fmt, Fp8):
        read = codes.view(torch.float8_e4m3fn).float() * scale[:, None]
    else:
        read = f32(fmt.table)[ours.long()] * scale[:, None]
    assert torch.equal(fmt.decode(parts)[:, 0].view(torch.int32), read.view(torch.int32))


@pytest.mark.parametrize(("name", "kind"), [p for p in FORMATS if p.values[0] != "torchao_fp8"])
def test_every_end_of_a_cell_is_that_of_the_package(name: str, kind: str) -> None:
    """Two places to both sides of each end, and every entry itself, under a scale of 1."""
    plan, quantize = PEERS[name]
    fmt: Any = getattr(plan, kind)
    ends = f32([after(x, k) for x in cell_ends(fmt.table, fmt.ties) for k in range(-2, 3)] + list(fmt.table))
    x = torch.zeros(len(ends), fmt.block)
    x[:, 0], x[:, 1] = 1.0, ends
    assert torch.equal(fmt.code(fmt.encode(x[:, None]))[:, 0, 1], quantize(x, fmt)[0].int()[:, 1])
    assert torch.equal(fmt.code(fmt.encode(x[:, None]))[-len(fmt.table) :, 0, 1], torch.arange(len(fmt.table)))


# -- 8-bit floats
@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_floats_are_torchs(kind: Any, dtype: torch.dtype) -> None:
    """Every code reads as torch reads it; every end of a cell, and one place to both sides, rounds as torch rounds."""
    fmt = Fp8(kind, 16)
    codes = torch.arange(256, dtype=torch.uint8)
    floats = codes.view(dtype).float()
    number = floats.isfinite()
    block = {"": codes[number][:, None, None], "scale": torch.ones(int(number.sum()), 1, 1)}
    assert torch.equal(fmt.decode(block).view(torch.int32).flatten(), floats[number].view(torch.int32))
    grid = f32(numbers(kind)).double()
    ends = ((grid[1:] + grid[:-1]) / 2).float()
    ends = torch.cat([(ends.view(torch.int32) + k).view(torch.float32) for k in (-1, 0, 1)] + [grid.float()])
    for sign in (1.0, -1.0):
        x = torch.zeros(len(ends), 1, 16)
        x[:, 0, 0], x[:, 0, 1] = fmt.largest, sign * ends
        assert torch.equal(fmt.encode(x)[""][:, 0, 1], x[:, 0, 1].to(dtype).view(torch.uint8))


# -- both


SQUARES = tuple((k / 16) ** 2 for k in range(1, 17))
CURVED = (*(-((k / 7) ** 1.5) for k in range(7, 0, -1)), 0.0, *((k / 8) ** 1.5 for k in range(1, 9)))
WILD = tuple(sorted({0.0, 1.0, *[((i * 7919) % 251 - 125) / 126 for i in range(40)]}))
LONG = tuple(sorted({0.0, *(x * abs(x) for i in range(254) if (x := ((i * 7919) % 509 - 254) / 254))}))
IN_MEMORY = Plan(
    "Long tables without a law.", name="in_memory", discouraged="a test", small_numel=0,
    signed=Codebook(LONG, 8, 16),
    nonneg=Codebook(tuple(x for x in LONG if x >= 0), 7, 16),
)  # fmt: skip


@pytest.mark.parametrize(("rule", "shapes"), [("adamw", [(3, 17), (16,)]), ("came", [(3, 17), (2, 2, 3, 3)])])
def test_long_tables_are_read_from_memory(
    rule: str, shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one kernel and of several, over all tensors at once, whose gradients stay where they are and move, the
    last one of them as a graph takes it up: the bits are those of eager torch, and a table is sent to a device once."""
    made = optgen.compile(rule, IN_MEMORY, maths="strict")
    draw = torch.Generator().manual_seed(3)
    start = [torch.randn(shape, generator=draw) for shape in shapes]
    optimizers = []
    for backend in ("reference", "triton"):
        params = [torch.nn.Parameter(x.clone()) for x in start]
        optimizers.append((params, made(params, lr=1e-2, backend=backend, capturable=backend == "triton")))
    workspace._on.cache_clear()
    for step in range(4):
        gradients = [torch.randn(shape, generator=draw) for shape in shapes]
        for params, opt in optimizers:
            for p, g in zip(params, gradients, strict=True):
                if p.grad is None or step >= 2:
                    p.grad = g.clone()  # elsewhere
                else:
                    p.grad.copy_(g)
            with monkeypatch.context() as patch:
                patch.setattr(counting, "capturing", lambda now=step == 3 and opt is optimizers[1][1]: now)
                opt.step()
    (params, opt), (others, other) = optimizers
    for p, q in zip(params, others, strict=True):
        assert harness.same_bits(p.detach(), q.detach())
        for key, value in opt.state[p].items():
            assert key == "step" or harness.same_bits(value, other.state[q][key]), key
    sent = workspace._on.cache_info().misses
    # The entries of each codebook, and what is searched.
    assert sent == (4 if rule == "adamw" else 2)


@pytest.mark.parametrize("backend", ["triton", "cpp"])
def test_blocks_of_2048_elements_have_the_bits_of_eager_torch(backend: str) -> None:
    tables = codebooks.dynamic(), codebooks.dynamic(signed=False)
    signed, nonneg = (Codebook(table, 8, 2048, ties="down") for table in tables)
    text = "The blocks of the paper, arXiv:2110.02861."
    plan = plans.bnb8.but(text, name="paper8", small_numel=0, signed=signed, nonneg=nonneg)
    made = optgen.compile("adamw", plan, maths="strict")
    found = []
    for by in ("reference", backend):
        draw = torch.Generator().manual_seed(1)
        p = torch.nn.Parameter(torch.randn(2, 2100, generator=draw))
        opt = made([p], lr=1e-2, backend=by)
        for _ in range(2):
            p.grad = torch.randn(p.shape, generator=draw)
            opt.step()
        found.append(bits([p, opt.state[p]]))
    assert found[0] == found[1]


# -- the law of a table, in fast maths
NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "abs": np.abs, "neg": np.negative, "min": np.minimum,
    "max": np.maximum, "rint": np.rint, "lt": np.less, "where": np.where,
}  # fmt: skip
KIND = {"f32": np.float32, "i32": np.int32}


def computed(root: Node, x: Any) -> Any:
    """An expression of one load, in numpy: each operation rounded by itself, as a backend without fma does it."""
    found: dict[int, Any] = {}
    for n in ir.postorder([root]):
        a = [found[y.uid] for y in n.args]
        if n.op == "const":
            found[n.uid] = KIND[n.dtype.name](n.attr)
        elif n.op == "load":
            found[n.uid] = x
        else:
            found[n.uid] = a[0].astype(KIND[n.dtype.name]) if n.op == "cast" else NUMPY[n.op](*a)
    return found[root.uid]


NUMBER, CODE = (values.Value(ir.load("x", dtype, spaces.elem)) for dtype in (dtypes.f32, dtypes.i32))
LAWFUL = [codebooks.dynamic(s, b) for s, b in ((True, 8), (False, 8), (True, 4), (True, 5), (False, 6))]
LAWFUL += [codebooks.linear_nozero(4)]


@pytest.mark.parametrize("table", LAWFUL, ids=lambda t: t.name)
@pytest.mark.parametrize("ties", ["up", "down"])
def test_lines_say_what_the_table_says(table: codebooks.Numbers, ties: str) -> None:
    """Exhaustively: every entry within 2^-20, every end of a cell within 2^-12 of a cell."""
    found = book(tuple(table), 8 if len(table) > 64 else 6 if len(table) > 32 else 5, ties, table.name)
    law = found.entries.law
    assert len(law.search) + len(law.lookup) <= 20
    entries, codes = np.array(table, np.float32), np.arange(len(table), dtype=np.int32)
    error = np.abs(computed(decompose.lookup(CODE, law).node, codes) - entries)
    assert (error <= EXACT * np.abs(entries)).all()
    assert (computed(decompose.search(NUMBER, law).node, entries) == codes).all()
    ends, gaps = np.array(found.ends.values[: len(table) - 1], np.float64), np.diff(entries.astype(np.float64))
    for side in (-1, 1):
        numbers = (ends + side * CELL * gaps).astype(np.float32)
        assert (computed(decompose.search(NUMBER, law).node, numbers) == codes[1:] - (side < 0)).all()


def test_tables_without_a_law_have_none() -> None:
    """A curve of ever other slopes, one that is not mirrored, one with a gap in the middle."""
    for table in (SQUARES, CURVED, WILD, (-1.0, -0.1, 0.0, 0.5, 1.0)):
        assert book(tuple(table), 6, "up", "x").entries.law is None


# -- what is said about them
def test_numbers_beyond_the_table_read_as_its_ends() -> None:
    """A table without 1: what lies above its last number, and below its first, stays at these."""
    fmt = Codebook((-0.5, -0.25, 0.0, 0.25, 0.75), 3, 16)
    x = torch.zeros(1, 1, 16)
    x[0, 0, :3] = f32([1.0, -1.0, 0.9])
    assert fmt.decode(fmt.encode(x))[0, 0, :3].tolist() == [0.75, -0.5, 0.75]


@pytest.mark.parametrize("fmt", [Fp8("e4m3", 16, scale) for scale in (fp32, ue8m8)], ids=str)
def test_the_largest_numbers_stay_numbers(fmt: Any) -> None:
    """A scale that is rounded up may lie beyond the range of f32, or its square."""
    tops = NEVER * (1 - torch.arange(0, 400, dtype=torch.float64) * 2.0**-15)
    x = torch.ones(1, len(tops), 16)
    x[0, :, 3] = tops.to(torch.float32)
    kept = fmt.decode(fmt.encode(x))
    assert kept.isfinite().all()
    assert torch.allclose(kept[..., 3], x[..., 3], rtol=2.0**-4, atol=0)  # half a place of three bits


def test_numbers_that_no_table_holds_are_refused() -> None:
    with pytest.raises(UserError, match="E311"):
        Codebook((0.0, -1e39), 4)
