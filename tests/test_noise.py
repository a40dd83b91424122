"""The counter hash behind stochastic rounding: uniform, and independent over neighbours, steps, tensors and bits.

The bounds are those of the binomial distribution at six standard deviations, so a sound hash fails about
once in 10^8 checks, and the keys below are fixed.
"""

from __future__ import annotations

import math

import pytest
import torch

from optgen.backends.printer import Printer
from optgen.backends.reference import SPELL
from optgen.lower.noise import deal, word
from optgen.runtime.eager import Blocks, rotl
from optgen.runtime.keys import step_key, stream_key

N = 1 << 18
SIGMAS = 6.0


def words(stream: int, step: int, k: int = 0, count: int = N) -> torch.Tensor:
    """The words of `count` consecutive elements, uint32 in int64."""
    code = Printer(SPELL, {}).text(word(k))
    names = {"b": Blocks(torch.empty(count), 1), "stream_key": stream, "step_key": step, "torch": torch, "rotl": rotl}
    return eval(code, names).long() & 0xFFFFFFFF


def bits_of(w: torch.Tensor) -> torch.Tensor:
    return ((w[:, None] >> torch.arange(32)) & 1).double()


KEYS = [(stream_key("layers.0.weight"), step_key(0, 1)), (stream_key(3), step_key(7, 1000)), (0, 0), (1, 2)]


@pytest.mark.parametrize(("stream", "step"), KEYS)
def test_every_bit_is_fair_and_bits_are_pairwise_independent(stream: int, step: int) -> None:
    b = bits_of(words(stream, step)) - 0.5
    assert b.mean(0).abs().max() <= SIGMAS * 0.5 / math.sqrt(N)
    products = (b.T @ b) / N * 4
    assert (products - torch.eye(32)).abs().max() <= SIGMAS / math.sqrt(N)


@pytest.mark.parametrize(("stream", "step"), KEYS)
@pytest.mark.parametrize("distance", [1, 2, 3, 4, 5, 6, 7, 8, 64, 256, 4096])
def test_neighbours_are_independent(stream: int, step: int, distance: int) -> None:
    b = bits_of(words(stream, step)) - 0.5
    products = (b[:-distance].T @ b[distance:]) / (N - distance) * 4
    assert products.abs().max() <= SIGMAS / math.sqrt(N - distance)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((stream_key("a"), step_key(0, 5)), (stream_key("a"), step_key(0, 6))),
        ((stream_key("a"), step_key(0, 5)), (stream_key("b"), step_key(0, 5))),
        ((stream_key(0), step_key(0, 1)), (stream_key(1), step_key(0, 1))),
        ((stream_key(0), step_key(0, 1)), (stream_key(0), step_key(1, 1))),
    ],
)
def test_steps_and_tensors_are_independent(one: tuple[int, int], other: tuple[int, int]) -> None:
    a, b = bits_of(words(*one)) - 0.5, bits_of(words(*other)) - 0.5
    assert ((a.T @ b) / N * 4).abs().max() <= SIGMAS / math.sqrt(N)


def test_words_of_one_element_are_independent() -> None:
    stream, step = KEYS[0]
    a, b = bits_of(words(stream, step, 0)) - 0.5, bits_of(words(stream, step, 1)) - 0.5
    assert ((a.T @ b) / N * 4).abs().max() <= SIGMAS / math.sqrt(N)


def test_one_element_over_many_steps_is_uniform() -> None:
    """What a weight sees: the same index, a new step key each time; its 12-bit field over 16 cells."""
    stream = stream_key("w")
    draws = torch.stack([words(stream, step_key(0, t), count=64) for t in range(1, 1025)])  # steps x elements
    for shift in (20, 8, 0):
        cell = (draws >> shift) & 15
        counts = torch.stack([(cell == c).sum(0) for c in range(16)]).double()
        expected = draws.shape[0] / 16
        assert (counts - expected).abs().max() <= SIGMAS * math.sqrt(expected * 15 / 16)


def test_bits_are_dealt_without_overlap_and_words_are_added_as_needed() -> None:
    noise, used = deal({"exp_avg_sq": 12, "exp_avg": 12, "p": 8})
    assert len(used) == 1
    assert sorted((n.shift, n.shift + n.bits) for n in noise.values()) == [(0, 8), (8, 20), (20, 32)]
    noise, used = deal({"a": 16, "b": 16, "none": 0, "c": 16})
    assert len(used) == 2
    assert set(noise) == {"a", "b", "c"}
    with pytest.raises(ValueError, match="33 random bits"):
        deal({"a": 33})
