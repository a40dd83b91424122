"""The assembly of optgen.runtime.gpu.prelude against its twins, read as NVIDIA's and AMD's manuals define it.

The interpreter runs the twins and no machine is at hand, so the permutations are carried out here, on words as a lane
holds them: element i of a word is its i-th byte or half.
"""

import inspect
import random
import re
import struct

import pytest

pytest.importorskip("triton")

from optgen.runtime.gpu import prelude

WORD = 0xFFFFFFFF


def _prmt(a: int, b: int, selector: int) -> int:
    """prmt.b32 in its default mode, without sign replication."""
    source = [x >> 8 * i & 0xFF for x in (a, b) for i in range(4)]
    picks = [selector >> 4 * i & 0xF for i in range(4)]
    assert max(picks) < 8
    return sum(source[pick] << 8 * i for i, pick in enumerate(picks))


def _perm(a: int, b: int, selector: int) -> int:
    """v_perm_b32 of AMD's CDNA 3: bytes 0 to 3 are those of the second word, 4 to 7 of the first, 12 is a zero."""
    source = {12: 0} | {i: x >> 8 * (i % 4) & 0xFF for x, four in ((b, range(4)), (a, range(4, 8))) for i in four}
    return sum(source[selector >> 8 * i & 0xFF] << 8 * i for i in range(4))


def _run(assembly: str, outputs: int, inputs: list[int]) -> list[int]:
    """The words $0 .. of straight-line assembly whose inputs follow the outputs."""
    values = {f"${outputs + i}": x for i, x in enumerate(inputs)}

    def read(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    for line in re.sub(r"[{}]|\.reg[^;]*;", "", assembly).split(";"):
        if not (text := line.strip()):
            continue
        op, rest = text.split(maxsplit=1)
        to, *names = (x.strip() for x in rest.split(","))
        operands = [read(name) for name in names]
        if op == "prmt.b32":
            values[to] = _prmt(*operands)
        elif op == "v_perm_b32":
            values[to] = _perm(*operands)
        elif op == "shl.b32":
            values[to] = operands[0] << operands[1] & WORD
        elif op == "shr.u32":
            values[to] = operands[0] >> operands[1]
        elif op == "and.b32":
            values[to] = operands[0] & operands[1]
        else:
            raise AssertionError(op)
    return [values[f"${i}"] for i in range(outputs)]


def _assembly(helper: str) -> str:
    """The string that `helper` gives to inline_asm_elementwise."""
    source = inspect.getsource(getattr(prelude, helper).fn)
    found = re.search(r'inline_asm_elementwise\(\s*("""|")(.*?)\1', source, re.DOTALL)
    return found[2]


def _words(count: int) -> list[int]:
    draw = random.Random(count)
    return [draw.getrandbits(32) for _ in range(count)]


def _split(word: int, bits: int) -> list[int]:
    return [word >> i & ((1 << bits) - 1) for i in range(0, 32, bits)]


@pytest.mark.parametrize("word", [0x03020100, 0xFFFE8180, 0x80000001, *_words(20)])
def test_bytes_become_floats_and_halves_become_floats(word: int) -> None:
    floats = [struct.unpack("<f", struct.pack("<I", x))[0] for x in _run(_assembly("counter"), 4, [word])]
    assert floats == [2.0**23 + x for x in _split(word, 8)]
    assert _run(_assembly("widened"), 2, [word]) == [x << 16 for x in _split(word, 16)]


@pytest.mark.parametrize("low", [0x03020100, 0xFFFE8180, *_words(20)])
def test_a_half_and_a_byte_are_joined(low: int) -> None:
    high = [0x11102120, 0x91A0F1C0]
    halves = [x for word in high for x in _split(word, 16)]
    wanted = [(h << 16) | (x << 8) for h, x in zip(halves, _split(low, 8), strict=True)]
    assert _run(_assembly("joined"), 4, [*high, low]) == wanted


@pytest.mark.parametrize("k", range(4))
def test_bytes_of_four_words_are_gathered(k: int) -> None:
    words = _words(4)
    (got,) = _run(prelude.gather.fn(k), 1, words)
    assert _split(got, 8) == [x >> 8 * k & 0xFF for x in words]


@pytest.mark.parametrize("k", range(4))
def test_bytes_of_two_words_come_beside_zeros(k: int) -> None:
    """On AMD, as two halves, whose lower bytes are then stored."""
    for words in (_words(2), [0xFFFFFFFF, 0], [0, 0xFFFFFFFF], [0x03020100, 0x83828180]):
        pick = prelude.between.fn(k)
        (got,) = _run(_assembly("byte"), 1, [*words, pick, pick])
        assert _split(got, 16) == [x >> 8 * k & 0xFF for x in words]


@pytest.mark.parametrize("word", [0x03020100, 0xFFFE8180, *_words(20)])
def test_bytes_become_integers(word: int) -> None:
    assert _run(_assembly("apart"), 4, [word]) == _split(word, 8)


@pytest.mark.parametrize("k", [4, 12, 20])
def test_bits_between_bytes_are_gathered(k: int) -> None:
    for words in (_words(4), [0xFFFFFFFF, 0, 0xFF << k, ~(0xFF << k) & WORD]):
        (got,) = _run(prelude.halves.fn(k), 1, words)
        assert _split(got, 8) == [x >> k & 0xFF for x in words]


def test_a_mask_on_the_noise_does_what_a_shift_does() -> None:
    """`rounded` takes the same byte of bits 8 to 19 on machines with assembly and on the others."""
    for pattern, noise in zip(_words(200), _words(300), strict=False):
        plain = (pattern + (noise >> 8 & 4095)) >> 12 & 0xFF
        assert ((pattern << 8) + (noise & 0xFFF00) & WORD) >> 20 & 0xFF == plain
