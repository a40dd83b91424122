"""The claims of the compiler about its formats, as data: what tools/check_claims.py reads, and nothing else.

    python -m tools.claims FILE    writes them as JSON, in seconds

Tables are those of the formats' own `encode` and `decode`: each code of a block, the first number that takes it and
what it reads as, at both extremes of the noise where rounding is stochastic.  Numbers are patterns of fp32; a list of
whole numbers is written as runs (first, step, count).  Beside them stand the bounds, their ranges, the largest errors
of docs/formats.md, and the errors under averaging.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optgen.formats import Blocked, LogMinMax, Plan, companders, scales
from optgen.formats.coded import InBlocks
from optgen.formats.format import Noise, Rounding
from optgen.ops.dtypes import bf16, in_f32, of_pattern, pattern_of
from optgen.verify.bounds import master_bound, one_step_bound, steady_state
from tools.certificate import ONE, Line, certify, lines, starts

FINITE = 0x7F7FFFFF  # the pattern of the largest fp32

WIDTHS = (8, 6, 5, 4, 3, 2)
DECAYS = (0.9, 0.95, 0.99, 0.999, -0.9)
UNITS = (1, 2, 3, 5, 16, 33, 64)
"""The units of a block, of those that it may span, whose table is written whole."""


def shipped() -> tuple[dict[Any, list[str]], dict[Any, list[str]]]:
    """Return (formats of states, master weights) of the shipped plans, with the plans that have them."""
    from optgen.driver import targets
    from specs import adamw, plans

    spec = adamw.adamw
    flags = {f.name: f.default for f in spec.flags}
    recurrences = targets.recurrences_of(spec, tuple(sorted(flags.items())))
    states: dict[Any, list[str]] = {}
    weights: dict[Any, list[str]] = {}
    for name, plan in vars(plans).items():
        if isinstance(plan, Plan):
            storage = plan.storage(spec.present(flags), bf16, False, recurrences)
            for fmt in storage.states.values():
                states.setdefault(fmt, []).append(name)
            weights.setdefault(storage.master, []).append(name)
    return {fmt: list(dict.fromkeys(names)) for fmt, names in states.items()}, weights


def families() -> Iterator[tuple[str, str, list[Any]]]:
    """Yield (compander, rounding, its widths); then the logarithms."""
    softsigns = [companders.softsign(x) for x in (0.5, 1, 2)]
    roundings: tuple[Rounding, ...] = ("nearest", "stochastic")
    for rounding in roundings:
        for curve in (companders.linear, *softsigns):
            made: list[Any] = [Blocked(b, 64, curve, scales.ue8m8, rounding=rounding) for b in WIDTHS]
            yield str(curve), rounding, made
    for rounding in roundings:
        made = [LogMinMax(b, 64, rounding=rounding) for b in WIDTHS if b >= 4]
        yield "min/max logarithm", rounding, made


def patterns(x: Tensor) -> list[list[int]]:
    return runs(x.float().contiguous().view(torch.int32))


def runs(x: Tensor) -> list[list[int]]:
    """Return whole numbers as runs (first, step, count)."""
    whole = np.asarray(x.flatten(), dtype=np.int64)
    turns = np.flatnonzero(np.diff(whole, 2)) + 1  # where the next step is another one
    out, at = [], 0
    while at < len(whole):
        later = np.searchsorted(turns, at + 1)
        stop = int(turns[later]) + 1 if later < len(turns) else len(whole)
        out.append([int(whole[at]), int(whole[at + 1] - whole[at]) if stop > at + 1 else 0, stop - at])
        at = stop
    return out


def extremes(bits: int, shape: Sequence[int]) -> list[Noise | None]:
    """Return the least and the greatest noise of so many bits."""
    words = (torch.full(tuple(shape), word, dtype=torch.int32) for word in (0, (1 << bits) - 1))
    return [Noise(word, 0, bits) for word in words] if bits else [None]


def of_line(line: Line, main: bool = False, **of: Any) -> dict[str, Any]:
    """Return a block's table: its codes, the first number that takes each and what it reads as; its header or scale.

    main  whether the largest error of docs/formats.md is that of this block, or of another such one
    """
    fmt = line.format
    made: dict[str, Any] = {"main": main, "sign": int(line.sign), "last": line.ends()[1], "tables": [], **of}
    if line.others:
        made["top"] = pattern_of(line.others[-1])
    for word in (0, (1 << fmt.noise_bits) - 1) if fmt.noise_bits else (None,):
        codes, begins = starts(line, word)
        parts, kept = line.encode(begins, word)
        if "scale" in parts:
            scale = parts["scale"][:1]
            made["scale"] = patterns(fmt.scale.decode(scale) if hasattr(fmt, "scale") else scale)[0][0]
        for name in {"range", "peak"} & parts.keys():
            made["header"] = int(parts[name][0].flatten()[0]) & 0xFFFF
        made["tables"].append({"codes": runs(codes), "begins": runs(begins), "reads": patterns(kept)})
    return made


def tables(fmt: Any, shipped: bool) -> Iterator[dict[str, Any]]:
    """Yield the tables of a format: under a scale of 1 or in one binade, and of a plan's formats at both ends of their
    range as well, beyond it and between."""
    bound = one_step_bound(fmt)
    if isinstance(fmt, LogMinMax):
        for units in sorted({min(u, fmt.most) for u in UNITS}):
            margin = int(fmt.margin(units) * 2**fmt.unit) + 256
            start = ONE - ((units // 2) << fmt.unit)
            low, high = start + margin, start + (units << fmt.unit) - margin
            line = Line(fmt, low, high, (of_pattern(low) ** 2, of_pattern(high) ** 2))
            yield of_line(line, units == fmt.most, units=units, **stated(fmt.bound(units)))
    else:
        for line in lines(fmt, bound):
            yield of_line(line, True)
    if shipped and bound.of in ("scale", "scale * root", "largest"):
        below = () if bound.strict else (bound.low / 2,)
        for top in (*below, bound.low, 1.4142135 * 2.0**9, bound.high):
            block = in_f32(top * top if fmt.of == "sqrt" else top)
            for sign in (1.0, -1.0) if fmt.signed else (1.0,):
                yield of_line(Line(fmt, 0, pattern_of(top), (block,), False, sign))
    if shipped and fmt.is_float:
        for low, high in ((0, 2 << 23), (FINITE - (1 << 23), FINITE)):
            yield of_line(Line(fmt, low, high))


def of_range(fmt: Any) -> dict[str, Any]:
    """Return how far under a block's largest root errors are bounded, and what numbers read as that lie so far under
    it, an octave further (`wide`) or far below (`deep`), under 256 places of the largest in an octave."""
    octaves, below = fmt.span(fmt.most) if isinstance(fmt, LogMinMax) else (fmt.span(), fmt.span())
    tops = torch.arange(ONE, ONE + (1 << 23), 1 << 15, dtype=torch.int32).view(torch.float32) ** 2
    made: dict[str, Any] = {"octaves": octaves, "below": below, "tops": patterns(tops)}
    for name, under in (("near", octaves), ("wide", octaves + 1), ("deep", 120.0)):
        block = tops[:, None, None].repeat(1, 1, fmt.block)
        block[:, 0, 0] *= 4.0**-under
        read = [fmt.decode_root(fmt.encode(block, noise=x)) for x in extremes(fmt.noise_bits, block.shape)]
        made[name] = {"bottoms": patterns(block[:, 0, 0]), "reads": [patterns(x[:, 0, 0]) for x in read]}
    return made


def of_scale(scale: scales.Scale) -> dict[str, Any]:
    """Return largest magnitudes of blocks and the scales that they get: both sides of each step of a 16-bit scale."""
    step = int(scale.excess * 2**23) or 9_999_991  # half a step, where scales are rounded to nearest
    last = pattern_of(math.sqrt(of_pattern(FINITE))) if scale == scales.ue7m9 else FINITE  # the largest root
    tops = [torch.arange(start, last + 1, step, dtype=torch.int32) for start in (step - 1, step, step + 1)]
    kept = [{"of": runs(x), "reads": patterns(scale.decode(scale.encode(x)[0]))} for x in tops]
    return {"tops": kept, "low": scale.low, "high": scale.high, "excess": scale.excess, "literal": scale.literal}


def law(of: Any) -> dict[str, Any]:
    """Return the class of a format or weight and its numbers, by their names."""
    made = {"law": type(of).__name__, **{k: v for k, v in vars(of).items() if isinstance(v, int | float | str)}}
    if isinstance(of, Blocked):
        made |= {"k": of.compander.k, "literal": of.scale.literal}
    return made | ({"scale": str(of.scale)} if isinstance(of, InBlocks) else {})


def stated(bound: Any) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(bound).items() if k != "valid"}


def of_format(fmt: Any, plans: list[str]) -> dict[str, Any]:
    """Return all claims about a format of states."""
    made = law(fmt) | {"name": str(fmt), "plans": plans, "bound": stated(one_step_bound(fmt))}
    if not 0 < made["bound"]["value"] < math.inf:  # exact, or nothing is claimed of an element
        return made
    fmt = fmt.of_vectors()
    made |= {"noise": fmt.noise_bits, "rooted": fmt.of == "sqrt", "largest_error": certify(fmt).supremum}
    if isinstance(fmt, LogMinMax):
        made["range"] = of_range(fmt)
    steady = [{"decay": d, **dataclasses.asdict(steady_state(fmt, d))} for d in DECAYS]
    return made | {"steady": steady, "lines": list(tables(fmt, bool(plans)))}


def of_weight(master: Any, plans: list[str]) -> dict[str, Any]:
    """Return all claims about a kept bf16 weight: what each number reads as around 1 and at both ends of the range."""
    bits, kept = master.noise_bits(bf16), []
    for first, last in ((ONE - (1 << 16), ONE + (1 << 16)), (0, 1 << 17), (FINITE - (1 << 17), FINITE)):
        x = torch.arange(first, last + 1, dtype=torch.int32).view(torch.float32)
        read = [master.decode(master.encode(x, bf16, noise=noise), bf16) for noise in extremes(bits, x.shape)]
        kept.append({"first": first, "last": last, "reads": [patterns(x) for x in read]})
    made = law(master) | {"name": master.describe(bf16), "plans": plans, "noise": bits, "lines": kept}
    return made | {"bound": stated(master_bound(master, bf16))}


def claims(every: bool = True) -> dict[str, Any]:
    """Return the claims about the formats and weights of shipped plans, and with `every` about families of formats."""
    states, weights = shipped()
    formats = {**{fmt: [] for _, _, made in families() if every for fmt in made}, **states}
    used = {str(f.scale): f.scale for f in formats if isinstance(f, InBlocks)}
    return {
        "scales": {name: of_scale(scale) for name, scale in used.items()},
        "formats": [of_format(fmt, plans) for fmt, plans in formats.items()],
        "weights": [of_weight(master, plans) for master, plans in weights.items()],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps(claims()) + "\n", encoding="utf-8")
