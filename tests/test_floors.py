"""Who may import whom.  Read from the syntax trees: imports inside functions count like all others."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# room -> the optgen rooms it may import beside itself, and what from outside the standard library
_IR = "ir ops base"
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    room: (set(rooms.split()), set(packages.split()))
    for room, rooms, packages in (
        ("base", "", ""),
        ("ops", "base", ""),
        ("ir", "ops base", ""),
        ("lang", f"{_IR} runtime", "sympy torch numpy"),
        ("formats", f"lang {_IR}", "sympy torch numpy"),
        ("passes", f"lang {_IR}", ""),
        ("backends", _IR, "jinja2"),
        ("lower", f"lang formats {_IR} runtime", ""),
        ("verify", f"lower passes backends formats lang {_IR} runtime", "sympy torch numpy"),
        ("driver", f"convert verify lower passes backends formats lang {_IR} runtime",
         "torch triton jinja2"),
        ("convert", "base runtime", "torch torchao"),
        ("runtime", "", "torch triton"),
        ("cast", "runtime", "torch"),
        ("embedding", "runtime", "torch"),
        ("roles", "runtime", "torch"),
        ("widths", "roles runtime", "torch"),
        ("by_name", "base roles runtime widths optim driver", "torch"),
        ("integrations", "by_name optim", "torch"),
        ("accumulate", "driver formats lang", ""),
        ("__main__", "base driver", ""),
        ("optim", "base runtime driver _ready", ""),
        ("_ready", "base runtime driver", ""),
    )
}  # fmt: skip

# room of the runtime, or module of its top floor -> the rooms of the runtime that it may import, beside itself
RUNTIME: dict[str, set[str]] = {
    "records": set(),
    "stale": set(),
    "reference": {"records"},
    "layout": {"records", "reference"},
    "states": {"records", "layout"},
    "options": {"records", "layout", "states"},
    "work": {"records", "reference", "layout", "states", "options"},
    "gpu": {"records", "layout", "work"},
    "cpu": {"records", "layout", "work"},
    "checkpoint": {"records", "layout", "states", "options"},
    "step": {"records", "layout", "states", "options", "work", "gpu", "cpu", "checkpoint"},
    "modes": {"records", "reference", "layout", "states", "options", "work", "step", "checkpoint"},
    "optimizer": {"records", "layout", "states", "options", "work", "step", "checkpoint", "modes"},
    "several": {"records", "layout", "modes", "states", "options", "checkpoint", "optimizer"},
    "sharpness": {"checkpoint", "optimizer"},
    "files": {"records", "layout", "states", "options", "checkpoint", "optimizer", "several"},
    "__init__": {"records", "states", "optimizer"},
}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything a file imports; `from a import b` counts as a.b.

    What stands under `if TYPE_CHECKING:` is never executed, but shows a dependency all the same: it counts.
    """
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    text = path.read_text(encoding="utf-8")
    told = [line if "import" in line else "" for line in text.splitlines()]
    if path.is_relative_to(ROOT / "generated") and all(re.fullmatch(r"(import|from) [^()\\]*|", x) for x in told):
        text = "\n".join(told)  # parsing all that is generated takes 15 s
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str) and not first.value.startswith("."):
                yield node.lineno, first.value


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def files(folder: str) -> list[Path]:
    """The modules of a folder, or the one module of that name."""
    single = ROOT / f"{folder}.py"
    return [single] if single.is_file() else sorted((ROOT / folder).rglob("*.py"))


def test_every_room_has_a_floor() -> None:
    package = ROOT / "optgen"
    rooms = {p.parent.name for p in package.glob("*/*.py")} | {p.stem for p in package.glob("*.py")} - {"__init__"}
    assert rooms <= set(ROOMS), "a new room needs its row in ROOMS"


def test_the_package_itself_imports_nothing() -> None:
    """`import optgen.runtime` runs optgen/__init__.py: what it offers of the compiler, it imports when asked."""
    body = ast.parse((ROOT / "optgen" / "__init__.py").read_text(encoding="utf-8")).body
    names = [a.name for node in body if isinstance(node, ast.Import) for a in node.names]
    names += [node.module or "." for node in body if isinstance(node, ast.ImportFrom) if not node.level]
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in body)
    assert [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names] == []


def assert_one_way(below: Mapping[Any, set[Any]]) -> None:
    """Each is reached after all that it needs."""
    done: set[Any] = set()
    while ready := {one for one, needs in below.items() if one not in done and needs <= done}:
        done |= ready
    assert not below.keys() - done, f"a circle among {sorted(map(str, below.keys() - done))}"


def test_floors_have_no_cycle() -> None:
    assert_one_way({room: rooms for room, (rooms, _) in ROOMS.items()})


FRAMEWORKS = {"torch", "transformers", "accelerate", "lightning", "timm", "torchtitan", "trl", "datasets", "tokenizers"}
READ: dict[str, tuple[set[str], set[str]]] = {
    "specs": ({"lang", "formats"}, {"specs"}),
    "examples": ({"lang", "formats", "optim", "accumulate", "integrations"}, FRAMEWORKS),
    "generated": ({"runtime"}, {"torch", "triton", "generated"}),
}
"""Folders that users read, likewise."""

FOLDERS = {f"optgen/{room}": ({room, *rooms}, packages) for room, (rooms, packages) in ROOMS.items()} | READ


@pytest.mark.parametrize("folder", FOLDERS)
def test_room(folder: str) -> None:
    wrong, (rooms, packages) = [], FOLDERS[folder]
    for path in files(folder):
        for line, name in imports(path):
            top, *room = name.split(".")
            outside = top != "optgen" and top not in sys.stdlib_module_names
            if outside and top not in packages or top == "optgen" and room and room[0] not in rooms:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {folder} must not import {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", sorted(RUNTIME))
def test_room_of_the_runtime(room: str) -> None:
    wrong = []
    for path in files(f"optgen/runtime/{room}"):
        for line, name in imports(path):
            parts = [*name.split("."), ""]
            if parts[:2] == ["optgen", "runtime"] and parts[2] in RUNTIME.keys() - RUNTIME[room] - {room}:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} must not import optgen.runtime.{parts[2]}")
    assert not wrong, "\n".join(wrong)


def test_rooms_of_the_runtime_are_small_and_one_way() -> None:
    folder = ROOT / "optgen" / "runtime"
    assert {path.name for path in folder.iterdir() if path.is_dir() and list(path.glob("*.py"))} | {
        path.stem for path in folder.glob("*.py")
    } == set(RUNTIME)
    sizes = {room.name: len(list(room.glob("*.py"))) for room in folder.iterdir() if room.is_dir()}
    assert max(sizes.values()) <= 12, sizes
    assert_one_way(RUNTIME)


def _imported(path: Path) -> set[Path]:
    """The files of a module's own room that it imports."""
    found = set()
    for _, name in imports(path):
        parts = name.split(".")
        for end in (len(parts), len(parts) - 1):  # the last part may be a name in the module
            module = ROOT.joinpath(*parts[:end]).with_suffix(".py")
            if module.is_file() and module.parent == path.parent:
                found.add(module)
    return found


ONE_WAY = ["base", "ops", "ir", "lang", "formats", "passes", "lower", "verify"]
ONE_WAY += [f"runtime/{path.name}" for path in sorted((ROOT / "optgen" / "runtime").iterdir()) if path.is_dir()]


@pytest.mark.parametrize("room", ONE_WAY)
def test_no_file_imports_itself_by_way_of_others(room: str) -> None:
    """Imports under TYPE_CHECKING and inside functions count."""
    assert_one_way({path: _imported(path) for path in files(f"optgen/{room}") if path.name != "__init__.py"})
