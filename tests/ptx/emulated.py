"""Tests in a process that compiles Triton kernels and executes their PTX: tests/test_ptx.py starts it.

Its name keeps pytest from collecting it elsewhere. The instructions against exact arithmetic; seeded defects of
compiled kernels, each of which is noticed; numbers that are not finite; the texts of strict kernels.
"""

from __future__ import annotations

import math
import re
import tempfile
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import optgen
from optgen.lang import hyper, nonneg, norm, optimizer, tensor_state
from tests import harness
from tests import test_views as views
from tests.ptx import driver, emulator, instructions, scan
from tests.ptx.instructions import PTXError
from tools.bench import symmetric

# Instructions ---------------------------------------------------------------------------------------------------------

FLOATS = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x3F800000, 0xBF800001, 0x3FFFFFFF, 0x7F7FFFFF, 0x7F800000,
     0xFF800000, 0x7FC12345, 0xFFFFFFFF, 0x4B000001, 0x34000001], np.uint32,
)  # fmt: skip


def run(opcode: str, *operands: Any) -> list[int]:
    """Return the bits that an instruction gives for operands given as bits."""
    row = instructions.find(opcode)
    given = [np.atleast_1d(np.asarray(x)) for x in operands]
    bits = [instructions.BITS[8 * np.dtype(instructions.DTYPES[t]).itemsize if t != "pred" else 1] for t in row.takes]
    given = [x.astype(b).view(instructions.DTYPES[t]) for x, b, t in zip(given, bits, row.takes, strict=True)]
    with np.errstate(all="ignore"):
        return instructions.raw(np.asarray(row(*given))).tolist()


def rounded(x: Fraction) -> float:
    """The fp32 nearest to a number, ties to even, subnormals too."""
    if x == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(x))), -126)
    exponent += (abs(x) >= Fraction(2) ** (exponent + 1)) - (abs(x) < Fraction(2) ** exponent and exponent > -126)
    unit = Fraction(2) ** (exponent - 23)
    nearest = round(x / unit) * unit
    return math.copysign(math.inf, nearest) if abs(nearest) >= Fraction(2) ** 128 else float(nearest)


def test_a_fused_product_is_rounded_once() -> None:
    draw = np.random.default_rng(0)
    bits = np.concatenate([np.repeat(FLOATS, 6), draw.integers(0, 2**32, 3000, dtype=np.uint64).astype(np.uint32)])
    a, b = draw.permutation(bits).view(np.float32), draw.permutation(bits).view(np.float32)
    with np.errstate(all="ignore"):
        near = -(a * b) * np.float32(1 + 2.0**-20)  # sums that cancel
        c = np.where(draw.random(len(a)) < 0.5, near, draw.permutation(bits).view(np.float32)).astype(np.float32)
    found = np.array(run("fma.rn.f32", *(x.view(np.uint32) for x in (a, b, c))), np.uint32).view(np.float32)
    for x, y, z, got in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
        if all(map(math.isfinite, (x, y, z))):
            assert got == rounded(Fraction(x) * Fraction(y) + Fraction(z)), (x, y, z)


@pytest.mark.parametrize(
    ("opcode", "operands", "want"),
    [
        ("prmt.b32", (0x33221180, 0x77665544, 0x8746), 0xFF774466),  # a sign, then bytes 7, 4 and 6
        ("shf.l.wrap.b32", (0x80000001, 0x7FFFFFFF, 33), 0xFFFFFFFF),
        ("max.NaN.f32", (0x7FC12345, 0x3F800000), 0x7FFFFFFF),
        ("max.f32", (0x7FC12345, 0x3F800000), 0x3F800000),
        ("min.f32", (0x00000000, 0x80000000), 0x80000000),
        ("add.rn.f32", (0x00000001, 0x00000001), 0x00000002),
        ("add.rn.ftz.f32", (0x00000001, 0x3F800000), 0x3F800000),
        ("mul.rn.ftz.f32", (0x80000001, 0x7F000000), 0x80000000),
        ("div.rn.f32", (0x00000000, 0x80000000), 0x7FFFFFFF),
        ("setp.ne.f32", (0x7FC00000, 0x3F800000), False),
        ("setp.neu.f32", (0x7FC00000, 0x3F800000), True),
        ("cvt.rzi.s32.f32", (0xFF800000,), 0x80000000),
        ("cvt.rzi.s32.f32", (0x7FC00000,), 0),
        ("cvt.rni.s32.f32", (0x3F000000,), 0),
        ("cvt.rmi.f32.f32", (0x80000001,), 0xBF800000),
        ("cvt.rmi.ftz.f32.f32", (0x80000001,), 0x80000000),
        ("cvt.rn.bf16.f32", (0x3F808000,), 0x3F80),
        ("cvt.rn.bf16.f32", (0xFFFFFFFF,), 0x7FFF),
        ("cvt.rn.f16.f32", (0x33000001,), 0x0001),
        ("cvt.rn.bf16x2.f32", (0x40000000, 0x3F818000), 0x40003F82),
        ("cvt.rn.satfinite.e4m3x2.f32", (0x43E00001, 0xBF880000), 0x7EB8),  # more than 448, and half of a place
        ("cvt.rn.satfinite.e4m3x2.f32", (0xFFC00000, 0x80000001), 0x7F80),  # a NaN, and a subnormal
        ("cvt.rn.satfinite.e5m2x2.f32", (0xFF800000, 0x37000001), 0xFB01),
        ("cvt.s32.s8", (0x180,), 0xFFFFFF80),
        ("ex2.approx.f32", (0x40400000,), 0x41000000),  # exact ones stay
        ("sub.rn.f32.bf16", (0x3F80, 0x3F800001), 0xB4000000),  # 1 - (1 + 2**-23): narrow, then fp32
        ("add.rn.f32.f16", (0x0001, 0x00000001), 0x33800000),  # the subnormal 2**-24, and one that is lost
        ("setp.ne.f16", (0x7E00, 0x3C00), False),
        ("setp.lt.bf16", (0x8001, 0x0000), True),  # a subnormal
        ("fma.rn.f32.bf16", (0xBF81, 0x3F81, 0x3F820000), 0xB8800000),  # 65/64 - (1 + 2**-7)**2 = -2**-14
    ],
)  # fmt: skip
def test_instructions_do_what_the_isa_says(opcode: str, operands: tuple[int, ...], want: int) -> None:
    assert run(opcode, *operands) == [want]


def test_what_is_not_known_is_an_error() -> None:
    unknown = "add.rz.f32 add.ftz.u32 cvt.rp.f32.f64 cvt.rni.f16.f32 set.eq.u32.f32 atom.add.u32 sub.rn.ftz.f32.bf16"
    for opcode in unknown.split():
        with pytest.raises(PTXError, match="unknown"):
            instructions.find(opcode)


# Seeded defects -------------------------------------------------------------------------------------------------------

SHAPES = ((5, 257), (4, 512), (40,))
KINDS = {"fp32": ("fp32", "float32"), "fp16": ("fp32", "float16"), "int8": ("int8_split24", "bfloat16")}
"""Plans of AdamW, and dtypes of its weights and gradients."""


@cache
def kernels_of(kind: str) -> tuple[harness.Pair, dict[str, driver.Loaded]]:
    """Return AdamW of a kind, in strict maths, and its kernels by hash, which have the reference's bits."""
    plan, param = KINDS[kind]
    pair, before = harness.strict("adamw", plan, Path(tempfile.mkdtemp()), param), dict(driver.LOADED)
    driver.LOADED.clear()
    assert not different(pair, param)
    found = dict(driver.LOADED)
    driver.LOADED.update(before)
    return pair, found


def different(pair: harness.Pair, param: str) -> list[str]:
    """Return the tensors in which steps of the compiled kernel and of the reference differ."""
    draw, dtype = torch.Generator().manual_seed(3), getattr(torch, param)
    weights = [torch.randn(shape, generator=draw) for shape in SHAPES]
    steps = [[torch.randn(shape, generator=draw) for shape in SHAPES] for _ in range(2)]
    for g in (g for grads in steps for g in grads):
        g.view(-1)[::5] *= 1e-39  # subnormal, as its square is
    return pair.differing(weights, [[g.to(dtype) for g in grads] for grads in steps], pair.run_together, lr=1e-2)


def fused(ptx: str) -> str:
    """Fuse the first product and sum that may be."""
    lines = ptx.splitlines()
    for k, line in enumerate(lines):
        if product := re.match(r"\s*mul\.rn\.f32 \t(%r\d+), (.*);", line):
            for later in range(k + 1, len(lines)):
                if found := re.match(rf"\s*add\.rn\.f32 \t(%r\d+), (%r\d+), {product[1]};", lines[later]):
                    lines[later] = f"fma.rn.f32 {found[1]}, {product[2]}, {found[2]};"
                    return "\n".join(lines)
    raise AssertionError("nothing to fuse")


DEFECTS = {  # kind, pattern, replacement; by what it is noticed: its execution, the scan of its text
    "a division approximated": ("fp32", r"div\.rn", "div.full", "run scan"),
    "a root approximated": ("fp32", r"sqrt\.rn", "sqrt.approx", "run scan"),
    "products flushed": ("fp32", r"mul\.rn", "mul.rn.ftz", "run scan"),
    "sums flushed": ("fp32", r"add\.rn", "add.rn.ftz", "run scan"),
    "a product and a sum fused": ("fp32", "", "", "run scan"),
    "sums that ptxas may fuse": ("fp32", r"(add|sub)\.rn", r"\1", "scan"),
    "a difference for a sum": ("fp32", r"add\.rn", "sub.rn", "run"),
    "another rounding": ("fp32", r"add\.rn", "add.rz", "run"),
    "a bound that is met": ("fp32", r"setp\.lt\.s32( \t%p[4-7],)", r"setp.le.s32\1", "run"),
    "unmasked stores": ("fp32", r"@%p\d+ st", "st", "run"),
    "unmasked loads": ("fp32", r"@%p\d+ ld", "ld", "run"),
    "a store one element further": ("fp32", r"(st\.global\.b32 \[ %rd\d+ \+ )0", r"\g<1>4", "run"),
    "registers of a vector swapped": ("fp32", r"(st.*\{ )(%r\d+), (%r\d+)", r"\1\3, \2", "run"),
    "weights cut, not rounded": ("fp16", r"cvt\.rn\.f16", "cvt.rz.f16", "run"),
    "a sign shifted in": ("int8", r"shr\.u32", "shr.s32", "run"),
    "the distance of a shuffle": ("int8", r"(shfl\.sync\.bfly\.b32 .*), \d+, 31,", r"\1, 0, 31,", "run"),
    "a part of the warp": ("int8", r"(redux\.sync\..*), %r\d+;", r"\1, 0x7fffffff;", "run"),
    "a choice reversed": ("int8", r"selp\.b32 \t(\S+) (\S+), (\S+),", r"selp.b32 \1 \3, \2,", "run"),
    "a clamp left out": ("int8", r"min\.relu", "min", "run"),
    "another hash": ("int8", r"xor\.b32", "or.b32", "run"),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_compiled_code_is_noticed(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, pattern, replacement, by = DEFECTS[defect]
    pair, plain = kernels_of(kind)
    changed = {k: re.sub(pattern, replacement, x.ptx) if pattern else fused(x.ptx) for k, x in plain.items()}
    assert any(changed[key] != x.ptx for key, x in plain.items())
    for key, ptx in changed.items():
        monkeypatch.setitem(driver.LOADED, key, driver.Loaded(ptx, b"", emulator.Kernel(ptx)))
    try:
        noticed = bool(different(pair, KINDS[kind][1]))
    except PTXError:
        noticed = True
    scanned = any(scan.of_ptx(ptx) for ptx in changed.values())
    assert [noticed] * ("run" in by) + [scanned] * ("scan" in by) == [True] * len(by.split())


def test_symmetric_products_of_unequal_matrices_are_exact_ones_rounded() -> None:
    """Tensor cores sum in fp32, here in fp64: a bf16 result may be the neighbour of the nearest one."""
    draw = torch.Generator().manual_seed(128)
    xs = [torch.randn(rows, 128, generator=draw).bfloat16() for rows in (136, 8, 264)]  # whole parts, unlike squares'
    squares = symmetric.products(xs)
    sums = symmetric.products(squares, 0.3, squares, -0.5)
    exact = [x.double() @ x.double().mT for x in xs]
    exact += [0.3 * (x.double() @ x.double().mT) - 0.5 * x.double() for x in squares]
    for made, right in zip((*squares, *sums), exact, strict=True):
        assert torch.equal(made, made.mT)
        near = right.float().bfloat16()
        assert (made == near).float().mean() > 0.99
        assert bool(((made - right).abs() <= 2**-8 * right.abs() + 2**-16 * right.abs().max()).all())


def test_additions_of_machine_code_are_those_of_the_text() -> None:
    """Each kind of them, of which FHADD was taken for a missing FADD; what becomes a product's part is noticed."""
    ptx = "{\n add.rn.f32x2 \t%rd1;\n sub.rn.f32.f16 \t%r1;\n add.rn.f32 \t%r2;\n add.rn.f32 \t%r3;\n}"
    names = ("FADD2", "FHADD", "FADD", "UFADD")
    listing = "".join(f"\t/*00{k}0*/\t{name} R1, R2, R3 ;\n" for k, name in enumerate(names))
    assert not scan.of_machine_code(ptx, listing)
    for name, fused in (("FADD2", "FFMA2"), ("FHADD", "FHFMA"), ("\tFADD ", "\tFFMA "), ("UFADD", "UFFMA")):
        less = f"{3 + (fused != 'FFMA2')} FADD for 5 additions"
        assert scan.of_machine_code(ptx, listing.replace(name, fused)) == [less, fused.strip()]


@triton.jit
def total(x, out, BESIDE: tl.constexpr):
    found = tl.sum(tl.load(x + tl.arange(0, 512)), 0)
    tl.store(out + tl.program_id(0) * BESIDE, found)


@pytest.mark.parametrize(
    ("beside", "pattern", "error"),
    [(1, "", ""), (0, "", "programs race"), (1, r"bar\.sync.*?;", "warps between barriers race"),
     (1, r"(bar\.sync.*?;)", r"missing at a barrier")],
)  # fmt: skip
def test_races_and_barriers(beside: int, pattern: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "races", True)
    x, out = torch.arange(512.0), torch.zeros(2)
    launch = total.warmup(x, out, beside, grid=(2,), num_warps=4)
    getattr(launch, "run", None)
    parted = "mov.u32 %r99999, %tid.x; setp.lt.u32 %p99, %r99999, 5; @%p99 ret; " if "missing" in error else ""
    ptx = re.sub(pattern, parted + (r"\1" if parted else ""), launch.asm["ptx"]) if pattern else launch.asm["ptx"]
    monkeypatch.setitem(driver.LOADED, launch.hash, driver.Loaded(ptx, b"", emulator.Kernel(ptx)))
    if not error:
        total[(2,)](x, out, beside, num_warps=4)
        assert out.tolist() == [x.sum()] * 2
        return
    with pytest.raises(PTXError, match=error):
        total[(2,)](x, out, beside, num_warps=4)


@optimizer()
def held(p, g, size=tensor_state(nonneg), *, lr=hyper(1e-2, ge=0)):
    size = 0.9 * size + 0.1 * norm(g)
    p = p - lr * g / (size + 1.0)
    return p, size


def test_races_of_a_whole_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sweeps and work between them, which replaces a value that each of its warps has loaded."""
    monkeypatch.setattr(driver, "races", True)
    before, weight = set(driver.LOADED), torch.nn.Parameter(torch.ones(5, 70))
    opt = optgen.compile(held, plan="fp32", maths="strict")([weight], backend="triton")
    weight.grad = torch.ones(5, 70)
    opt.step()
    for key in (k for k, x in driver.LOADED.items() if k not in before and x.kernel.name.endswith("between")):
        ptx = re.sub(r"bar\.sync.*?;", "", driver.LOADED[key].ptx)
        monkeypatch.setitem(driver.LOADED, key, driver.Loaded(ptx, b"", emulator.Kernel(ptx)))
    with pytest.raises(PTXError, match="between: warps between barriers race for 4 bytes"):
        opt.step()


# What is not finite ---------------------------------------------------------------------------------------------------

SPECIAL = (0.0, -0.0, 1e-40, -1e-40, 2.0**-126, 3e38, -3e38)
ENDLESS = (math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [SPECIAL, (*SPECIAL, *ENDLESS)], ids=["finite", "not"])
def test_extreme_gradients_keep_strict_bits(kind: str, values: tuple[float, ...]) -> None:
    """Those of every element, but in blocks of 64 that have met a NaN or an infinity: there NaN is at the same places
    of the weight, and its payload and the codes are the machine's own (docs/language.md)."""
    draw, (pair, _) = torch.Generator().manual_seed(5), kernels_of(kind)
    shape, dtype = (64, 64), getattr(torch, KINDS[kind][1])
    weight = torch.randn(shape, generator=draw)
    ours, theirs = pair.buffers(shape, weight), pair.buffers(shape, weight)
    met = torch.zeros(64, dtype=torch.bool)
    for step in range(1, 4):
        g = torch.randn(shape, generator=draw)
        for x in values:
            rows = 24 if x in SPECIAL else 8  # many blocks stay finite
            g[torch.randint(0, rows, (6,), generator=draw), torch.randint(0, 64, (6,), generator=draw)] = x
        g = g.to(dtype)
        met |= ~g.isfinite().all(1)
        pair.run_reference(ours, g, step, 77 * step, 99, lr=1e-2)
        pair.run_triton(theirs, g, step, 77 * step, 99, lr=1e-2)
        for name in ours:
            a, b = ours[name].view(64, -1), theirs[name].view(64, -1)
            assert harness.same_bits(a[~met].contiguous(), b[~met].contiguous()), (name, step)
        assert torch.equal(ours["p"].isnan(), theirs["p"].isnan())
        assert harness.same_bits(ours["p"].nan_to_num(1.0), theirs["p"].nan_to_num(1.0))
    assert met.any() or values == SPECIAL
    assert not met.all()


# The text -------------------------------------------------------------------------------------------------------------


def test_strict_kernels_flush_contract_and_approximate_nothing() -> None:
    """The kernels of the tests before this one are scanned; of those drawn and assembled, also the machine code."""
    strict = [x for x in driver.LOADED.values() if x.kernel.name not in ("total", "triangles")]
    strict += (x for kind in KINDS for x in kernels_of(kind)[1].values())
    for loaded in strict:
        assert not scan.of_ptx(loaded.ptx), loaded.kernel.name
    drawn = [x for x in strict if driver.drawn(x.ptx, 8)]
    for loaded in drawn:
        assert not scan.of_machine_code(loaded.ptx, loaded.tool("nvdisasm", "-c")), loaded.kernel.name
    assert strict and (drawn or driver.assembled > 1)


def test_what_is_compiled_depends_on_the_driver_for_its_target_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So a GPU of that capability finds in Triton's cache what was compiled here (docs/kernels.md)."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    asked, real = set(), triton.runtime.driver.active

    class Watched:
        utils = SimpleNamespace(unload_module=lambda module: None)  # of kernels that nobody has any more

        def __getattr__(self, name: str) -> Any:
            asked.add(name)
            return getattr(real, name)

    triton.runtime.driver.set_active(Watched())
    try:
        made = total.warmup(torch.zeros(512), torch.zeros(4), 2, grid=(1,), num_warps=4)
    finally:
        triton.runtime.driver.set_active(real)
    assert list(tmp_path.rglob("*.cubin")) and made.hash
    assert asked <= {"get_current_device", "get_current_stream", "get_current_target"}


# Fast maths, which the scan above must not meet -----------------------------------------------------------------------


def test_random_bits_do_not_carry_nan_into_a_number_in_fast_maths(tmp_path: Path) -> None:
    """NVIDIA's arithmetic makes 0x7fffffff of any NaN, which is -0 plus one. The text flushes nothing exact, either."""
    before = set(driver.LOADED)
    spec, plan = harness.spec_of("adamw"), harness.plan_of("int8_split24")
    pair = harness.Pair(spec, harness.case_of(spec, plan, "bfloat16"), tmp_path, "fast")
    g = torch.full((64, 64), math.nan).bfloat16()
    kept = pair.buffers(g.shape, torch.ones(g.shape))
    pair.run_triton(kept, g, 1, 77, 99, lr=1e-2)
    assert kept["p"].isnan().all()
    made = [x.ptx for key, x in driver.LOADED.items() if key not in before]
    assert made and all(scan.of_ptx(ptx) and not scan.of_fast_ptx(ptx) for ptx in made)
    for plain, changed in (("mul.rn.f32", "mul.rn.ftz.f32"), ("fma.rn.f32", "fma.rz.f32"), ("mul.rn.f32", "mul.f64")):
        assert all(scan.of_fast_ptx(ptx.replace(plain, changed)) for ptx in made)


@pytest.mark.parametrize("name", views.FLOATS)
def test_views_are_rounded_by_instructions_that_convert(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel of the step has them, and a sign that is taken from a wrong byte is noticed."""
    before = set(driver.LOADED)
    views.test_all_backends_round_every_corner_alike(name)
    made = {key: x.ptx for key, x in driver.LOADED.items() if key not in before and "sgd" in x.kernel.name}
    kinds = {"e4m3", "e5m2" if name == "fp8_e5m2" else "e4m3"}
    assert made and all(f"cvt.rn.satfinite.{kind}x2.f32" in ptx for ptx in made.values() for kind in kinds)
    for key, ptx in made.items():
        wrong, count = re.subn(r"(prmt\.b32 [^;]*), (0x73|115);", r"\1, 0x62;", ptx)
        assert count
        monkeypatch.setitem(driver.LOADED, key, driver.Loaded(wrong, b"", emulator.Kernel(wrong)))
    with pytest.raises(AssertionError):
        views.test_all_backends_round_every_corner_alike(name)
