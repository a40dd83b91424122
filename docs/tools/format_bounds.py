"""The tables of docs/benchmarks/bounds.md: every bound that is claimed of a format, beside what the format does.

    python -m docs.tools.format_bounds            writes them between their marks
    python -m docs.tools.format_bounds --check    says whether they are current

Three numbers for each format, all from its own `encode` and `decode`: the derived bound (optgen.verify.bounds), the
exact supremum over all fp32 inputs of a block under one scale (tools/certificate.py), and the largest error of
random blocks of all magnitudes within the bound's range.  The last two are parts of the bound: never above 1.
Formats are those of the plans in specs/plans.py, and families of companders and widths.  The seeds are fixed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.claims import WIDTHS, families, shipped
from tools.prose import filled, table

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "benchmarks" / "bounds.md"
BEGIN, END = "<!-- bounds: docs/tools/format_bounds.py -->", "<!-- end of bounds -->"
BLOCKS = 600


@dataclass(frozen=True)
class Row:
    """A format's bound; suprema and fuzzed errors as parts of bound + slack; None: there is no such check of it."""

    what: str
    plans: tuple[str, ...]
    bound: float
    of: str
    valid: str
    supremum: float | None
    fuzzed: float | None


LOWEST, HIGHEST, SPAN = -30.0, 50.0, 24.0
"""The largest of a random block is between 2^LOWEST and 2^HIGHEST, or what the format's scale can follow of it; the
block spans up to so many octaves, or what the format's bound allows."""


def random_blocks(fmt: Any, octaves: float, seed: int) -> Tensor:
    """Return (BLOCKS, 1, size) fp32 of blocks that span up to so many octaves.

    Values crowd at the ends of the span, where cells are widest and ranges end, and are uniform between.
    """
    random = torch.Generator().manual_seed(seed)
    size = max(fmt.block, 16)
    place = torch.rand(BLOCKS, 1, size, generator=random, dtype=torch.float64)
    sharp = torch.tensor([0.0, 1.0, 0.02])[torch.randint(3, (BLOCKS, 1, 1), generator=random)].double()
    place = torch.where(sharp > 0, place ** sharp.clamp(min=0.02), place)
    span = octaves * torch.rand(BLOCKS, 1, 1, generator=random, dtype=torch.float64)
    scale = getattr(fmt, "scale", None)
    low, high = (LOWEST, HIGHEST) if scale is None else (math.log2(scale.low), math.log2(scale.high))
    low, high = max(low, LOWEST), min(high, HIGHEST)
    top = low + (high - low) * torch.rand(BLOCKS, 1, 1, generator=random, dtype=torch.float64)
    x = torch.exp2(top - span * (1 - place))
    x[:, :, 0], x[:, :, 1] = torch.exp2(top)[:, :, 0], torch.exp2(top - span)[:, :, 0]
    if fmt.signed:
        x = x * (torch.randint(2, x.shape, generator=random) * 2 - 1)
        x[: BLOCKS // 8, :, 2::3] = 0.0
    return x.float()


def noise_of(fmt: Any, shape: Sequence[int], seed: int) -> Any:
    """Return random words, one in four of them the least or the greatest."""
    from optgen.formats import Noise

    if not fmt.noise_bits:
        return None
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, tuple(shape), generator=random, dtype=torch.int64)
    words[::8], words[4::8] = 0, -1
    return Noise(words.to(torch.int32), 32 - fmt.noise_bits, fmt.noise_bits)


def fuzzed(fmt: Any, seed: int = 0) -> float:
    """Return the largest error of random blocks, in parts of bound + slack.

    TypeError for a format whose bound is a multiple of something that is not kept under a name known here.
    """
    from optgen.formats import LogMinMax
    from optgen.verify.bounds import one_step_bound

    bound = one_step_bound(fmt)
    rooted = fmt.of == "sqrt"
    octaves = SPAN
    if isinstance(fmt, LogMinMax):
        octaves = min(octaves, fmt.span(fmt.most)[0])
    x = random_blocks(fmt, octaves, seed)
    if getattr(fmt, "matrix", None) is not None:
        x = x.view(BLOCKS // 8, 8, -1)
    value = (x.double() ** 2).float() if rooted else x
    root = torch.ones(()) if fmt.relative else None
    parts = fmt.encode(value, noise=noise_of(fmt, x.shape, seed + 1), root=root)
    number = value.double().sqrt() if rooted else x.double()
    kept = (fmt.decode_root(parts) if rooted else fmt.decode(parts, root=root)).double()
    if bound.of in ("value", "root"):
        unit = number.abs()
    elif bound.of in ("scale", "scale * root") and "scale" in parts:
        read = getattr(fmt, "scale", None)
        unit = (parts["scale"] if read is None else read.decode(parts["scale"])).double().expand(x.shape)
    elif bound.of in ("largest", "largest * root") and "scale" in parts:
        unit = fmt.largest * fmt.scale.decode(parts["scale"]).double().expand(x.shape)
    elif bound.of == "scale" and {"row", "col"} <= parts.keys():
        unit = torch.minimum(parts["row"], parts["col"]).double().expand(x.shape)
    else:
        raise TypeError(f"{fmt}: a bound of so many {bound.of}: say here how large that is")
    live = number != 0
    return float((((kept - number).abs() / unit)[live] / bound.total).max()) if bound.total else 0.0


def of_format(fmt: Any, plans: tuple[str, ...] = ()) -> Row:
    from optgen.verify.bounds import one_step_bound
    from tools.certificate import certify

    bound = one_step_bound(fmt)
    if math.isinf(bound.value):  # what is kept are sums of elements, and no element by itself
        return Row(str(fmt), plans, bound.value, bound.of, bound.valid, None, None)
    supremum = certify(fmt).supremum / bound.total if bound.total else 0.0
    return Row(str(fmt), plans, bound.value, bound.of, bound.valid, supremum, fuzzed(fmt))


def of_master(master: Any, param: Any, plans: tuple[str, ...]) -> Row:
    """Return a weight's row, fuzzed over all exponents in its range."""
    from optgen.formats import Noise
    from optgen.verify.bounds import master_bound

    bound = master_bound(master, param)
    random = torch.Generator().manual_seed(5)
    low, high = (-100, 100) if param.name == "bf16" else (-13, 15)
    x = torch.exp2(low + (high - low) * torch.rand(1 << 16, generator=random, dtype=torch.float64))
    x[::2] = torch.exp2(torch.randint(low + 1, high, (1 << 15,), generator=random).double()) * (1 + 2.0**-24)
    x = x.float()
    noise = None
    if master.noise_bits(param):
        words = torch.randint(-(2**31), 2**31, x.shape, generator=random, dtype=torch.int64)
        words[::8], words[4::8] = 0, -1
        noise = Noise(words.to(torch.int32), 0, master.noise_bits(param))
    kept = master.decode(master.encode(x, param, noise=noise), param).double()
    error = ((kept - x.double()).abs() / x.double()).max()
    return Row(
        master.describe(param), plans, bound.value, bound.of, bound.valid, None,
        float(error) / bound.total if bound.total else float(error),
    )  # fmt: skip


@lru_cache(maxsize=1)
def rows() -> tuple[list[Row], list[Row]]:
    from optgen.ops import dtypes

    states, weights = shipped()
    of_weights = [of_master(m, dtypes.bf16, tuple(names)) for m, names in weights.items()]
    return [of_format(fmt, tuple(names)) for fmt, names in states.items()], of_weights


def number(x: float) -> str:
    return "0" if x == 0 else "none" if math.isinf(x) else f"{x:.3g}"


def text() -> str:
    """Return the text between the marks."""
    states, weights = rows()
    lines = [
        "*Bound*: the largest error of storing a value once, in parts of what the next column says. *Supremum*: what",
        "the format does at worst, over all fp32 inputs; *random blocks*: the largest error found among "
        f"{BLOCKS} blocks within the bound's range; both in parts of the bound with its allowance for fp32 arithmetic.",
        "Suprema of weights are tested over whole binades (`tests/test_split_exhaustive.py`).", "",
    ]  # fmt: skip
    cells = []
    for row in (*states, *weights):
        supremum = "-" if math.isinf(row.bound) else "" if row.supremum is None else f"{row.supremum:.4f}"
        found = f"{row.fuzzed:.3f}" if row.fuzzed is not None else "-"
        plans = ", ".join(f"`{p}`" for p in row.plans)
        cells.append((row.what, plans, number(row.bound), row.of, supremum, found))
    lines += table(("format", "plans", "bound", "of the", "supremum", "random blocks"), cells, (0, 1, 3))
    ranges = dict.fromkeys((row.what, row.valid) for row in (*states, *weights))
    lines += ["", "Ranges in which they hold:", ""]
    lines += [f"- {what}: {valid}" for what, valid in ranges]
    lines += ["", "Families, by the bits of a code: bound (random blocks in parts of it).", ""]
    of_families = []
    for curve, rounding, formats in families():
        made = [of_format(fmt) for fmt in formats]
        widths = [f"{number(r.bound)} ({r.fuzzed:.2f})" for r in made] + [""] * (len(WIDTHS) - len(made))
        suprema = [r.supremum for r in made if r.supremum is not None]
        of_families.append((curve, rounding, *widths, f"{min(suprema):.4f} to {max(suprema):.4f}"))
    head = ("curve", "rounding", *(f"{b} bits" for b in WIDTHS), "supremum")
    lines += table(head, of_families, (0, 1))
    return filled("\n".join(lines))


def between(document: str, inside: str, first: str = BEGIN, last: str = END) -> str:
    """Return the document with this text between its marks; SystemExit where it has none."""
    before, mark, rest = document.partition(first)
    _, end, after = rest.partition(last)
    if not mark or not end:
        raise SystemExit(f"expected the lines {first!r} and {last!r} in the document")
    return f"{before}{first}\n{inside}\n{last}{after}"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the tables are not current")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    old = DOCUMENT.read_text(encoding="utf-8")
    new = between(old, text())
    if asked.check:
        return int(new != old)
    DOCUMENT.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
