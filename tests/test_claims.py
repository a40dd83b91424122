"""The claims about formats hold in a program that knows nothing of the compiler, and wrong ones are noticed."""

import ast
import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from optgen.formats import Float, Format, LogMinMax, Noise
from optgen.ops.dtypes import bf16
from optgen.verify.bounds import steady_state
from tools import check_claims as checker
from tools import claims as written

Data = dict[str, Any]
CHECKER = Path(checker.__file__)


@pytest.fixture(scope="module")
def claims() -> Data:
    made: Data = json.loads(json.dumps(written.claims(every=False)))
    return made


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_all_claims_hold(every: bool, claims: Data, tmp_path: Path) -> None:
    made = written.claims() if every else claims
    assert len(made["formats"]) >= (75 if every else 25) and len(made["weights"]) >= 7
    file = tmp_path / "claims.json"
    file.write_text(json.dumps(made), encoding="utf-8")
    done = subprocess.run([sys.executable, "-I", CHECKER, file], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "are as claimed" in done.stdout, done.stdout


def test_the_checker_is_short_and_independent() -> None:
    text = CHECKER.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 500
    imported: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    assert imported - sys.stdlib_module_names - {"collections.abc"} == {"numpy"}


# -- wrong claims: each changes one thing and says so; what it finds nothing to change in is left alone


def rewritten(runs: list[list[int]], change: Callable[[list[int]], None]) -> None:
    whole = checker.unrolled(runs).tolist()
    change(whole)
    runs[:] = [[x, 0, 1] for x in whole]


def some_tables(f: Data) -> Iterator[Data]:
    """Yield a table of each line: a mistake may be in any."""
    for n, line in enumerate(f["lines"]):
        yield line["tables"][n % len(line["tables"])]


def one_ulp(f: Data) -> Iterator[None]:
    for table in some_tables(f):
        kept = table["reads"]
        for at in (0, -1, len(checker.unrolled(kept)) // 2):
            table["reads"] = copy.deepcopy(kept)
            rewritten(table["reads"], lambda x, at=at: x.__setitem__(at, x[at] + 1))
            yield
        table["reads"] = kept


def swapped_codes(f: Data) -> Iterator[None]:
    for table in some_tables(f):
        for name in ("codes", "reads"):
            kept = table[name]
            table[name] = copy.deepcopy(kept)
            rewritten(table[name], lambda x: x.__setitem__(slice(0, 2), [x[1], x[0]]))
            yield
            table[name] = kept


def moved_cell(f: Data) -> Iterator[None]:
    for table in some_tables(f):
        kept = table["begins"]
        table["begins"] = copy.deepcopy(kept)
        rewritten(table["begins"], lambda x: x.__setitem__(-1, x[-1] - (x[-1] - x[-2]) // 50 - 1))
        yield
        table["begins"] = kept


def missing_code(f: Data) -> Iterator[None]:
    for table in some_tables(f):
        kept = dict(table)
        for name in ("codes", "begins", "reads"):
            whole = checker.unrolled(table[name]).tolist()
            table[name] = [[x, 0, 1] for x in whole[:1] + whole[2:]]
        yield
        table.update(kept)


def scaled(of: Data, name: str, by: float) -> Iterator[None]:
    if of[name] is not None and 0 < abs(of[name]) < math.inf:
        kept, of[name] = of[name], of[name] * by
        yield
        of[name] = kept


def small_bound(f: Data) -> Iterator[None]:
    yield from scaled(f["bound"], "value", 0.99)
    yield from scaled(f, "largest_error", 0.99)


def large_bound(f: Data) -> Iterator[None]:
    yield from scaled(f["bound"], "value", 1.01)


def wrong_range(f: Data) -> Iterator[None]:
    for name in ("octaves", "below") if "range" in f else ():
        yield from scaled(f["range"], name, 1.1)
    if f["law"] == "Float":
        for name in ("largest", "absolute"):
            yield from scaled(f["bound"], name, 0.99)
    elif "range" not in f:
        for name in ("low", "high") if "scale" in f else ("low",):
            yield from scaled(f["bound"], name, 1.01)
        yield from scaled(f["bound"], "excess", 0.9)


def wrong_steady(f: Data) -> Iterator[None]:
    for s in f["steady"]:
        for name in ("low", "high", "rms"):
            yield from scaled(s, name, 1.01)
            yield from scaled(s, name, 0.99)


WRONG = [one_ulp, swapped_codes, moved_cell, missing_code, small_bound, large_bound, wrong_range, wrong_steady]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_claim_about_a_format_is_noticed(claims: Data, wrong: Callable[[Data], Iterator[None]]) -> None:
    tried = 0
    for f in claims["formats"]:
        if not 0 < f["bound"]["value"] < math.inf:
            continue
        f = copy.deepcopy(f)
        for _ in wrong(f):
            tried += 1
            assert next(checker.wrong_format(f, claims["scales"]), None), (f["name"], tried)
        assert next(checker.wrong_format(f, claims["scales"]), None) is None, f["name"]
    assert tried >= 20


def test_a_wrong_claim_about_a_scale_is_noticed(claims: Data) -> None:
    for name, s in claims["scales"].items():
        for part in ("low", "high", "excess"):
            made = copy.deepcopy(s)
            for _ in scaled(made, part, 0.97 if part == "high" else 1.03):
                assert part == "high" and s["high"] > 3e38 or next(checker.wrong_scales(made), None), (name, part)
        made = copy.deepcopy(s)
        wrong = made["tops"][0]["reads"][-2]
        wrong[0] -= 1 << 16  # two steps of 8 bits of a mantissa
        assert next(checker.wrong_scales(made), None), name


def test_a_wrong_claim_about_a_weight_is_noticed(claims: Data) -> None:
    for w in claims["weights"]:
        for line in w["lines"]:
            for kept in line["reads"]:
                kept[len(kept) // 3][0] += 1  # a run of numbers, in most weights the numbers of one code
                assert next(checker.wrong_weight(w), None), w["name"]
                kept[len(kept) // 3][0] -= 1
        for by in (0.97, 1.03):
            for _ in scaled(w["bound"], "value", by):
                assert next(checker.wrong_weight(w), None), w["name"]
        for _ in scaled(w["bound"], "absolute", 0.3):
            assert next(checker.wrong_weight(w), None), w["name"]
        assert next(checker.wrong_weight(w), None) is None


@pytest.mark.parametrize("decay", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("fmt", [Float(bf16, "stochastic"), LogMinMax(8, 64, "stochastic")], ids=["bf16", "blocks"])
def test_averages_of_squares_spread_as_claimed(fmt: Format, decay: float) -> None:
    """Stochastic, in narrow cells and in wide ones: the claim is of the widest, which a block's tiny element makes."""
    draw = torch.Generator().manual_seed(3)
    size = torch.ones(64)
    size[0] = 2.0**-60
    true, kept, spread = size.expand(8, 1, 64).double(), size.expand(8, 1, 64), []
    for t in range(round(12 / (1 - decay))):
        new = torch.randn(true.shape, generator=draw).square() * size
        true = decay * true + (1 - decay) * new.double()
        noise = Noise(torch.randint(1 << fmt.noise_bits, true.shape, generator=draw).int(), 0, fmt.noise_bits)
        kept = fmt.decode(fmt.encode(decay * kept + (1 - decay) * new, noise=noise))
        if t >= 4 / (1 - decay):
            spread.append(((kept - true)[..., 1:].square().mean() / true[..., 1:].square().mean()).item())
    claimed = steady_state(fmt, decay).rms
    assert claimed and 0.5 < math.sqrt(sum(spread) / len(spread)) / claimed < 1.1
