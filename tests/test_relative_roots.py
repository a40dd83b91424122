"""Compare two roots that a relative first moment may be divided by: as it will be read, and before it is rounded.

    python -m tests.test_relative_roots prints the table from which docs/decisions.md quotes

States are stored at each step by the formats of the plans, with random bits that are drawn anew.  Compared with fp64
are m itself, Adam's quotient m / sqrt(v), and m between two roots of factors, as Shampoo uses it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from optgen.formats import Noise, linear, softsign
from optgen.runtime.reference.matrices import inverse_root
from specs import plans

SIZE, STEPS, BETA1 = 64, 120, 0.9
PLANS = ("int8_split24", "int6_split24", "int5_split24", "int4_split24")
STREAMS = {"equal": (0.0, 0.0, 0.0), "unequal": (1.2, 0.0, 0.0), "drifting": (1.2, 0.5, 0.0), "fading": (1.2, 0.0, 4.0)}
"""Gradients are normal: the octaves by which the sizes of elements differ, their means over their sizes, and the
octaves by which all of them fall."""


def errors(plan: str, stream: str, beta2: float, as_read: bool, **changed: Any) -> dict[str, float]:
    """Return squared errors over squares of m, of the quotient and of Shampoo's product.

    changed  fields of the format of m
    """
    octaves, mean, fall = STREAMS[stream]
    kept = getattr(plans, plan)
    first, second = (x.rounded("stochastic") for x in (replace(kept.signed, **changed), kept.nonneg))
    draws, random = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    size = 1e-3 * torch.exp2(octaves * torch.randn(SIZE, SIZE, generator=draws))
    drift = mean * torch.randn(SIZE, SIZE, generator=draws)

    def noise(fmt: Any) -> Noise:
        word = torch.randint(-(2**31), 2**31, (SIZE, SIZE), generator=random).to(torch.int32)
        return Noise(word, 32 - fmt.noise_bits, fmt.noise_bits)

    m, v = torch.zeros(2, SIZE, SIZE)
    exact_m, exact_v, left, right = torch.zeros(4, SIZE, SIZE, dtype=torch.float64)
    wrong, whole = torch.zeros(2, 3, dtype=torch.float64)
    for t in range(STEPS):
        g = size * 2 ** (-fall * t / STEPS) * (drift + torch.randn(SIZE, SIZE, generator=draws))
        m, v, wide = BETA1 * m + (1 - BETA1) * g, beta2 * v + (1 - beta2) * g * g, g.double()
        exact_m = BETA1 * exact_m + (1 - BETA1) * wide
        exact_v = beta2 * exact_v + (1 - beta2) * wide * wide
        left, right = 0.99 * left + 0.01 * wide @ wide.T, 0.99 * right + 0.01 * wide.T @ wide
        root = second.decode_root(second.encode(v, noise=noise(second)))
        by = root if as_read else v.sqrt().clamp(min=2.0**-63)
        m, v = first.decode(first.encode(m, noise=noise(first), root=by), root=root), root * root
        if t >= STEPS // 3 and t % 10 == 0:
            a, b, x = inverse_root(left, 4.0, 1e-6), inverse_root(right, 4.0, 1e-6), m.double()
            pairs = (x, exact_m), (x / root.double(), exact_m / exact_v.sqrt()), (a @ x @ b, a @ exact_m @ b)
            wrong += torch.stack([(made - true).square().sum() for made, true in pairs])
            whole += torch.stack([true.square().sum() for _, true in pairs])
    return dict(zip(("m", "Adam", "Shampoo"), (wrong / whole).tolist(), strict=True))


def test_the_root_that_is_read_is_better_for_m_and_the_other_one_for_the_quotient() -> None:
    today, unrounded = (errors("int8_split24", "unequal", 0.95, as_read) for as_read in (True, False))
    assert unrounded["Adam"] <= 0.85 * today["Adam"]
    assert all(unrounded[name] >= 1.5 * today[name] for name in ("m", "Shampoo"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for plan, stream, beta2 in itertools.product(PLANS, STREAMS, (0.999, 0.95)):
        today, unrounded = (errors(plan, stream, beta2, as_read) for as_read in (True, False))
        cells = [f"{name} {x:.3g} {unrounded[name] / x - 1:+.0%}" for name, x in today.items()]
        for code in (linear, softsign(0.5)):
            found = errors(plan, stream, beta2, False, compander=code)
            cells.append(f"{code} {found['Adam'] / today['Adam'] - 1:+.0%}")
        print(f"{plan}, {stream}, {beta2}: {', '.join(cells)}", flush=True)
