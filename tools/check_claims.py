"""Check what a compiler claims of its number formats, without the compiler: this file imports numpy and reads its data.

    python -m tools.claims FILE            the compiler writes its claims
    python tools/check_claims.py FILE      prints those that are wrong; 1 if there are any

Of every format, and of each table of codes that the file has of it:

- all codes are there, rise with the numbers, and read as the format's law says, to the last bit (docs/formats.md);
- a number takes the code that the law gives it: to nearest a code's cell ends halfway to the next one, stochastic
  rounding reaches from one code to the next, at either extreme of its noise;
- the largest error over all numbers is what is claimed, and no table has a larger one than the bound allows;
- the bound's range is where scales, floats and logarithms follow a block's largest number, and ends where they cease;
- an average that is stored at every step settles where it is said to, which every cell is asked for.

Numbers are patterns of fp32 throughout; a list of whole numbers is made of runs (first, step, count).  Laws are written
here a second time, from the documents: their fp32 operations in numpy, and their place among the codes in fp64.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

F32 = np.float32
ULP = 2.0**-23  # of a number in [1, 2)
FINITE = float(np.finfo(F32).max)
Array = np.ndarray[Any, Any]


def unrolled(runs: Iterable[tuple[int, int, int]]) -> Array:
    first, step, count = np.array([*runs], dtype=np.int64).reshape(-1, 3).T
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(first, count) + np.repeat(step, count) * within


def f32_of(patterns: Any) -> Array:
    return np.asarray(patterns, dtype=np.uint32).view(F32)


def pattern_of(x: Any) -> Array:
    return np.asarray(x, dtype=F32).view(np.uint32).astype(np.int64)


def numbers(runs: Iterable[tuple[int, int, int]]) -> Array:
    return f32_of(unrolled(runs)).astype(np.float64)


def pseudolog(x: Array) -> Array:
    """Return the pattern of a number as if f32 had all digits: linear between powers of two."""
    mantissa, exponent = np.frexp(np.abs(x))
    normal = (exponent + 125 + 2 * mantissa) * 2.0**23
    return np.sign(x) * np.where(np.abs(x) < 2.0**-126, np.abs(x) * 2.0**149, normal)


# -- laws: what a code reads as, and where a number lies among the codes


@dataclass(frozen=True)
class Law:
    """The law of a table of codes.

    place   of numbers in units of the scale: whole where they are codes
    reads   f32 of codes, exactly
    codes   those that there are; None where a block has not all of them
    blur    how far, in codes, whole-number arithmetic may be from the law
    """

    place: Callable[[Array], Array]
    reads: Callable[[Array], Array]
    codes: set[int] | None = None
    blur: Callable[[Array], Array] = np.zeros_like


def compander(f: dict[str, Any], line: dict[str, Any]) -> Law:
    """n -> (1 + k) n / (1 + k n) of N = 2^(b-1) - 1 codes of either sign, or of the 2^b - 1 codes of a root."""
    k, bias = f["k"], 1 << (f["bits"] - 1) if f["signed"] else 0
    last, scale = (bias or 1 << f["bits"]) - 1, f32_of(line["scale"])

    def reads(codes: Array) -> Array:
        code = (codes - bias).astype(F32)
        if f["literal"]:
            y = code / F32(last)
            return (y / (F32(1 + k) - F32(k) * np.abs(y)) if k else y) * scale
        if not f["signed"]:
            code = np.maximum(code, F32(0.5 - 2.0**-10))  # no root reads as 0
        if not k:
            return code * (scale * F32((1 - 2.0**-22) / last))  # a hair less than the scale
        return scale * (code / (F32(last * (1 + k)) - np.abs(code) * F32(k)))

    codes = range(bias - last if f["signed"] else 0, bias + last + 1)
    return Law(lambda n: last * (1 + k) * n / (1 + k * np.abs(n)) + bias, reads, set(codes))


def of_table(table: Array, scale: Array, first: int = 0) -> Law:
    """Codes from `first` on that stand for rising numbers, as multiples of the scale."""
    codes, exact = np.arange(first, first + len(table)), table.astype(np.float64)
    return Law(lambda n: np.interp(n, exact, codes), lambda code: table[code - first] * scale, set(codes.tolist()))


def dynamic(signed: bool, bits: int) -> Array:
    """0, 1, and in decade i the middles of 2^i equal parts of [0.1, 1] times 10^(i - b + 2), as torch rounds them."""
    positive = []
    low = F32(0.1)
    for i in range(bits - 1):
        parts = 1 << (i if signed else i + 1)
        step = np.float64(F32(1) - low) / parts
        k = np.arange(parts + 1)
        ends = np.where(2 * k < parts, np.float64(low) + step * k, 1 - step * (parts - k)).astype(F32)
        middles = (ends[:-1] + ends[1:]) / F32(2)
        positive.append(F32(10.0 ** (i - bits + 2)) * middles)
    found = np.concatenate(positive)
    return np.concatenate([-found[::-1] if signed else found[:0], F32([0]), found, F32([1])])


def codebook(f: dict[str, Any], line: dict[str, Any]) -> Law:
    bits, scale = f["bits"], f32_of(line["scale"])
    if f["law"] == "Rank1" or "nozero" in f["name"]:
        return of_table((np.arange(1, (1 << bits) + 1) / (1 << bits)).astype(F32), scale)
    return of_table(dynamic("unsigned" not in f["name"], bits), scale)


LARGEST_FLOAT8 = {"e4m3": 448.0, "e5m2": 57344.0}


def float8(f: dict[str, Any], line: dict[str, Any]) -> Law:
    mantissa, bias, last = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B)}[f["kind"]]
    code = np.arange(last + 1)
    exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
    positive = np.ldexp(fraction + (np.minimum(exponent, 1) << mantissa), np.maximum(exponent, 1) - bias - mantissa)
    table = np.concatenate([-positive[:0:-1], positive]).astype(F32)
    made = of_table(table, f32_of(line["scale"]), -last)
    largest = LARGEST_FLOAT8[f["kind"]]
    return Law(lambda n: made.place(n * largest), made.reads, made.codes)


def min_max(f: dict[str, Any], line: dict[str, Any]) -> Law:
    """Cells of a pseudo-logarithm: a header of 16 bits says where they begin, and how many make half an octave."""
    first, cells = line["header"] >> 8, line["header"] & 0xFF
    start = (first << 22) + (64 << 23)
    step = round(2**22 / cells) if f["bits"] == 8 else 2 * round(2**21 / cells)
    middle = start + (step >> 1)
    ends = pattern_of(np.sqrt(f32_of([line["tables"][0]["begins"][0][0], line["last"]]).astype(np.float64)))
    inside = start <= ends[0] and ends[1] < start + (line["units"] << 22)
    if cells != min(255, (1 << f["bits"]) // line["units"]) or not inside:
        return Law(lambda n: n * math.nan, lambda code: code * F32(math.nan))
    return Law(
        lambda n: (pseudolog(n) - middle) / step, lambda code: f32_of(middle + code * step),
        blur=lambda code: (2 + np.abs(code)) / step,
    )  # fmt: skip


def floats(f: dict[str, Any], line: dict[str, Any]) -> Law:
    """The upper half of an f32's pattern."""
    return Law(lambda n: pseudolog(n) / 2.0**16, lambda code: f32_of(code << 16), blur=lambda code: 2.0**-16 + 0 * code)


LAWS = {
    "Blocked": compander, "Codebook": codebook, "Rank1": codebook, "Fp8": float8, "LogMinMax": min_max,
    "Float": floats,
}  # fmt: skip


# -- tables


@dataclass(frozen=True)
class Cells:
    """The codes of one table, in rising order of magnitude: the first and the last number of each, and what it reads
    as; all of them roots where roots are kept."""

    codes: Array
    first: Array
    last: Array
    reads: Array


def cells_of(f: dict[str, Any], line: dict[str, Any], table: dict[str, Any]) -> Cells:
    begins, sign = unrolled(table["begins"]), line["sign"]
    ends = [sign * f32_of(x).astype(np.float64) for x in (begins, np.append(begins[1:] - 1, line["last"]))]
    first, last = np.sqrt(ends) if f["rooted"] else ends
    return Cells(sign * unrolled(table["codes"]), first, last, numbers(table["reads"]))


def unit_of(f: dict[str, Any], line: dict[str, Any]) -> float:
    """Return the unit of numbers in the law, and of errors in the bound."""
    if "scale" not in line:
        return 1.0
    return float(f32_of(line["scale"])) * (LARGEST_FLOAT8[f["kind"]] if f["law"] == "Fp8" else 1.0)


def wrong_codes(f: dict[str, Any], line: dict[str, Any], law: Law, cells: Cells) -> Iterator[str]:
    rise = np.diff(line["sign"] * cells.codes)
    if not (rise == 1).all():
        yield "codes are not in order"
    if not (np.diff(line["sign"] * cells.reads) > 0).all():
        yield "what codes read as does not rise"
    if law.codes is not None and not set(cells.codes.tolist()) <= law.codes:
        yield "there are more codes than the law has"
        return
    off = np.flatnonzero(law.reads(cells.codes).astype(np.float64) != cells.reads)
    if len(off):
        at = off[0]
        yield f"code {cells.codes[at]} reads as {cells.reads[at]!r}, not {float(law.reads(cells.codes)[at])!r}"


def wrong_ends(f: dict[str, Any], line: dict[str, Any], law: Law, cells: Cells, word: int) -> Iterator[str]:
    """Check where each cell begins: the boundary to the code before, seen from 0."""
    part = 2.0 ** -f["noise"] if f["noise"] else 0.0
    upper = cells.codes[1:] + (0 if line["sign"] > 0 else 1)  # the greater code of the two
    meet = upper - 0.5 if not f["noise"] else upper.astype(float) if word == 0 else upper - 1 + part
    unit = float(f32_of(line["top"])) if f.get("literal") else unit_of(f, line)  # literal: scales are not divided by
    n = cells.first[1:] / (math.sqrt(unit) if f.get("literal") and f["rooted"] else unit)
    place = law.place(n)
    least = line["sign"] * 2.0**-149 / unit  # numbers near 0 are so far apart
    allowed = np.abs(law.place(n * (1 + 8 * ULP) + least) - place) + 1.01 * part + law.blur(cells.codes[1:]) + 1e-9
    off = np.flatnonzero(~(np.abs(place - meet) <= allowed))
    if len(off):
        at = off[0]
        yield f"the cell of code {cells.codes[at + 1]} begins at {place[at]!r} codes, not {meet[at]!r}"


def wrong_lines(f: dict[str, Any]) -> Iterator[str]:
    bound, largest = f["bound"], 0.0
    relative = bound["of"] in ("value", "root")
    covered: set[int] = set()  # by the blocks under a scale of 1
    for line in f["lines"]:
        law = LAWS[f["law"]](f, line)
        value, slack = line.get("value", bound["value"]), line.get("slack", bound["slack"])
        for word, table in enumerate(line["tables"]):
            cells = cells_of(f, line, table)
            yield from wrong_codes(f, line, law, cells)
            yield from wrong_ends(f, line, law, cells, word)
            ends, unit = np.concatenate([cells.first, cells.last]), unit_of(f, line)
            size = np.maximum(np.abs(ends), 1e-300) if relative else np.full(len(ends), unit)
            error = np.abs(ends - np.tile(cells.reads, 2))
            counted = np.abs(ends) <= bound["largest"]
            allowed = np.maximum((value + slack) * size, bound["absolute"]) * (1 + 1e-12)
            if not (error <= allowed)[counted].all():
                worst = (error / size)[counted].max()
                yield f"an error of {worst:.6g} of the {bound['of']}, beyond {value + slack:.6g}"
            if not relative:
                top = float(f32_of(line["top"]))
                yield from wrong_scale(bound, math.sqrt(top) if f["rooted"] else top, unit)
            if line["main"]:
                covered |= set(cells.codes.tolist())
                largest = max(largest, float((error / size).max()))
    if law.codes is not None and covered != law.codes:
        yield "codes are missing"
    if not math.isclose(largest, f["largest_error"], rel_tol=1e-6, abs_tol=1e-15):
        yield f"the largest error is {largest:.9g}, not {f['largest_error']:.9g}"
    if not math.isclose(largest, bound["value"], rel_tol=2e-3):
        yield f"the bound without its slack is {bound['value']:.6g}, the largest error {largest:.6g}"


# -- ranges


def wrong_scale(bound: dict[str, Any], top: float, scale: float) -> Iterator[str]:
    if bound["strict"]:
        fine = abs(scale - top) <= bound["excess"] * top
    else:
        least = max(top, bound["low"])
        fine = least * (1 - ULP) <= scale <= (1 + bound["excess"]) * least * (1 + ULP)
    if not fine:
        yield f"a block with a largest number of {top:.6g} has the scale {scale:.6g}: out of the range that is claimed"


def wrong_scales(s: dict[str, Any]) -> Iterator[str]:
    """Check scales at both sides of all steps of 16-bit ones, at numbers a step apart."""
    top, kept = (np.concatenate([numbers(x[name]) for x in s["tops"]]) for name in ("of", "reads"))
    low, high = s["low"], s["high"]
    inside = (top >= low) & (top <= high)
    off = np.abs(kept - top)[inside] / top[inside]
    if not (off <= s["excess"]).all() or off.max() < 0.99 * s["excess"]:
        yield f"scales are off by {off.max():.6g}, {s['excess']:.6g} are claimed"
    if not s["literal"] and not (kept[inside] >= top[inside]).all():
        yield "a scale lies below its block's largest number"
    below = (top < low) & (top > 0.99 * low)
    begins = np.abs(kept - top)[below] > s["excess"] * top[below] if s["literal"] else kept[top < low] == F32(low)
    if not (begins.any() if s["literal"] else begins.all()):
        yield f"the range does not begin at {low:.6g}"
    follows = np.abs(kept - top) <= s["excess"] * top
    if high < FINITE and top[follows].max() > high * (1 + s["excess"]):
        yield f"the range does not end at {high:.6g}"


def wrong_range(f: dict[str, Any], scales: dict[str, Any]) -> Iterator[str]:
    bound, largest = f["bound"], LARGEST_FLOAT8[f["kind"]] if f["law"] == "Fp8" else 1.0
    if "scale" in f:
        s = scales[f["scale"]]
        claimed = [bound[x] for x in ("low", "high", "excess", "strict")]
        if claimed != [s["low"] * largest, min(s["high"] * largest, FINITE), s["excess"], s["literal"]]:
            yield f"the range of the bound, {claimed}, is not that of its scales"
    if f["law"] == "Float" and len(f["lines"]) > 1:
        every = np.concatenate([numbers(table["reads"]) for line in f["lines"] for table in line["tables"]])
        ends = every[np.isfinite(every)].max(), every[every > 0].min() / (1 if f["noise"] else 2)
        if ends != (bound["largest"], bound["absolute"]):
            yield f"the largest number and half a step of the smallest are {ends}, other ones are claimed"
    if "range" in f:
        yield from wrong_octaves(f)


def wrong_octaves(f: dict[str, Any]) -> Iterator[str]:
    """Check blocks that span as much as is claimed, wherever their largest lies, and blocks that span a little more."""
    r, limit = f["range"], f["bound"]["value"] + f["bound"]["slack"]
    top = np.sqrt(numbers(r["tops"]))
    worst = {}
    for name in ("near", "wide"):
        bottom = np.sqrt(numbers(r[name]["bottoms"]))
        worst[name] = max(float((np.abs(numbers(x) - bottom) / bottom).max()) for x in r[name]["reads"])
        if name == "near" and not np.allclose(np.log2(top / bottom), r["octaves"], atol=1e-5):
            yield f"{r['octaves']} octaves are claimed, {np.log2(top / bottom).max():.6g} are shown"
    under = min(float(np.log2(top / numbers(x)).min()) for x in r["deep"]["reads"])
    if not under - 0.65 <= r["below"] <= under:
        yield f"what lies deep reads as {under:.6g} octaves under the largest at most, {r['below']} are claimed"
    if worst["near"] > limit or worst["wide"] <= limit:
        yield f"blocks of {r['octaves']} octaves are off by {worst['near']:.6g}, wider ones by {worst['wide']:.6g}"


# -- averages


def settled(share: float, new: float) -> float:
    """Return the fixed point of e -> share * e + new: 2^64 steps of it, by doubling."""
    if share >= 1:
        return math.inf
    for _ in range(64):
        share, new = share * share, share * new + new
    return new


def wrong_steady(f: dict[str, Any], s: dict[str, Any]) -> Iterator[str]:
    """Check one decay: the claim against the recursion of errors, and against every cell of the tables."""
    bound, decay = f["bound"], s["decay"]
    error, size = bound["value"] + bound["slack"], abs(s["decay"])
    factor = bound["of"] in ("value", "root")
    if factor:
        error = (1 + error) ** 2 - 1 if bound["of"] == "root" else error
        if decay < 0:
            more = settled(size * (1 + error), error)
            low, high = 1 - more, 1 + more
        else:
            low = max(0.0, settled(decay * (1 - error), (1 - decay) * (1 - error)))
            high = settled(decay * (1 + error), (1 - decay) * (1 + error))
    else:
        high = settled(math.sqrt(size) if f["rooted"] else size, error)
        low = -high
    if not (math.isclose(s["low"], low, rel_tol=1e-9) and math.isclose(s["high"], high, rel_tol=1e-9)):
        yield f"under a decay of {decay} {s['low']:.6g} to {s['high']:.6g} is claimed, {low:.6g} to {high:.6g} is found"
    if f["noise"]:
        narrow = math.sqrt(settled(decay * decay, error * error / 6))
        spread = min(narrow, math.sqrt(error / 2)) if factor else narrow
        if s["rms"] is None or not math.isclose(s["rms"], spread, rel_tol=1e-9):
            yield f"under a decay of {decay} a spread of {s['rms']} is claimed, {spread:.6g} is found"
    elif s["rms"] is not None:
        yield "a spread is claimed of rounding to nearest"
    if decay > 0 and bound["value"]:
        yield from stuck_beyond(f, s, factor)


def stuck_beyond(f: dict[str, Any], s: dict[str, Any], factor: bool) -> Iterator[str]:
    """Check each code, kept for ever by the inputs at the ends of those that keep it: how far is the true average?"""
    decay = s["decay"]
    for line in f["lines"]:
        if not line["main"]:
            continue
        for table in line["tables"]:
            cells = cells_of(f, line, table)
            power, low, high = 2 if f["rooted"] else 1, s["low"] * (1 - 1e-9), s["high"] * (1 + 1e-9)
            kept = cells.reads**power
            for end in (cells.first, cells.last):
                true = (end**power - decay * kept) / (1 - decay)
                if factor:
                    with np.errstate(divide="ignore"):
                        share = np.where(true > 0, kept / true, math.inf)
                elif f["rooted"]:
                    share = cells.reads - np.sqrt(np.maximum(true, 0))
                else:
                    share = kept - true
                if not ((low <= share) & (share <= high)).all():
                    yield f"under a decay of {decay} a code stays, off by {share.min():.6g} to {share.max():.6g}"


# -- weights


def wrong_weight(w: dict[str, Any]) -> Iterator[str]:
    bound, largest = w["bound"], 0.0
    total = bound["value"] + bound["slack"]
    for line in w["lines"]:
        p = np.arange(line["first"], line["last"] + 1)
        x = f32_of(p).astype(np.float64)
        for word, runs in enumerate(line["reads"]):
            kept = f32_of(unrolled(runs))
            law = WEIGHTS[w["law"]](p, word * ((1 << w["noise"]) - 1) if w["noise"] else None, w)
            off = np.flatnonzero(pattern_of(kept) != pattern_of(law))
            if len(off):
                yield f"{x[off[0]]!r} reads as {float(kept[off[0]])!r}, not {float(law[off[0]])!r}"
            error, counted = np.abs(kept.astype(np.float64) - x), x <= bound["largest"]
            if not (error <= np.maximum(total * x, bound["absolute"]))[counted].all():
                yield f"an error beyond {total:.6g} of a weight, or {bound['absolute']:.6g}"
            if 0.5 < x[0] < 2:
                largest = max(largest, float((error / x).max()))
    if not math.isclose(largest, bound["value"], rel_tol=1e-2, abs_tol=1e-12) or largest > total:
        yield f"the bound without its slack is {bound['value']:.6g}, the largest error {largest:.6g}"


def bf16(p: Array, noise: int | None = None) -> Array:
    """Return the pattern of f32 of p rounded to bf16: half to even, or with noise of 16 bits."""
    return (p + (0x7FFF + ((p >> 16) & 1) if noise is None else noise)) >> 16 << 16


def lost_by(p: Array) -> tuple[Array, Array]:
    """Return p as bf16, in f32, and what that lost: nothing where it became an infinity."""
    weight = f32_of(bf16(p))
    return weight, np.where(np.isfinite(weight), f32_of(p) - np.where(np.isfinite(weight), weight, F32(0)), F32(0))


def ecc8(p: Array, noise: int | None, w: dict[str, Any]) -> Array:
    """Add the loss in 1/127 of half a place of the weight."""
    weight, lost = lost_by(p)
    half = np.ldexp(1.0, np.maximum(bf16(p) >> 23, 1) - 135)
    units = np.clip(lost / half, -1, 1).astype(F32) * F32(127)
    code = np.sign(units) * np.floor(np.abs(units) + F32(0.5))
    return weight + ((code / F32(127)) * half).astype(F32)


WEIGHTS: dict[str, Callable[[Array, int | None, dict[str, Any]], Array]] = {
    "Native": lambda p, noise, w: f32_of(bf16(p, noise)),
    "Copy": lambda p, noise, w: f32_of(p),
    "Split": lambda p, noise, w: f32_of(p if w["bits"] == 16 else (p + (0x80 if noise is None else noise)) >> 8 << 8),
    "Ecc8": ecc8,
}  # fmt: skip


def wrong_format(f: dict[str, Any], scales: dict[str, Any]) -> Iterator[str]:
    if not 0 < f["bound"]["value"] < math.inf:  # exact, or nothing is claimed of an element
        return
    yield from wrong_lines(f)
    yield from wrong_range(f, scales)
    for s in f["steady"]:
        yield from wrong_steady(f, s)


def problems(claims: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong, each with the name of what it is about."""
    for name, s in claims["scales"].items():
        yield from (f"scale {name}: {found}" for found in wrong_scales(s))
    for f in claims["formats"]:
        yield from (f"{f['name']}: {found}" for found in wrong_format(f, claims["scales"]))
    for w in claims["weights"]:
        yield from (f"{w['name']}: {found}" for found in wrong_weight(w))


def main() -> int:
    claims = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = list(dict.fromkeys(problems(claims)))
    print("\n".join(found) or f"{len(claims['formats'])} formats and {len(claims['weights'])} weights are as claimed")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
