"""Strict maths: the C++ kernel gives the eager reference's bits, on every instruction set and number of threads."""

import ctypes
import subprocess
import zlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optgen.runtime.cpu import native
from optgen.runtime.records import keys
from optgen.runtime.reference import tile
from tests import harness
from tests.harness import strict
from tests.test_triton_strict import CASES

pytestmark = [
    pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler"),
    pytest.mark.usefixtures("optimized"),
]

SHAPES = [(), (1,), (15,), (63,), (64,), (1025,), (16, 64), (5, 70), (3, 7, 11), (40, 147), (3, 320), (5000,)]
ISAS = [isa for isa in native.ISAS if isa.needs <= native.cpu_flags() and isa.name != "avx512"]


def steps(
    pair: harness.Pair, param: str, grad: str, isa: str, threads: int, salt: int = 0, shapes: Any = SHAPES
) -> list[dict[str, torch.Tensor]]:
    """The buffers of every shape after three steps; beside them the reference's, compared bit by bit."""
    generator = torch.Generator().manual_seed(salt)
    ours, theirs = [], []
    for shape in shapes:
        weight = torch.randn(shape, generator=generator)
        ours.append(pair.buffers(shape, weight))
        theirs.append(pair.buffers(shape, weight))
    for step in range(1, 4):
        grads = []
        for shape in shapes:
            scale = 10.0 ** float(torch.randint(-8, 3, (), generator=generator))
            g = (torch.randn(shape, generator=generator) * scale).to(getattr(torch, grad))
            if step == 2:
                g.view(-1)[::3] = 0
            grads.append(g)
        key = 0x1234567 * step
        for k, (buffers, g) in enumerate(zip(ours, grads, strict=True)):
            pair.run_reference(buffers, g, step, key, 99 + k, lr=1e-2)
        items = [(buffers, g, 99 + k) for k, (buffers, g) in enumerate(zip(theirs, grads, strict=True))]
        pair.run_cpp(items, step, key, isa=isa, threads=threads, lr=1e-2)
        for shape, a, b in zip(shapes, ours, theirs, strict=True):
            for name in a:
                assert harness.same_bits(a[name], b[name]), (shape, step, name)
    return theirs


@pytest.mark.parametrize("isa", [isa.name for isa in ISAS])
@pytest.mark.parametrize(("name", "plan", "param", "flags"), CASES, ids=lambda x: str(x))
def test_same_bits(name: str, plan: str, param: str, flags: dict[str, bool], isa: str, tmp_path: Path) -> None:
    users = isa == ISAS[0].name or (name, plan) == ("adamw", "int8_split24")
    with nullcontext() if users else harness.unoptimized():
        steps(strict(name, plan, tmp_path, param, flags), param, param, isa, 2, zlib.crc32(f"{name} {plan}".encode()))


@pytest.mark.parametrize("plan", ["fp32", "int8_split24"])
def test_any_number_of_threads_gives_the_same_bits(plan: str, tmp_path: Path) -> None:
    pair = strict("adamw", plan, tmp_path)
    one, two, seven = (steps(pair, "bfloat16", "bfloat16", ISAS[0].name, threads) for threads in (1, 2, 7))
    for a, b, c in zip(one, two, seven, strict=True):
        for name in a:
            assert harness.same_bits(a[name], b[name]) and harness.same_bits(a[name], c[name])


@pytest.mark.parametrize("cache", [1 << 14, 1 << 20])
def test_tiles_of_any_size_give_the_same_bits(cache: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large as the first-level cache allows: states go from one machine to another."""
    monkeypatch.setattr(native, "first_level_cache", lambda: cache)
    pair = strict("adamw", "int8_split24", tmp_path)
    steps(pair, "bfloat16", "bfloat16", ISAS[0].name, 2, shapes=[(2 * 8192 + 16 * 64 + 70,), (5, 1024), (17 * 64,)])


@pytest.mark.parametrize("columns", [(1024, 2048), (1088, 1984), (4096, 70)])
def test_parts_of_rows_have_the_bits_of_the_whole(columns: tuple[int, int], tmp_path: Path) -> None:
    """Parts of fewer blocks than a tile, of a vector of blocks and one more, and with a ragged end."""
    pair = strict("adamw", "int8_split24", tmp_path)
    generator = torch.Generator().manual_seed(sum(columns))
    rows, wide = 3, sum(columns)
    weight = torch.randn(rows, wide, generator=generator)
    whole = pair.buffers((rows, wide), weight)
    parts = [pair.buffers(part.shape, part.contiguous()) for part in weight.split(columns, 1)]
    for step in range(1, 4):
        g = torch.randn(rows, wide, generator=generator).bfloat16()
        pair.run_cpp([(whole, g, 7)], step, 5 * step)
        first = 0
        for part, own in zip(parts, g.split(columns, 1), strict=True):
            pair.run_cpp([(part, own.contiguous(), 7)], step, 5 * step, at=(0, first, wide))
            first += own.shape[1]
    for name, found in whole.items():
        width = found.numel() // rows
        if name == "p" or next(f.per for f in pair.variant.fields if f.name == name) == 1:
            cut = [part[name].view(rows, -1) for part in parts]
            assert sum(c.shape[1] for c in cut) == width
            assert harness.same_bits(torch.cat(cut, 1), found.view(rows, width)), name


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


WANTS = [
    {"v": 12, "m": 12, "p": 8},
    {"v": 12, "m": 12, "n": 12, "k": 5, "p": 16},
    {"a": 3, "b": 7, "c": 8, "p": 1},
    {**{f"s{k}": 20 for k in range(5)}, "p": 13},  # more words than salts are listed
    {"only": 9, "p": 0},
    {"p": 8},
]


@pytest.mark.parametrize("rare", [(), ("p",), ("v", "b", "s1", "only")])
def test_random_bits_are_those_of_the_reference(rare: tuple[str, ...], tmp_path: Path) -> None:
    """Words dealt by the header beside keys.deal and what the eager reference draws."""
    text = ['#include "optgen.h"']
    for k, wants in enumerate(WANTS):
        rows = ", ".join(f"{{{bits}, {str(name in rare).lower()}}}" for name, bits in wants.items())
        values = [*map(str, range(len(wants) - 1)), "P"]
        stores = [f"store(out + {j} * 64 + i, integer<{v}>(noise));" for j, v in enumerate(values)]
        stores = [s for s, bits in zip(stores, wants.values(), strict=True) if bits]
        text += [
            f"struct Kernel{k} {{",
            f"    static constexpr auto NOISE = dealt({{{rows}}});",
            "    static constexpr int DRAWN = (1 << NOISE.words) - 1, KEPT = 0, TILE = 64;",
            "};",
            'extern "C" __attribute__((visibility("default"))) void',
            f"draw{k}(int32_t *out, int32_t stream, int32_t step) {{",
            f"    Words<Kernel{k}> words(64, 0, stream, step);",
            "    for (int i = 0; i < 64; i += W) {",
            "        const auto noise = words.at(i);",
            *(f"        {s}" for s in stores),
            "    }",
            "}",
        ]
    source, library = tmp_path / "draws.cpp", tmp_path / "draws.so"
    source.write_text("\n".join(text) + "\n")
    command = [*native.compiler().command, *native.FLAGS, *ISAS[0].flags, f"-I{native.HEADERS}"]
    subprocess.run([*command, "-shared", str(source), "-o", str(library)], check=True, capture_output=True)
    loaded, device = ctypes.CDLL(str(library)), tile.load(tile.CODECS)
    for k, wants in enumerate(WANTS):
        fields, words = keys.deal(wants, rare)
        for step, stream in ((keys.step_key(3, 1), 5), (keys.step_key(9, 299), -77)):
            out = torch.empty(len(wants), 64, dtype=torch.int32)
            getattr(loaded, f"draw{k}")(ctypes.c_void_p(out.data_ptr()), ctypes.c_int32(stream), ctypes.c_int32(step))
            for found, name in zip(out, wants, strict=True):
                if wants[name]:
                    word, shift, bits = fields[name]
                    index, key = torch.arange(64, dtype=torch.int32), torch.tensor(step, dtype=torch.int32)
                    drawn = device.word(index, key, stream, SimpleNamespace(recipes=keys.recipes(words)), word)
                    assert torch.equal(found, device.integer(drawn, shift, bits)), (wants, name)
