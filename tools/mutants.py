"""Score the daily tests by mutants: small changes of the compiler and of a step, of which tests/mutants.json has 200.

    python -m tools.mutants --minutes 30      # test those that were not tested or noticed yet, room by room
    python -m tools.mutants --draw            # draw others for those whose line is gone
    python -m tools.mutants --page            # write docs/benchmarks/mutants.md

Each is put into the module as it is imported, in a process forked from one that has imported torch and Triton: no file
changes, so several may run beside each other, and beside work.  TESTS has the files that cover a room, the cheapest
first, and "texts": the generated texts of RULES, of MORE rules, or of all as tests/test_build.py compares them.  A
mutant is noticed by the first test that fails within 60 s of processor time; the page lists those that are not.  The
list has the results, and reasons: one that begins with "equivalent" says why no result can differ, and such a mutant
does not count.  Where a line has moved since, its mutant follows it and is tested again; where it is gone, another of
the room is drawn.  tests/seeded_defects.json has older ones of the same form, with the tests
that noticed them, where their lines are as they were.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.machinery
import json
import linecache
import os
import random
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KEPT, SEEDED = ROOT / "tests" / "mutants.json", ROOT / "tests" / "seeded_defects.json"
PAGE = ROOT / "docs" / "benchmarks" / "mutants.md"
SEED, SECONDS = 20261127, 60
RULES = {
    "texts": ("adamw", "came", "lion"),
    "more texts": tuple("muon soap adafactor prodigy schedule_free_adamw lamb sgd adam_mini psgd_kron".split()),
}
PROGRAMS = "tests/test_programs.py::test_a_program_that_once_failed_is_right"
TESTS: dict[str, tuple[str, ...]] = {
    "passes": (
        "tests/test_passes.py", "texts", "more texts", PROGRAMS, "all texts", "tests/test_sweeps.py",
        "tests/test_spellings.py",
    ),
    "lower": (
        "texts", "more texts", "tests/test_cli.py::test_show", PROGRAMS, "tests/test_sweeps.py",
        "tests/test_untouched.py", "tests/test_noise.py", "all texts", "tests/test_passes.py",
    ),
    "backends": ("texts", "more texts", "tests/test_columns.py", PROGRAMS, "all texts", "tests/test_spellings.py"),
    "formats": (
        "texts", "tests/test_lint.py", "tests/test_plans.py",
        f"{PROGRAMS}[root_of_a_curved_code]", "tests/test_format_bounds.py", "more texts", "all texts",
        "tests/test_formats.py::"
        "test_no_element_of_8_bits_is_thought_to_be_raised_within_the_span_of_its_codes",
        "tests/test_intervals.py::test_adamw_keeps_to_its_composed_bound[int8_split24-dtype3]",
        "tests/test_master_weights.py",
    ),
    "runtime/step": (
        PROGRAMS, "tests/test_groups.py::test_steps_counted_on_the_device_ask_as_much_for_many_groups",
        "tests/test_step_contract.py", "tests/test_runtime.py", "tests/test_replay_triton.py",
        "tests/test_matrices.py::test_a_stack_is_told_from_a_convolution",
        "tests/test_capturable.py::test_counts_that_something_else_has_changed_are_followed",
        "tests/test_torch_contract.py::test_a_momentum_that_begins_or_ends_after_a_step_is_refused",
        "tests/test_whole_model.py::"
        "test_groups_that_would_begin_a_state_of_the_model_with_different_numbers_are_refused",
        "tests/test_loading.py::test_tables_are_kept_from_step_to_step_while_nothing_moves",
        "tests/test_sharding.py::test_whatever_changes_between_steps_over_parts_is_seen",
        "tests/test_names.py::"
        "test_positions_that_move_are_refused_where_plans_of_single_parameters_go_by_them",
        "tests/test_sharding.py::test_one_gradient_over_another_mesh_is_refused_on_the_short_way_too",
        "tests/test_sharding.py::test_a_rule_that_sums_at_some_steps_agrees_on_gradients_at_every_step",
        "tests/test_native.py", "tests/test_fast_path.py",
    ),
    "runtime/reference": (PROGRAMS, "tests/test_golden.py"),
}  # fmt: skip


_COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "in": "not in"}
_OPERATORS = {"+": "-", "-": "+", "*": "+", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "%": "//", "//": "%"}
_NAMES = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max", "any": "all", "all": "any"}


class Edit(NamedTuple):
    """A change within one line: what is between two columns becomes another text."""

    kind: str
    row: int
    start: int
    end: int
    new: str


def _between(lines: Sequence[str], left: ast.expr, right: ast.expr, table: dict[str, str], kind: str) -> Iterator[Edit]:
    """Exchange the operator that stands between two expressions of one line."""
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    text = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
    found = re.search(r"is not|not in|[<>=!+\-*/&|%]+|\bis\b|\bin\b", text)
    if found and found[0] in table:
        start = left.end_col_offset + found.start()
        yield Edit(kind, right.lineno, start, start + len(found[0]), table[found[0]])


def _edits_of(node: ast.AST, lines: Sequence[str]) -> Iterator[Edit]:
    """Return the changes that one node of the syntax tree allows."""
    line = lines[node.lineno - 1] if isinstance(node, ast.expr) else ""

    def text(e: ast.expr) -> str:
        return line[e.col_offset : e.end_col_offset]

    if not isinstance(node, ast.expr) or node.lineno != node.end_lineno or node.end_col_offset is None:
        return
    whole = (node.lineno, node.col_offset, node.end_col_offset)
    match node:
        case ast.Compare(left=left, comparators=[right]):
            yield from _between(lines, left, right, _COMPARISONS, "comparison")
        case ast.BinOp(left=left, right=right):
            yield from _between(lines, left, right, _OPERATORS, "operator")
        case ast.Constant(value=value) if type(value) in (int, float):
            yield Edit("constant", *whole, repr(value + 1))
        case ast.BoolOp(values=values):
            rest = [text(v) for v in values[:-1]]
            yield Edit("condition dropped", *whole, (" and " if isinstance(node.op, ast.And) else " or ").join(rest))
        case ast.UnaryOp(op=ast.USub()):
            yield Edit("sign", node.lineno, node.col_offset, node.col_offset + 1, "")
        case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
            yield Edit("function", node.lineno, node.col_offset, node.col_offset + len(name), _NAMES[name])
        case ast.Call(args=[first, second, *rest], keywords=[]):
            if not any(isinstance(a, ast.Starred | ast.Constant) for a in node.args[:2]):
                args = [text(second), text(first), *map(text, rest)]
                yield Edit("arguments swapped", *whole, f"{text(node.func)}({', '.join(args)})")


def _skipped(node: ast.AST) -> bool:
    """Return True for messages and assertions."""
    called = getattr(getattr(node, "func", None), "id", "")
    told = isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr)
    return told or called.endswith("Error") or called == "warn"


def functions(text: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield each function with its dotted name; functions within functions belong to the outer one."""

    def visit(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                yield prefix + node.name, node

    yield from visit(ast.parse(text).body, "")


@cache
def _spans(text: str) -> tuple[tuple[str, int, int], ...]:
    """Return (function, its first line, the line after its last) of a file, lines counted from 0."""
    return tuple((name, f.lineno - 1, f.end_lineno) for name, f in functions(text))


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, child in ast.iter_fields(node):
        for n in child if isinstance(child, list) else [child]:
            if isinstance(n, ast.AST) and name not in ("annotation", "returns", "decorator_list") and not _skipped(n):
                yield from _walk(n)


def candidates(path: Path, room: str) -> Iterator[dict[str, Any]]:
    """Yield every mutant that fits a file, as an entry of the list."""
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    for name, function in functions(text):
        body = "\n".join(lines[function.lineno - 1 : function.end_lineno])
        for node in _walk(function):
            for kind, row, start, end, new in _edits_of(node, lines):
                before = lines[row - 1]
                after = before[:start] + new + before[end:]
                if before.isascii() and body.count(before) == 1 and after != before:
                    place = {"file": str(path.relative_to(ROOT)), "function": name, "kind": kind}
                    yield {"room": room, **place, "before": before.strip(), "after": after.strip()}


def changed(defect: dict[str, Any]) -> tuple[Path, str, str] | None:
    """Return (file, its text, its text with the defect), or None where the line is gone or is there several times."""
    first = ROOT / defect["file"]
    name, places = defect["function"], []
    for path in [p for p in (first, *sorted((ROOT / "optgen").rglob("*.py"))) if p.is_file()]:
        text = path.read_text(encoding="utf-8")
        if (name.split(".")[-1] or "\n") not in text or defect["before"] not in text:
            continue
        lines = text.split("\n")
        spans = [(a, b) for n, a, b in _spans(text) if n == name] if name else [(0, len(lines))]
        places = [(path, i) for a, b in spans for i in range(a, b) if lines[i].strip() == defect["before"]]
        if places:
            break
    if len(places) != 1:
        return None
    path, at = places[0]
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    after = "\n".join([*lines[:at], indent + defect["after"], *lines[at + 1 :]])
    return path, text, after


def redrawn(mutants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mutants, with others of lines that have none in the place of those whose line is gone."""
    choice, out = random.Random(SEED), list(mutants)
    for k, m in enumerate(out):
        while changed(out[k]) is None:
            taken = {tuple(x[name] for name in ("file", "function", "before")) for x in out}
            files = sorted((ROOT / "optgen" / m["room"]).rglob("*.py"))
            fitting = (c for path in files for c in candidates(path, m["room"]))
            out[k] = choice.choice([c for c in fitting if (c["file"], c["function"], c["before"]) not in taken])
    return out


def key(mutant: dict[str, Any]) -> str:
    return f"{mutant['file']} {mutant['function']}: {mutant['before']}  ->  {mutant['after']}"


def put_in(mutant: dict[str, Any]) -> bool:
    """Have the import of its module find the changed text; False where the line is gone."""
    if (found := changed(mutant)) is None:
        return False
    path, _, text = found
    plain = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, name: str) -> Any:
        return compile(text, self.path, "exec") if Path(self.path) == path else plain(self, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    return True


def texts(rules: tuple[str, ...] = ()) -> str:
    """Return whether the generated texts of these rules, or of all, would be others."""
    from optgen.driver.build import HASHES, hash_jobs
    from optgen.driver.project import read_config

    jobs = hash_jobs(read_config(ROOT), ROOT)
    made = {f"{name} {text}" for name in rules or jobs for text in jobs[name]().values()}
    known = (ROOT / "generated" / HASHES).read_text(encoding="utf-8").splitlines()
    return "" if made.issubset(known) else "tests/test_build.py: generated texts"


def tested(step: str) -> str:
    """Return the first test of a file that fails, "" for none."""
    import pytest

    class Failed:
        name = ""

        def pytest_runtest_logreport(self, report: Any) -> None:
            self.name = self.name or (report.nodeid if report.failed else "")

    seen = Failed()
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not full and not ranks"]
    code = pytest.main([*options, step], plugins=[seen])
    return seen.name or ("" if code == 0 else f"{step}: exit status {int(code)}")


def verdict(mutant: dict[str, Any] | None, room: str) -> dict[str, Any]:
    """Test a mutant, or the code as it is, in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sink = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(sink, stream)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
            os.chdir(ROOT)
            there, found = mutant is None or put_in(mutant), ""
            for step in TESTS[room] if there else ():
                try:
                    found = tested(step) if not step.endswith("texts") else texts(RULES.get(step, ()))
                except BaseException as error:
                    found = f"{step}: {type(error).__name__}: {error}"[:200]
                if found:
                    break
            os.write(write, json.dumps({"noticed": found} if there else {"gone": True}).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        said = stream.read()
    _, status, used = os.wait4(child, 0)
    made = json.loads(said) if said else {"noticed": f"the process ended with status {status}"}
    if not said and status in (signal.SIGXCPU, signal.SIGKILL):
        made = {"noticed": "", "out of time": True}
    return {**made, "seconds": round(used.ru_utime + used.ru_stime, 1)}


def page(results: dict[str, Any], mutants: list[dict[str, Any]]) -> str:
    """Return docs/benchmarks/mutants.md."""
    lines = ["# Mutants", "", " ".join((__doc__ or "").split("\n\n")[2].split()), ""]
    lines += ["| room | drawn | tested | equivalent | noticed | of the others |", "|---|--:|--:|--:|--:|--:|"]
    rooms: dict[str, list[Any]] = {room: [] for room in TESTS}
    for m in mutants:
        if (result := results.get(key(m))) and not result.get("gone"):
            rooms[m["room"]].append((m, result))
    every = [x for found in rooms.values() for x in found]
    for room, found in [*rooms.items(), ("all", every)]:
        noticed, count = sum(bool(r["noticed"]) for _, r in found), sum(room in ("all", m["room"]) for m in mutants)
        same = sum(r.get("reason", "").startswith("equivalent") for _, r in found if not r["noticed"])
        share = f"{noticed / (len(found) - same):.0%}" if found else ""
        lines.append(f"| {room} | {count} | {len(found)} | {same} | {noticed} | {share} |")
    lines += ["", "## Not noticed", "", "| where | line | mutant | |", "|---|---|---|---|"]
    for m, result in every:
        if not result["noticed"]:
            where = f"`{m['file'].removeprefix('optgen/')}` {m['function']}"
            late = " (out of time)" if result.get("out of time") else ""
            before, after = (m[k].replace("|", "\\|") for k in ("before", "after"))
            lines.append(f"| {where}{late} | `{before}` | `{after}` | {result.get('reason', '')} |")
    by = Counter(r["noticed"].partition(":")[0] for _, r in every if r["noticed"])
    lines += ["", "Noticed by " + ", ".join(f"{name} ({n})" for name, n in by.most_common()) + "."]
    return "\n".join(lines) + "\n"


def keep(results: dict[str, Any], mutants: list[dict[str, Any]]) -> None:
    rows = [json.dumps({"mutant": m, **results.get(key(m), {})}) for m in mutants]
    KEPT.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    kept = json.loads(KEPT.read_text())
    mutants, results = [x.pop("mutant") for x in kept], {}
    results = {key(m): x for m, x in zip(mutants, kept, strict=True) if x}
    if asked.draw:
        mutants = redrawn(mutants)
        keep(results, mutants)
    if asked.page:
        PAGE.write_text(page(results, mutants), encoding="utf-8")
    if not asked.minutes:
        return 0
    os.environ |= {"TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
    sys.dont_write_bytecode = True
    for heavy in ("numpy", "torch", "sympy", "triton", "hypothesis", "pytest"):
        importlib.import_module(heavy)

    end, plain = time.monotonic() + 60 * asked.minutes, dict[str, Any]()
    for mutant in sorted(mutants, key=lambda m: key(m) in results):  # those that were tested already come last
        before = results.get(key(mutant), {})
        if before.get("noticed") or before.get("gone") or time.monotonic() > end:
            continue
        room = mutant["room"]
        if room not in plain:
            plain[room] = verdict(None, room)
            print(f"{room} as it is: {plain[room]}", flush=True)
        reason = {k: before[k] for k in ("reason",) if k in before}
        results[key(mutant)] = verdict(mutant, room) | reason
        print(key(mutant), results[key(mutant)], flush=True)
        keep(results, mutants)
    return 0


if __name__ == "__main__":
    sys.exit(main())
