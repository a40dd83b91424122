"""AMD's permutations of optgen.runtime.gpu.prelude, which nothing executes here: carried out as its manual has them."""

import random

import pytest

pytest.importorskip("triton")

from optgen.runtime.gpu import prelude


@pytest.mark.parametrize("k", range(4))
def test_bytes_of_two_words_come_beside_zeros(k: int) -> None:
    """v_perm_b32 of CDNA 3: bytes 0 to 3 are those of the second word, 4 to 7 of the first, 12 is a zero."""
    draw = random.Random(k)
    for one, other in [(0x03020100, 0x83828180), *((draw.getrandbits(32), draw.getrandbits(32)) for _ in range(9))]:
        source = {12: 0} | {i: x >> 8 * (i % 4) & 0xFF for x, at in ((one, 0), (other, 4)) for i in range(at, at + 4)}
        selector = prelude.between.fn(k)
        made = sum(source[selector >> 8 * i & 0xFF] << 8 * i for i in range(4))
        assert [made >> 16 * i & 0xFFFF for i in (0, 1)] == [x >> 8 * k & 0xFF for x in (one, other)]
