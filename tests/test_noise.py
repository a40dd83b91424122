"""The noise of stochastic rounding: uniform, independent over neighbours, windows, tensors and bits; even over windows.

The bounds are those of the binomial distribution at six standard deviations, so a sound hash fails about
once in 10^8 checks, and the keys below are fixed.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from optgen.accumulate import accumulator
from optgen.driver.compile import compile as compiled
from optgen.lang import hyper, lookahead, optimizer
from optgen.runtime.modes.accumulated import GradientAccumulator
from optgen.runtime.records import keys
from optgen.runtime.records.keys import WINDOW, places, step_key, stream_key
from optgen.runtime.reference import tile

N = 1 << 18
SIGMAS = 6.0
FIELDS = ((20, 12), (8, 12), (0, 8))  # what 8-bit states and a weight share: (shift, bits)
AT = places(FIELDS)


def drawn(recipes: Sequence[keys.Recipe], k: int, stream: int, step: int, count: int) -> torch.Tensor:
    """Word k of consecutive elements as the reference and Triton's kernels make it, uint32 in int64."""
    key = torch.tensor(step, dtype=torch.int32)
    index, sweep = torch.arange(count, dtype=torch.int32), SimpleNamespace(recipes=recipes)
    made = tile.load(tile.CODECS).word(index, key, stream, sweep, k)
    return made.long() & 0xFFFFFFFF


RECIPES = keys.recipes([(AT, (), False)] * 6)


def words(stream: int, step: int, k: int = 0, count: int = N) -> torch.Tensor:
    return drawn(RECIPES, k, stream, step, count)


def bits_of(w: torch.Tensor) -> torch.Tensor:
    return ((w[:, None] >> torch.arange(32)) & 1).double()


KEYS = [(stream_key("layers.0.weight"), step_key(0, 1)), (stream_key(3), step_key(7, 1000)), (0, 0), (1, 2)]


@pytest.mark.parametrize(("stream", "step"), KEYS)
def test_every_bit_is_fair_and_bits_and_neighbours_are_independent(stream: int, step: int) -> None:
    b = bits_of(words(stream, step)) - 0.5
    assert b.mean(0).abs().max() <= SIGMAS * 0.5 / math.sqrt(N)
    products = (b.T @ b) / N * 4
    assert (products - torch.eye(32)).abs().max() <= SIGMAS / math.sqrt(N)
    for distance in (1, 2, 3, 4, 5, 6, 7, 8, 64, 256, 4096):
        products = (b[:-distance].T @ b[distance:]) / (N - distance) * 4
        assert products.abs().max() <= SIGMAS / math.sqrt(N - distance)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((stream_key("a"), step_key(0, 5)), (stream_key("a"), step_key(0, 5 + WINDOW))),
        ((stream_key("a"), step_key(0, 5)), (stream_key("b"), step_key(0, 5))),
        ((stream_key(0), step_key(0, 1)), (stream_key(1), step_key(0, 1))),
        ((stream_key(0), step_key(0, 1)), (stream_key(0), step_key(1, 1))),
        *(((*KEYS[0], k), (*KEYS[0], k + 1)) for k in (0, 3, 4)),
    ],
)
def test_windows_tensors_and_words_of_one_element_are_independent(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    a, b = bits_of(words(*one)) - 0.5, bits_of(words(*other)) - 0.5
    assert ((a.T @ b) / N * 4).abs().max() <= SIGMAS / math.sqrt(N)


def test_there_are_words_for_any_number_of_states() -> None:
    """Each under a salt of its own, so far from all others that no two hashes of a tensor of 2^28 elements meet."""
    salts = [keys.salt(k) for k in range(24)]
    assert len(keys.deal({f"state{i}": 12 for i in range(48)})[1]) == 24
    assert min(a ^ b for a, b in itertools.combinations(salts, 2)) >= 1 << 24


def test_keys_of_steps_have_windows() -> None:
    found = [step_key(3, t) for t in range(3 * WINDOW)]
    for t, key in enumerate(found):
        assert f"{key % WINDOW:0{keys.PLACE}b}" == f"{t % WINDOW:0{keys.PLACE}b}"[::-1]
        assert key // WINDOW == found[t - t % WINDOW] // WINDOW
    assert len({key // WINDOW for key in found}) == 3


@pytest.mark.parametrize(("shift", "bits"), FIELDS)
def test_a_field_visits_equal_parts_of_its_range_once_each(shift: int, bits: int) -> None:
    """All 256 in a window, and 8, 32 and 128 likewise in parts of one: what van der Corput's order is for."""
    draws = torch.stack([words(stream_key("w"), step_key(0, t), count=64) for t in range(WINDOW, 2 * WINDOW)])
    field = (draws >> shift) & ((1 << bits) - 1)
    for parts in (8, 32, 128, 256):
        visited = (field * parts >> bits).view(-1, parts, 64).sort(1).values
        assert (visited == torch.arange(parts)[:, None]).all()


def test_fields_of_few_bits_move_too() -> None:
    """A format may ask for fewer bits than the place in a window has: each of its numbers comes as often as the others,
    in every row of as many steps."""
    dealt, made = keys.deal({"first": 12, "few": 6, "one": 1, "last": 5})
    assert len(made) == 1
    draws = torch.stack([drawn(keys.recipes(made), 0, 7, step_key(0, t), 64) for t in range(WINDOW)])
    for name in ("few", "one", "last"):
        _, shift, bits = dealt[name]
        field = (draws >> shift) & ((1 << bits) - 1)
        rows = field.view(-1, 1 << bits, 64).sort(1).values
        assert (rows == torch.arange(1 << bits)[:, None]).all()


@optimizer(cite="none", name="Descent")
def descent(p, g, *, lr=hyper(1e-2, ge=0)):
    """Steps of equal size where gradients are."""
    p = p - lr * g
    return p


def rounded_by_chance(x: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """fp64 numbers as bf16 ones above or below them, so that the mean is theirs."""
    unit = torch.frexp(x).exponent.double().sub(8).exp2()
    return (x / unit + torch.rand(x.shape, generator=chance, dtype=torch.float64)).floor() * unit


@pytest.mark.parametrize("k", [2, 4, 5, 6])
def test_a_weight_that_every_kth_step_sets_back_is_rounded_as_by_chance(k: int) -> None:
    """Lookahead's weight is a mean of two at multiples of k: what came before counts half, whatever the window says."""
    steps, size, small = 240, 1 << 13, float(torch.tensor(2.0**-8 * 0.013).bfloat16())
    p = torch.nn.Parameter(torch.ones(size).bfloat16())
    opt = compiled(lookahead(descent), "bf16_sr")([p], lr=1.0, lookahead_k=k)
    fast, slow, chance = torch.ones(size).double(), torch.ones(size).double(), torch.Generator().manual_seed(k)
    for t in range(1, steps + 1):
        p.grad = torch.full_like(p, small)
        opt.step()
        fast = fast - small
        if t % k == 0:
            fast = slow + 0.5 * (fast - slow)
            slow = rounded_by_chance(fast, chance)
        fast = rounded_by_chance(fast, chance)
    off, by_chance = (x.double() - 1 + 0.5 * small * steps for x in (p.detach(), fast))
    assert abs(float(off.mean())) <= SIGMAS * float(by_chance.std()) / math.sqrt(size)
    # A variance of 2^13 numbers of kurtosis 3 or less, twice.
    assert abs(math.log(float(off.var() / by_chance.var()))) <= SIGMAS * 2 / math.sqrt(size)


@pytest.mark.parametrize("kind", ["one number", "each its own", "others each time"])
def test_a_sum_of_32_is_off_by_less_than_one_rounded_by_chance(kind: str) -> None:
    """Micro-batches in bf16: 31 sums are stored."""
    size, rounds, chance = 1 << 12, 4, torch.Generator().manual_seed(5)
    sums = GradientAccumulator(accumulator("bf16_sr", backend="reference"), torch.nn.Parameter(torch.zeros(size)), "w")
    ours, other = [], []
    for _ in range(rounds):
        each = 1 + torch.rand(size, generator=chance)
        exact = total = torch.zeros(size).double()
        for k in range(32):
            if kind == "others each time":
                each = torch.randn(size, generator=chance)
            g = torch.full((size,), 1 + 2.0**-7 * 0.3) if kind == "one number" else each.clone()
            exact = exact + g.double()
            total = total + g.double() if k == 31 else rounded_by_chance(total + g.double(), chance)
            sums.add(g)
        sums.clear()
        ours.append(g.double() - exact)  # g took the sum
        other.append(total - exact)
    squares = [torch.stack(found).square().mean() for found in (ours, other)]
    # As above, of a mean square each.
    assert float(squares[0] / squares[1]) < math.exp(-SIGMAS * 2 / math.sqrt(size * rounds))


@pytest.mark.parametrize("beta", [0.9, 0.98])
def test_windows_do_not_resonate_with_grids_that_move(beta: float) -> None:
    """An average on codes whose grid moves evenly, at 24 speeds from a hundredth of a cell to three cells per step: its
    noise is at no speed larger than under independent draws, the first of a window each, beyond what chance allows.

    Its value stays 40 to 104 cells; what is rounded up, and the draws, are those of a state with 12 bits.
    """
    stream, elements, steps, settle = stream_key("w"), 512, 400, 100
    speed = torch.logspace(-2, math.log10(3), 24, dtype=torch.float64)[:, None]
    value = torch.linspace(40, 104, elements, dtype=torch.float64)

    def noise(key: Callable[[int], int]) -> torch.Tensor:
        stored, total = value - torch.zeros_like(speed), torch.zeros(24, dtype=torch.float64)
        for t in range(steps):
            draw = ((words(stream, key(t), count=elements) >> 20) + 0.5) / 4096
            moved = t * speed  # the grid's points are the whole numbers, less what it has moved
            stored = torch.floor(beta * stored + (1 - beta) * value + moved + draw) - moved
            if t >= settle:
                total += (stored - value).square().sum(1)
        return total

    ratio = noise(lambda t: step_key(0, t)) / noise(lambda t: step_key(0, t * WINDOW))
    # Variances of that many independent values, two of each, their kurtosis at most that of a normal distribution.
    apart = elements * (steps - settle) * (1 - beta) / (1 + beta)
    assert (ratio <= 1 + SIGMAS * math.sqrt(4 / apart)).all()
    assert ratio.mean() <= 0.75


def test_bits_are_dealt_without_overlap_and_words_are_added_as_needed() -> None:
    dealt, made = keys.deal({"exp_avg_sq": 12, "exp_avg": 12, "p": 8})
    assert len(made) == 1
    assert sorted((shift, shift + bits) for _, shift, bits in dealt.values()) == [(0, 8), (8, 20), (20, 32)]
    dealt, made = keys.deal({"a": 16, "b": 16, "none": 0, "c": 16})
    assert set(dealt) == {"a", "b", "c"}
    assert made == tuple((places(shares), (), False) for shares in (((16, 16), (0, 16)), ((16, 16),)))
    with pytest.raises(ValueError, match="33 random bits"):
        keys.deal({"a": 33})
