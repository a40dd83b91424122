"""Matrix states in 8 bits: their codecs within derived bounds, and the states of a rule from step to step."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import optgen
from optgen.base.errors import UserError
from optgen.driver.explain import explain
from optgen.formats import Plan, floats
from optgen.lang import (
    eigenvectors,
    flag,
    gram,
    hyper,
    low_rank_state,
    matrix_state,
    nonneg,
    optimizer,
    orthogonal,
    qr,
    shape_flag,
    sqrt,
    state,
    symmetric,
    triangle,
    triangular,
)  # fmt: skip
from optgen.lang.spec import Recurrence
from optgen.ops import dtypes
from optgen.runtime.cpu import cpu, native
from optgen.runtime.layout.plans import load
from optgen.runtime.options.options import Numbers
from optgen.runtime.records.keys import step_key, stream_key
from optgen.runtime.reference import matrices
from optgen.runtime.reference.matrix_codecs import CODECS
from optgen.runtime.work import counting, cpp_codecs
from specs import plans

UNIT = 2.0**-24
BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpp"])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def blocks(x: Tensor) -> Tensor:
    """The largest magnitude of the block of 64 that each entry of x (..., count) is in."""
    padded = torch.nn.functional.pad(x.abs(), (0, -x.shape[-1] % 64))
    tops = padded.view(*x.shape[:-1], padded.shape[-1] // 64, 64).amax(-1)
    return tops.repeat_interleave(64, -1)[..., : x.shape[-1]]


def pairs(k: int) -> tuple[list[int], list[int]]:
    """The places below the diagonal in the order in which they are kept."""
    order = [x for row in range((k + 1) // 2) for x in
             [(k - 1 - row, j) for j in range(k - 1 - row)] + [(row, j) for j in range(row)][::-1]]  # fmt: skip
    order = list(dict.fromkeys(order))  # a middle row once
    return [i for i, _ in order], [j for _, j in order]


@given(st.integers(1, 70), st.integers(1, 80), st.integers(0, 2**20), st.booleans(), st.sampled_from([1e-12, 1.0, 1e9]))
def test_symmetric_matrices_keep_their_diagonal_and_half_a_code_elsewhere(
    k: int, rank: int, seed: int, definite: bool, size: float
) -> None:
    """1/254 of the block's scale, which is at most 2^-8 above its largest number; eight roundings of fp32."""
    x = drawn(2, k, rank, seed=seed) * torch.logspace(0, -6, k)[:, None] * size**0.5
    x = x @ x.mT if definite else size * (drawn(2, k, k, seed=seed) + drawn(2, k, k, seed=seed).mT)
    x[..., 0, :] *= seed % 2  # a row of zeros
    x[..., :, 0] *= seed % 2
    codes, scale, diagonal = CODECS["symmetric"].encode(x)
    assert (codes.shape, codes.dtype) == ((2, (k + 1) // 2, k - 1), torch.int8)
    assert (scale.shape, scale.dtype) == ((2, -(-codes[0].numel() // 64), 1), torch.int16)
    read = CODECS["symmetric"].decode(codes, scale, diagonal)
    assert torch.equal(read, read.mT) and torch.equal(read.diagonal(dim1=1, dim2=2), x.diagonal(dim1=1, dim2=2))
    root = diagonal[..., 0].double().abs().sqrt()
    root[root == 0] = 1
    i, j = pairs(k)
    weight = (root[:, i] * root[:, j]).clamp(min=1e-300)
    wanted = x[:, i, j].double() / weight
    error = (read[:, i, j].double() / weight - wanted).abs()
    assert (error <= blocks(wanted) * (1 + 2.0**-8) * (0.5 / 127 + 8 * UNIT) + 2.0**-126).all()
    assert not definite or (wanted.abs() <= 1 + (rank + 4) * 2 * UNIT).all()
    again = CODECS["symmetric"].encode(read)
    assert all(map(torch.equal, again, (codes, scale, diagonal)))


@pytest.mark.parametrize("k", [1, 2, 63, 64, 130, 256, 363])
def test_orthogonal_matrices_keep_half_a_code(k: int) -> None:
    """And are nearly orthogonal as read: by 2 |E| + |E|^2 for errors E of half a code, of rms 1 / sqrt(12) codes."""
    q = torch.linalg.qr(drawn(3, k, k, seed=k)).Q
    read = CODECS["orthogonal"].decode(*CODECS["orthogonal"].encode(q)).double()
    assert ((read - q).abs().flatten(1) <= blocks(q.flatten(1)) * (1 + 2.0**-8) * (0.5 / 127 + 8 * UNIT)).all()
    off = torch.linalg.matrix_norm(read.mT @ read - torch.eye(k), 2)
    assert (off <= 0.02).all() and (k < 63 or (off > 0.01).all())
    ones = torch.eye(k)
    assert torch.equal(CODECS["orthogonal"].decode(*CODECS["orthogonal"].encode(ones)), ones)


def noise(name: str, step: int, *lead: int) -> Any:
    return matrices.rounding(name, step_key(0, step), matrices.streams(stream_key("w"), lead, torch.device("cpu")))


@given(st.integers(1, 70), st.integers(0, 2**20), st.booleans())
def test_triangular_matrices_keep_their_diagonal_and_a_code_over_it(k: int, seed: int, random: bool) -> None:
    """2/255 of the block's scale to nearest, where codes are sparsest, stochastically twice that and what is square of
    it; eight roundings of fp32."""
    x = (drawn(2, k, k, seed=seed) * torch.logspace(0, -6, k)[:, None]).triu()
    x[..., 0, 0] *= seed % 2
    kept = CODECS["triangular"].encode(x, noise=noise("left", seed, 2) if random else None)
    read = CODECS["triangular"].decode(*kept)
    assert torch.equal(read, read.triu()) and torch.equal(read.diagonal(dim1=1, dim2=2), x.diagonal(dim1=1, dim2=2))
    j, i = pairs(k)
    size = x.diagonal(dim1=1, dim2=2).double().abs()[:, i]
    size[size == 0] = 1
    error = ((read[:, i, j] - x[:, i, j].double()) / size).abs()
    most = 1 - 126 / 128 if random else 1 - 126.5 / 127.5
    assert (error <= blocks(x[:, i, j] / size) * (1 + 2.0**-8) * (most + 8 * UNIT) + 2.0**-126).all()
    assert random or all(map(torch.equal, CODECS["triangular"].encode(read), kept))


@pytest.mark.parametrize("isa", ["", "portable"])
@pytest.mark.parametrize("trait", CODECS)
def test_cpp_codecs_have_the_bits_of_torch(trait: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks, sizes around those of blocks and groups, and numbers that no codec can keep have the same bits."""
    monkeypatch.setenv("OPTGEN_ISA", isa)
    (library,) = native.load([cpu.MATRIX_CODECS])
    assert not isinstance(library, native.Unavailable), library
    codec, given = cpp_codecs.codecs(library, lambda elements: 2)[trait], CODECS[trait]
    for k, odd in product((1, 2, 7, 64, 65, 131, 200), (None, 0.0, -1e-40, 1e38, math.inf, math.nan)):
        columns = k if trait in ("symmetric", "triangular") else 3 * k
        x = drawn(2, k, columns, seed=k) * torch.logspace(0, -9, columns) * (1e-30 if k == 7 else 1)
        if odd is not None:
            x[1, 0, -1] = x[1, -1, 0] = x[1, k // 2, k // 2] = odd
        if trait in ("symmetric", "triangular"):
            x = x + x.mT if trait == "symmetric" else x.triu()
        x = x * x.abs() if trait == "low_rank_nonneg" else x
        over = CODECS["low_rank_nonneg"].encode(drawn(2, k, columns, seed=1).square())
        for base, random in product(((), over) if trait == "low_rank" else ((),), (False, True)):
            drawing = noise("left", k, 2) if random and trait not in ("symmetric", "orthogonal") else None
            kept, wanted = codec.encode(x, *base, noise=drawing), given.encode(x, *base, noise=drawing)
            for a, b in zip(kept, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            read, wanted_read = codec.decode(*kept, *base), given.decode(*kept, *base)
            torch.testing.assert_close(read, wanted_read, rtol=0, atol=0, equal_nan=True)


@given(st.integers(1, 20), st.integers(1, 90), st.integers(0, 2**20), st.floats(0, 8))
def test_averages_of_low_rank_keep_a_code_beside_their_root(rank: int, n: int, seed: int, spread: float) -> None:
    """Roots of second moments within a 255th of the block's range in fp32 patterns, the range itself rounded to 2^-8 of
    an octave; first moments within 1/64 of the scale, times the root as it reads."""
    v = torch.exp(spread * drawn(3, rank, n, seed=seed))
    v[0] *= seed % 2
    m, base = drawn(3, rank, n, seed=seed + 1) * v.sqrt(), CODECS["low_rank_nonneg"].encode(v, noise=noise("v", 1, 3))
    root = CODECS["low_rank_nonneg"].decode(*base).double().sqrt()
    pattern = v.sqrt().clamp(min=2.0**-63).view(torch.int32).flatten(1).double() / 2**23
    top, bottom = blocks(pattern), pattern.max() - blocks(pattern.max() - pattern)
    reach = ((top - bottom).clamp(max=32) + 2.0**-7) / 255
    floor = torch.exp2(torch.log2(blocks(v.sqrt().flatten(1)).double()) - 31.9)
    wanted = v.sqrt().flatten(1).double()
    assert ((root.flatten(1) - wanted).abs() <= (reach + 2.0**-15) * wanted + floor + 2.0**-62).all()
    read = CODECS["low_rank"].decode(*CODECS["low_rank"].encode(m, *base, noise=noise("m", 1, 3)), *base)
    u = (m / root).flatten(1)
    assert (((read - m) / root).flatten(1).abs() <= blocks(u) * (1 + 2.0**-8) * (1 / 64 + 20 * UNIT)).all()


@pytest.mark.parametrize("trait", ["triangular", "low_rank", "low_rank_nonneg"])
def test_what_is_rounded_stochastically_is_right_on_average(trait: str) -> None:
    """Within six standard errors, and what codes that are no straight line in the value add: a square of a cell."""
    x, read = drawn(40, 40).abs() + 0.5, []
    x = x.triu() if trait == "triangular" else x
    for step in range(300):
        read.append(CODECS[trait].decode(*CODECS[trait].encode(x, noise=noise("x", step))).double())
    error, cell = torch.stack(read) - x, x.max() * (4 if trait == "triangular" else 1) / 64
    assert (error.mean(0).abs() <= 6 * error.std(0) / 300**0.5 + 2 * cell**2).all() and (error.std(0) > 0).any()


@pytest.mark.parametrize("trait", CODECS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(trait: str, wrong: float) -> None:
    x = torch.eye(70)
    x[60, 50] = x[50, 60] = wrong
    assert CODECS[trait].decode(*CODECS[trait].encode(x)).isnan()[50, 60]


@pytest.mark.parametrize("trait", ["symmetric", "triangular"])
def test_what_is_beside_a_subnormal_diagonal_stays(trait: str) -> None:
    x = torch.eye(8)
    x[2, 3] = x[3, 2] = 1.0 if trait == "symmetric" else 0.0
    x[2, 3], x[2, 2], x[3, 3] = 1.0, 1e-39, 1e-39
    assert torch.equal(CODECS[trait].decode(*CODECS[trait].encode(x)), x)


@optimizer(cite="nobody")
def turned(
    p, g,
    exp_avg=state(),
    left=matrix_state("rows", symmetric, when="wide"),
    basis=matrix_state("columns", orthogonal, when="wide", init="identity"),
    plain=matrix_state("rows", when="wide"),
    *,
    lr=hyper(0.1, ge=0),
    beta=hyper(0.9, ge=0, lt=1),
    period=hyper(3, ge=1),
    refresh=flag(every="period"),
    wide=shape_flag(lambda shape: len(shape) >= 2),
):  # fmt: skip
    if not wide:
        p = p - lr * g
        return p, exp_avg, left, basis, plain
    left = beta * left + (1 - beta) * gram(g)
    plain = beta * plain + gram(g)
    if refresh:
        basis = eigenvectors(g.T @ g)
    exp_avg = beta * exp_avg + g @ basis
    p = p - lr * (left @ (exp_avg @ basis.T) + plain @ g)
    return p, exp_avg, left, basis, plain


KEPT = {
    "left_codes": (torch.int8, (32, 63)), "left_scale": (torch.int16, (32, 1)),
    "left_diagonal": (torch.float32, (64, 1)), "basis_codes": (torch.int8, (80, 80)),
    "basis_scale": (torch.int16, (100, 1)), "plain": (torch.float32, (64, 64)),
}  # fmt: skip


def made(plan: Any, backend: str, shape: tuple[int, ...] = (64, 80), seed: int = 0) -> tuple[nn.Parameter, Any]:
    p = nn.Parameter(drawn(*shape, seed=seed))
    return p, optgen.compile(turned, plan)([("w", p)], backend=backend, lr=1e-4)


def stepped(opt: Any, p: nn.Parameter, t: int) -> None:
    p.grad = drawn(*p.shape, seed=100 + t)
    opt.step()


@BACKENDS
def test_a_step_reads_and_writes_what_the_codecs_do(backend: str) -> None:
    """Step after step against the rule by hand on decoded states; a basis that stays keeps its bits."""
    p, opt = made(plans.int8, backend)
    for t in range(1, 8):
        before = {k: v.clone() for k, v in opt.state[p].items() if isinstance(v, Tensor)} if t > 1 else {}
        stepped(opt, p, t)
        kept, g = opt.state[p], p.grad
        assert {k: (kept[k].dtype, tuple(kept[k].shape)) for k in KEPT} == KEPT
        if t > 1:
            old = CODECS["symmetric"].decode(*(before[f"left_{x}"] for x in ("codes", "scale", "diagonal")))
            codes, _, diagonal = CODECS["symmetric"].encode(0.9 * old + (1 - 0.9) * (g @ g.mT))
            # One rounding more or less of g g' moves a code that is near its edge, not further than to the next.
            assert (kept["left_codes"].int() - codes).abs().max() <= 1
            assert torch.allclose(kept["left_diagonal"], diagonal, rtol=2 * 80 * UNIT)
            stays = [torch.equal(before[f"basis_{x}"], kept[f"basis_{x}"]) for x in ("codes", "scale")]
            assert all(stays) if t % 3 else not any(stays)
        if t < 3:
            ones = CODECS["orthogonal"].decode(kept["basis_codes"], kept["basis_scale"])
            assert torch.equal(ones, torch.eye(80))


@optimizer(cite="nobody", matrix="heads")
def low(
    p, g,
    upper=matrix_state("rows", triangular, when="is_matrix", init="identity"),
    seen=low_rank_state("rows", orthogonal, rank=5, when="is_matrix", init=0.25),
    average=low_rank_state("columns", rank=5, when="is_matrix", normalized_by="size"),
    size=low_rank_state("columns", nonneg, rank=5, when="is_matrix", init=0.5),
    alone=low_rank_state("rows", rank=5, when="is_matrix"),
    *,
    lr=hyper(0.1, ge=0),
    is_matrix=shape_flag(lambda shape: len(shape) >= 2),
):  # fmt: skip
    if not is_matrix:
        p = p - lr * g
        return p, upper, seen, average, size, alone
    upper = 0.9 * upper + 0.1 * triangle(gram(g))
    seen = qr(upper @ seen + g @ average.T)
    inside = seen.T @ g
    average, size = 0.9 * average + 0.1 * inside, 0.99 * size + 0.01 * inside * inside
    alone = 0.9 * alone + 0.1 * g @ average.T
    p = p - lr * ((seen + alone) @ (average / sqrt(size)))
    return p, upper, seen, average, size, alone


@BACKENDS
@pytest.mark.parametrize("shape", [(64, 80), (3, 64, 30)], ids=str)
def test_states_are_rounded_by_their_names_and_the_step(shape: tuple[int, ...], backend: str) -> None:
    """Step after step against the rule by hand on decoded states, to one code, and most to none."""
    w = nn.Parameter(drawn(*shape))
    opt = optgen.compile(low, plans.int8)([("w", w)], backend=backend, lr=1e-4, blocks={"w": w[..., 0, 0].numel()})
    traits = {"upper": "triangular", "seen": "orthogonal", "average": "low_rank", "size": "low_rank_nonneg",
              "alone": "low_rank"}  # fmt: skip
    old: dict[str, Tensor] = {}
    for t in range(1, 5):
        stepped(opt, w, t)
        kept = {x: [v for k, v in opt.state[w].items() if k.startswith(f"{x}_")] for x in traits}
        if old:
            g = w.grad
            u = 0.9 * old["upper"] + 0.1 * (g @ g.mT).triu()
            new = {"upper": u, "seen": matrices.qr(u @ old["seen"] + g @ old["average"].mT)}
            inside = new["seen"].mT @ g
            new["average"] = 0.9 * old["average"] + 0.1 * inside
            new["size"] = 0.99 * old["size"] + 0.01 * inside * inside
            new["alone"] = 0.9 * old["alone"] + 0.1 * g @ new["average"].mT
            for name, x in new.items():
                base = kept["size"] if name == "average" else []
                given = noise(name, t, *shape[:-2]) if name != "seen" else None
                codes = CODECS[traits[name]].encode(x, *base, noise=given)[0]
                off = (kept[name][0].int() - codes).abs()
                assert off.max() <= 1 and off.float().mean() <= 2e-3, name
        old = {x: CODECS[trait].decode(*kept[x], *(kept["size"] if x == "average" else []))
               for x, trait in traits.items()}  # fmt: skip


def test_checkpoints_keep_bits_and_other_plans_are_converted(tmp_path: Path) -> None:
    p, opt = made(plans.int8, "reference")
    q, full = made(plans.fp32, "reference")
    for t in range(1, 5):
        stepped(opt, p, t)
        stepped(full, q, t)
    torch.save(opt.state_dict(), tmp_path / "a.pt")
    p2, again = made(plans.int8, "reference", seed=1)
    again.load_state_dict(torch.load(tmp_path / "a.pt"))
    assert all(torch.equal(opt.state[p][k], again.state[p2][k]) for k in opt.state[p] if k != "step")
    dense = {k: v for k, v in full.state[q].items() if isinstance(v, Tensor)}
    again.load_state_dict(full.dense_state_dict())
    for name, trait in (("left", "symmetric"), ("basis", "orthogonal")):
        fields = [v for k, v in again.state[p2].items() if k.startswith(f"{name}_")]
        coded = CODECS[trait].encode(dense[name])
        assert all(map(torch.equal, fields, coded))
        assert torch.equal(again.dense_state_dict()["state"][0][name], CODECS[trait].decode(*coded))
    wrong = opt.state_dict()
    wrong["state"][0]["left_diagonal"] = torch.full((64, 1), float("nan"))
    with pytest.raises(ValueError, match=r"left_diagonal: expected numbers, 64 of 64 are NaN"):
        again.load_state_dict(wrong)
    wrong = opt.state_dict()
    wrong["state"][0]["left_scale"] = torch.full((32, 1), -128, dtype=torch.int16)  # 0xFF80 reads as NaN
    with pytest.raises(ValueError, match=r"left: expected numbers, .* are NaN"):
        again.load_state_dict(wrong)


def test_what_is_relative_changes_with_its_root_and_random_bits_are_counted_on_the_host() -> None:
    @optimizer(cite="nobody")
    def apart(
        p, g,
        average=low_rank_state("rows", rank=2, when="wide", normalized_by="size"),
        size=low_rank_state("rows", nonneg, rank=2, when="wide", init=1.0),
        *,
        wide=shape_flag(lambda shape: len(shape) >= 2),
    ):  # fmt: skip
        if not wide:
            p = p - g
            return p, average, size
        average = 0.9 * average + 0.1 * (g @ g.T) @ size
        p = p - average @ (size.T @ g)
        return p, average, size

    with pytest.raises(UserError, match=r"`average`, which is of low rank and normalized by `size`, changes at the"):
        optgen.compile(apart, plans.int8)
    (variant, *_) = (v for v in load(optgen.compile(low, plans.int8), "int8").variants if v.eager.random)
    control = counting.Control(0, torch.device("cpu"))
    bare = replace(variant, rule=replace(variant.rule, host=lambda *_: ()))
    lines = counting.Lines([0], [0], [torch.tensor(0)], [()])
    numbers = Numbers(SimpleNamespace(HYPERS=()), [{"maximize": False, "seed": 0}])
    with pytest.raises(RuntimeError, match=r"alone, average, size, upper: matrix states are rounded by random numbers"):
        counting.on_device(bare, control, lines, numbers)


def test_plans_say_the_bits_of_matrix_states() -> None:
    rows = {row.name: row for row in explain(low, plans.int4_split24).memory}
    assert [rows[x].bytes for x in ("upper", "alone", "size")] == [33 / 64, 33 / 32 * 5 / 1024, 34 / 32 * 5 / 1024]
    assert "root of its second moment" in rows["average"].stored and rows["size"].error == f"{32 / 255:.3g} root"
    rows = {row.name: row for row in explain(low, plans.int8_rn_split24).memory}
    assert [rows[x].bytes for x in ("upper", "alone", "size")] == [33 / 64, 4 * 5 / 1024, 4 * 5 / 1024]
    assert rows["upper"].stored.endswith("nearest, of square matrices") and rows["upper"].error == "0.00784 scale"
    kept = [v.eager for v in load(optgen.compile(low, plans.int8_rn_split24), "int8_rn_split24").variants]
    assert {"upper": "triangular", "seen": "orthogonal"} in [x.matrices for x in kept]
    assert not any(x.random for x in kept)
    rows = {row.name: row for row in explain(turned, plans.int8_split24).memory}
    assert rows["left"].bytes == 33 / 64 and rows["basis"].bytes == 33 / 32 and rows["plain"].bytes == 4
    assert "square matrices" in rows["left"].stored and "0.017 measured" in rows["basis"].valid
    mine = plans.int8_split24.but(name="mine", overrides={"left": floats.f32})
    assert [row.bytes for row in explain(turned, mine).memory if row.name == "left"] == [4]
    with pytest.raises(UserError, match=r"`matrices` of a plan is the bits of matrix states, 8 or 32, got 4"):
        Plan("four", matrices=4)
    for kind, decay, bits in (("ema", 0.95, 8), ("ema", 0.99, 32), ("sum", None, 32), ("previous", None, 8)):
        recur = {"left": Recurrence(kind, decay), "basis": Recurrence("other")}
        kept = plans.int8_split24.storage(turned.states, dtypes.bf16, False, recur).states
        assert (kept["left"] == floats.f32) == (bits == 32) and kept["basis"] != floats.f32
