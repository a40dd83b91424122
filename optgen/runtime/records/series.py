"""Coefficients of Newton and Schulz's rounds as a user chooses them: a triple, a list of triples, or the name of a set.

They reach `newton_schulz` through the scalars of a step as one number, since kernels take numbers only: the place of
the coefficients among those seen by this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from optgen.runtime.records import Hyper, as_float

Triple = tuple[float, float, float]

_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
JORDAN = (3.4445, -4.7750, 2.0315)
SETS: dict[str, tuple[int, tuple[Triple, ...]]] = {
    "jordan": (5, (JORDAN,)),
    "polar_express": (5, (*((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _EXPRESS), (1.875, -1.25, 0.375))),
    "deepseek": (10, (*8 * (JORDAN,), (2.0, -1.5, 0.5))),
    "cubic": (10, ((1.5, -0.5, 0.0),)),
}
"""Rounds as usual, and coefficients: of the series that brings all singular values near 1 in five rounds (Jordan et al.
2024); of the best one for each round, with the authors' margin for bf16 (Amsel et al. 2025, arXiv:2505.16932); eight
rounds of the first and two that converge; Newton and Schulz's own."""

_places: dict[Any, float] = {}
SEEN: list[tuple[Triple, ...]] = []
"""The triples that each number stands for."""


def plain(given: Any, part: Callable[[Any], Any] = as_float, what: str = "coefficients") -> Any:
    """Return coefficients as groups keep them: a name, a triple or triples of what `part` makes of numbers, None of
    anything else.  Raises ValueError for others."""
    if isinstance(given, str) and given in SETS:
        return given
    if isinstance(given, Sequence) and not isinstance(given, str) and given:
        several = isinstance(given[0], Sequence)
        parts = [tuple(map(part, t)) if isinstance(t, Sequence) else () for t in (given if several else [given])]
        if all(len(t) == 3 and not any(x is None for x in t) for t in parts):
            return tuple(parts) if several else parts[0]
    raise ValueError(f"{what} must be (a, b, c), a list of such, or one of {', '.join(map(repr, SETS))}, got {given!r}")


def rounds(given: Any, part: Callable[[Any], Any] = as_float) -> tuple[int, tuple[Triple, ...]]:
    """Return the usual number of rounds, which is 5 for a single triple, and the triples.  Arguments and errors are
    those of `plain`."""
    given = plain(given, part)
    if isinstance(given, str):
        return SETS[given]
    triples = given if isinstance(given[0], tuple) else (given,)
    return len(triples) if len(triples) > 1 else 5, triples


def number(given: Any) -> float:
    """Return the number that stands for coefficients in this process; it is whole, and exact in fp32."""
    try:
        return _places[given]
    except (KeyError, TypeError):  # it is new, or a list
        key = plain(given)
        if key not in _places:
            _places[key] = float(len(SEEN))
            SEEN.append(rounds(key)[1])
        return _places[key]


@dataclass(frozen=True)
class Series(Hyper):
    """The hyper-parameter whose value is such coefficients."""

    def check(self, value: object, owner: str, tensors: bool = False) -> Any:
        return plain(value, what=f"{owner}: {self.name}")

    def read(self, value: object, device: object = None) -> float:
        return number(value)

    def read_all(self, values: list[Any], device: object = None) -> list[Any]:
        return list(map(number, values))
