"""Run suites, record what passes and why the rest does not, and write the table of docs/evidence.md.

    python -m tests.others DIR [NAME ...]   those whose checkouts are in DIR; NAME: a package or `package:suite`
    python -m tests.others --page           write the table again

Exits with 1 if a test fails or is skipped that no reason of its suite explains, if a reason explains none, or if a file
of tests is neither run nor among the package's FILES_LEFT_OUT.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.others import Suite
from tools import prose

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORD, PAGE = ROOT / "docs" / "benchmarks" / "others.json", ROOT / "docs" / "evidence.md"
REASONS = RECORD.with_suffix(".md")
PACKAGES = {p.stem: f"tests.others.{p.stem}" for p in HERE.glob("*.py") if p.stem != "plugin" and p.stem[0] != "_"}
FILES = "files left out"
"""The entry of a package's record that has reasons and numbers of files."""
BEGIN, END = "<!-- python -m tests.others --page -->\n", "<!-- end -->\n"


def outcomes_of(module: str, suite: Suite, checkout: Path) -> dict[str, str]:
    """Run a suite in a process of its own, over a copy of its files, and return test -> outcome."""
    with TemporaryDirectory() as kept:
        copy, found = Path(kept) / "suite", Path(kept) / "outcomes.json"
        shutil.copytree(checkout / suite.folder, copy)
        for path in copy.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for pattern, new in suite.rewrites.items():
                text = re.sub(pattern, new, text)
            path.write_text(text, encoding="utf-8")
        environ = {"OPTGEN_BACKEND": "reference", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | {
            **os.environ,
            **suite.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "OPTGEN_OTHERS_MODULE": module,
            "OPTGEN_OTHERS_SUITE": suite.name,
            "OPTGEN_OTHERS_OUTCOMES": str(found),
            "OPTGEN_OTHERS_CHECKOUT": str(checkout),
        }
        options = ["-q", "--tb=line", "-p", "tests.others.plugin", "-p", "no:cacheprovider", f"--rootdir={copy}"]
        command = [sys.executable, "-m", "pytest", *options, *suite.files]
        each = [environ | {"OPTGEN_OTHERS_RANK": str(rank)} for rank in range(suite.ranks)]
        processes = [subprocess.Popen(command, cwd=copy, env=environ) for environ in each]
        outcomes: dict[str, str] = {}
        for rank, process in enumerate(processes):
            code, path = process.wait(), Path(f"{found}.{rank}")
            if not path.exists():
                sys.exit(f"{module}, {suite.name}: pytest ended with {code} before it had run the tests")
            of_rank = json.loads(path.read_text(encoding="utf-8"))
            outcomes |= {test: outcome for test, outcome in of_rank.items() if outcomes.get(test) != "failed"}
        return outcomes


def judge(suite: Suite, outcomes: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the entry of the record, and what is wrong: tests without a reason, reasons without a test."""
    kinds: Counter[str] = Counter()
    wrong = [] if outcomes else ["no test was found"]
    for test, outcome in outcomes.items():
        reasons = {"passed": None, "left out": suite.left_out, "failed": suite.failing}.get(outcome, {})
        pattern = next((pattern for pattern in reasons or () if re.search(pattern, test)), None)
        if pattern:
            kinds[pattern] += 1
        elif reasons is not None:
            wrong.append(f"{test}: {outcome}, and no reason is given")
    reasons = {**suite.failing, **suite.left_out}
    wrong += [f"{pattern!r} explains no test" for pattern in reasons if pattern not in kinds]
    counts = Counter("left out" if outcome == "skipped" else outcome for outcome in outcomes.values())
    entry: dict[str, Any] = {outcome: counts[outcome] for outcome in ("passed", "failed", "left out")}
    entry["kinds"] = [[pattern, kinds[pattern], reasons[pattern]] for pattern in reasons if pattern in kinds]
    return entry, wrong


def files_left_out(module: Any, checkout: Path) -> tuple[list[list[Any]], list[str]]:
    """Return [reason, files] of files of tests that no suite runs, and what is wrong: files that have no reason."""
    run = {name for suite in module.SUITES for name in suite.files}
    named = {name: reason for reason, names in module.FILES_LEFT_OUT.items() for name in names.split()}
    folders = [checkout / folder for folder in sorted({suite.folder for suite in module.SUITES})]
    there = {path.relative_to(folder).as_posix() for folder in folders for path in folder.rglob("test_*.py")}
    wrong = [f"{name} is not run, and FILES_LEFT_OUT has no reason" for name in sorted(there - run - named.keys())]
    wrong += [f"{name} of FILES_LEFT_OUT is run" for name in sorted(named.keys() & run)]
    wrong += [f"{name} of FILES_LEFT_OUT is not there" for name in sorted(named.keys() - there)]
    return [[reason, sum(named.get(name) == reason for name in there)] for reason in module.FILES_LEFT_OUT], wrong


def chosen(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Suite]]:
    """Yield (package, suite) of the names; without any, of all packages with a checkout."""
    for name in names or [package for package in PACKAGES if (folder / package).is_dir()]:
        package, _, suite = name.partition(":")
        if package not in PACKAGES or not (folder / package).is_dir():
            sys.exit(f"no checkout {folder / package}, or no tests of {package}; there are {', '.join(PACKAGES)}")
        found = [s for s in importlib.import_module(PACKAGES[package]).SUITES if suite in ("", s.name)]
        if not found:
            sys.exit(f"{package} has no suite {suite!r}")
        yield from ((package, suite) for suite in found)


def record(package: str, name: str, entry: Any) -> None:
    kept = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    kept.setdefault(package, {})[name] = entry
    RECORD.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def run(folder: Path, names: Sequence[str]) -> list[str]:
    """Run suites, put their entries into the record as they come, and return what is wrong."""
    found: list[str] = []
    suites = list(chosen(folder, names))
    if not suites:
        sys.exit(f"{folder} has no checkout of {', '.join(PACKAGES)}; tests/others/__init__.py says how to get them")
    for package in dict.fromkeys(package for package, _ in suites):
        files, wrong = files_left_out(importlib.import_module(PACKAGES[package]), folder / package)
        found += [f"{package}: {problem}" for problem in wrong]
        record(package, FILES, files)
    for package, suite in suites:
        checkout = folder / package
        entry, wrong = judge(suite, outcomes_of(PACKAGES[package], suite, checkout))
        found += [f"{package}, {suite.name}: {problem}" for problem in wrong]
        at = subprocess.run(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        record(package, suite.name, {"commit": at.stdout.strip() or "unknown", **entry})
    return found


def tables(kept: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the lines of the counts of a package under each plan, and those of the reasons."""
    outcomes = ("passed", "failed", "left out")
    counts: dict[tuple[str, str], Counter[str]] = {}
    reasons: Counter[tuple[str, str]] = Counter()
    for package, suites in kept.items():
        for name, entry in suites.items():
            if name == FILES:
                continue
            row = counts.setdefault((f"{package} {entry['commit']}", f"`{name.partition(',')[0]}`"), Counter())
            row.update({outcome: entry[outcome] for outcome in outcomes})
            for _, count, reason in entry["kinds"]:
                reasons[package, reason] += count
    rows = ((*who, *(f"{row[outcome]:,}" for outcome in outcomes)) for who, row in counts.items())
    tests = ((*key, f"{count:,}") for key, count in reasons.items())
    files = ((package, reason, str(count)) for package, suites in kept.items() for reason, count in suites[FILES])
    return prose.table(("tests of", "plan", *outcomes), rows, (0, 1)), [
        "# Other packages' tests: reasons",
        "",
        "Of tests that fail or are left out on optgen's classes, as `python -m tests.others DIR --page` found it.",
        "",
        *prose.table(("package", "reason", "tests"), tests, (0, 1)),
        "",
        "Of files of tests of which none is run; `FILES_LEFT_OUT` of the modules in `tests/others` has their names.",
        "",
        *prose.table(("package", "reason", "files"), files, (0, 1)),
        "",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.others", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--page", action="store_true", help="write the table of docs/evidence.md")
    given = parser.parse_args(arguments)
    if not given.folder and not given.page:
        parser.error("give DIR, --page or both")
    wrong = run(given.folder.resolve(), given.names) if given.folder else []
    if given.page:
        text = PAGE.read_text(encoding="utf-8")
        head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
        counts, reasons = map("\n".join, tables(json.loads(RECORD.read_text(encoding="utf-8"))))
        PAGE.write_text(f"{head}{BEGIN}\n{counts}\n\n{END}{tail}", encoding="utf-8")
        REASONS.write_text(reasons, encoding="utf-8")
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
