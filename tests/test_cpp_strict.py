"""Strict maths: the C++ kernel gives the eager reference's bits, on every instruction set and number of threads."""

import ctypes
import subprocess
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from optgen.runtime.cpu import native
from optgen.runtime.records.keys import step_key
from tests import harness
from tests.harness import strict
from tests.product import Cell
from tests.test_properties import _trained, build
from tests.test_triton_strict import CASES

pytestmark = [
    pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler"),
    pytest.mark.usefixtures("optimized"),
]

SHAPES = [(), (1,), (15,), (63,), (64,), (1025,), (16, 64), (5, 70), (3, 7, 11), (40, 147), (3, 320), (5000,)]
ISAS = [isa for isa in native.ISAS if isa.needs <= native.cpu_flags() and isa.name != "avx512"]


def in_turn(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the cases on each instruction set: of int8_split24 every day, of other plans one, in turn."""
    every = [i for i, case in enumerate(cases) if "int8_split24" in case]
    return [
        pytest.param(*case, isa.name, marks=() if i in every or (i + k) % len(ISAS) == 0 else pytest.mark.full)
        for i, case in enumerate(cases) for k, isa in enumerate(ISAS)
    ]  # fmt: skip


def differing(pair: harness.Pair, param: str, isa: str, salt: int = 0, shapes: Any = SHAPES) -> list[str]:
    """Name what three steps on two threads store otherwise than the reference."""
    draw = torch.Generator().manual_seed(salt)
    weights = [torch.randn(shape, generator=draw) for shape in shapes]
    run = partial(pair.run_cpp, isa=isa, threads=2)
    return pair.differing(weights, harness.of_many_sizes(shapes, getattr(torch, param), draw), run, lr=1e-2)


@pytest.mark.parametrize(("name", "plan", "param", "flags", "isa"), in_turn(CASES), ids=str)
def test_same_bits(name: str, plan: str, param: str, flags: dict[str, bool], isa: str, tmp_path: Path) -> None:
    users = isa == ISAS[0].name or (name, plan) == ("adamw", "int8_split24")
    with nullcontext() if users else harness.unoptimized():
        salt = zlib.crc32(f"{name} {plan}".encode())
        assert not differing(strict(name, plan, tmp_path, param, flags), param, isa, salt)


@pytest.mark.parametrize("cache", [1 << 14, 1 << 20])
def test_tiles_of_any_size_give_the_same_bits(cache: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large as the first-level cache allows: states go from one machine to another."""
    monkeypatch.setattr(native, "first_level_cache", lambda: cache)
    pair = strict("adamw", "int8_split24", tmp_path)
    shapes = [(2 * 8192 + 16 * 64 + 70,), (5, 1024), (17 * 64,)]
    assert not differing(pair, "bfloat16", ISAS[0].name, shapes=shapes)


@pytest.mark.parametrize("isa", ISAS, ids=[isa.name for isa in ISAS])
def test_signs_of_all_kinds_of_floats(isa: native.Isa, tmp_path: Path) -> None:
    """-1, 0 or 1; zeros keep their sign and NaNs their bits (AVX-512 has one instruction for it, with a table)."""
    source, library = tmp_path / "signs.cpp", tmp_path / "signs.so"
    source.write_text(
        '#include "optgen.h"\n'
        'extern "C" __attribute__((visibility("default"))) void signs(const int32_t *x, int32_t *out, int n) {\n'
        "    for (int i = 0; i < n; i += W)\n"
        "        store(out + i, bits(sign(as_float(load(x + i)))));\n"
        "}\n"
    )
    command = [*native.compiler().command, *native.FLAGS, *isa.flags, f"-I{native.HEADERS}"]
    subprocess.run([*command, "-shared", str(source), "-o", str(library)], check=True, capture_output=True)
    # Every exponent, of either sign, with the mantissas at both ends and some between: signalling NaNs are among them.
    mantissas = torch.tensor([0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF])
    x = (torch.arange(512).unsqueeze(1) << 23 | mantissas).flatten().to(torch.int32)
    out = torch.empty_like(x)
    ctypes.CDLL(str(library)).signs(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), x.numel())
    magnitude = x & 0x7FFFFFFF
    kept = (magnitude == 0) | (magnitude > 0x7F800000)
    assert torch.equal(out, torch.where(kept, x, x & -0x80000000 | 0x3F800000))


PLANS = [(plan,) for plan in ("int8_split24", "int8_rn_split24", "bf16_sr", "fp32_master")]


@pytest.mark.parametrize(("plan", "isa"), in_turn(PLANS))
def test_no_nan_turns_into_a_number(plan: str, isa: str, tmp_path: Path) -> None:
    """NaNs of either sign, with any payload: no carry of rounding may turn their pattern into a number's."""
    built = build(Cell("adamw", plan))
    pair = harness.Pair(built.spec, built.case, tmp_path, "fast")
    run, _ = _trained(built, (9, 256), 9)
    patterns = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -0x400000, -0x8100, -1]
    short = [sign | 0x7F80 | payload for sign in (0, -0x8000) for payload in range(1, 128)]
    for kind, bits, odd in ((torch.float32, torch.int32, patterns), (torch.bfloat16, torch.int16, short)):
        taken = run.copy()
        g = torch.zeros_like(taken.buffers["p"], dtype=kind)
        g.view(bits).view(-1)[: len(odd)] = torch.tensor(odd, dtype=bits)
        items = [(taken.buffers, g, taken.stream)]
        key = step_key(run.seed, run.steps + 1)
        with nullcontext() if kind is torch.float32 else harness.unoptimized():
            pair.run_cpp(items, run.steps + 1, key, isa, 1, **run.hypers, **run.host_states)
        assert taken.buffers["p"].view(-1)[: len(odd)].isnan().all(), kind
