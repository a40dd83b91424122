"""Compare two roots that a relative first moment may be divided by: as it will be read, and before it is rounded.

    python -m tests.test_relative_roots prints the table from which docs/decisions.md quotes

States are stored at each step by the formats of the plans, with random bits that are drawn anew.  Compared with fp64
are m itself, Adam's quotient m / sqrt(v), and m between two roots of factors, as Shampoo uses it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import optgen
from optgen.formats import Noise, linear, softsign
from optgen.formats.companders import Compander
from optgen.runtime.reference.matrices import inverse_root
from optgen.verify.lint import cancelling
from specs import plans
from tests.harness import spec_of

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


@pytest.mark.parametrize(("rule", "flags", "cancels"), [
    ("adamw", {}, True), ("adamw", {"amsgrad": True}, False), ("adan", {}, True), ("lamb", {}, True),
    ("adabelief", {}, True), ("adam_atan2", {}, True), ("cautious_adamw", {}, True), ("adabound", {}, False),
    ("padam", {}, False), ("radam", {}, False), ("adamod", {}, False), ("adamax", {}, False), ("msvag", {}, False),
    ("shampoo", {"matrix": True}, False), ("shampoo", {"matrix": False}, True),
])  # fmt: skip
def test_roots_cancel_where_the_first_moment_is_read_in_quotients_alone(
    rule: str, flags: dict[str, bool], cancels: bool
) -> None:
    """AMSGrad divides by another state, Padam by another power, RAdam's first steps by nothing, AdaMod by an average of
    roots; AdaBound keeps the rate within limits, and Shampoo multiplies by matrices."""
    spec = spec_of(rule)
    found = cancelling(spec, tuple(({f.name: f.default for f in spec.flags} | flags).items()))
    assert found == ({s.normalized_by for s in spec.states if s.normalized_by} if cancels else set())


in_blocks = plans.int8_split24.but("In blocks whatever the size.", small_numel=0)


def first_quotients(rule: str, gradient: torch.Tensor, backend: str, steps: int = 1) -> tuple[torch.Tensor, ...]:
    """Return the weight, m and m / sqrt(v) as kept after steps of one gradient."""
    p = torch.nn.Parameter(torch.zeros_like(gradient))
    opt = optgen.compile(rule, in_blocks, "strict")([p], lr=1e-3, backend=backend)
    for _ in range(steps):
        p.grad = gradient.clone()
        opt.step()
    states = opt.dense_state_dict()["state"][0]
    return p.detach(), states["exp_avg"], states["exp_avg"] / states["exp_avg_sq"].sqrt()


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_the_root_before_it_is_rounded_divides_where_it_cancels(backend: str) -> None:
    """All first quotients are of one size, so that what is left of AdamW's is the rounding of m alone."""
    gradient = 1e-3 * torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    spread = {x: first_quotients(x, gradient, backend)[2].abs().std() for x in ("adamw", "adabound")}
    assert spread["adamw"] < 0.6 * spread["adabound"]


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_zeros_infinities_and_nan_stay_in_their_elements(backend: str) -> None:
    gradient = 1e-3 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    gradient[0, ::2], gradient[1, ::2], gradient[2, 5], gradient[3, 7] = 0.0, 1e-30, 1e25, torch.nan
    weight, moment, _ = first_quotients("adamw", gradient, backend, 5)
    weight[3, 7], moment[3, 7] = 0.0, 0.0  # anything
    assert weight.isfinite().all() and moment.isfinite().all()
    assert not moment[0, ::2].any() and moment[:2, 1::2].all()


@dataclass(frozen=True)
class TwoOctaves(Compander):
    """The pseudo-logarithm of 2 to 8, two octaves: codes evenly up to a half of them, then twice as far apart."""

    def __str__(self) -> str:
        return "two octaves"

    def encode(self, x: Any, scale: Any, codes: int) -> Any:
        n = 0.75 * codes / scale * x
        return n + n.clamp(-codes / 4, codes / 4)

    def decode(self, code: Any, scale: Any, codes: int) -> Any:
        return scale * (2 * code - code.clamp(-codes / 2, codes / 2)) / (1.5 * codes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for plan, stream, beta2 in itertools.product(PLANS, STREAMS, (0.999, 0.95)):
        before = softsign(1 if plan[3] in "86" else 0.5)
        today, unrounded = (errors(plan, stream, beta2, as_read, compander=before) for as_read in (True, False))
        cells = [f"{name} {x:.3g} {unrounded[name] / x - 1:+.0%}" for name, x in today.items()]
        for code in (softsign(1), softsign(0.5), softsign(0.25), TwoOctaves(1), linear):
            found = errors(plan, stream, beta2, False, compander=code)
            cells.append(f"{code} {found['Adam'] / today['Adam'] - 1:+.1%}")
        print(f"{plan}, {stream}, {beta2}: {', '.join(cells)}", flush=True)
