"""The pairs that a project builds: the table [tool.optgen] of its pyproject.toml, or its specs under the usual plans.

    [tool.optgen]
    out = "generated"
    maths = "fast"
    hashes = false
    build = [
        { specs = ["*"], plans = ["fp32", "int8_split24"] },
        { specs = ["adamw"], plans = ["*"] },
    ]

With `hashes`, the folder has a file HASHES of what every rule and plan of the project generates, built or not.

Names may be patterns: of specs, over those in the project's own specs/ folder; of plans, over all that fit the
spec and pass the lint.  Names without a wildcard may also be ready-made specs, or files ("rules/mine.py").
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from optgen.base.errors import UserError, did_you_mean
from optgen.base.loc import Loc, of_characters, relative
from optgen.driver import load

Maths = Literal["strict", "fast"]
MATHS: tuple[Maths, ...] = ("strict", "fast")

DEFAULT_PLANS = ("fp32", "int8_split24")


@dataclass(frozen=True)
class BuildEntry:
    """An entry of `build`: these specs under these plans; patterns allowed."""

    specs: tuple[str, ...]
    plans: tuple[str, ...]


@dataclass(frozen=True)
class Config:
    """[tool.optgen]; `build` is None where the project has no such table."""

    out: str = "generated"
    maths: Maths = "fast"
    build: tuple[BuildEntry, ...] | None = None
    hashes: bool = False


@dataclass(frozen=True)
class Pairing:
    """A requested pair of spec and plan; `optional` pairs, requested by a pattern, are left out if they do not fit."""

    spec: str
    plan: str
    optional: bool


def read_config(project: Path) -> Config:
    """Return the project's table, checked; defaults where there is none."""
    file = project / "pyproject.toml"
    try:
        if not file.is_file():
            return Config()
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise load.unreadable(file, error) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        at = re.search(r"at line (\d+), column (\d+)", str(error))
        place = of_characters(str(file), int(at[1]), int(at[2]) - 1) if at else Loc(str(file), 1)
        raise UserError("E401", loc=place, text=str(error), note="TOML cannot read this file") from None
    tools = data.get("tool")
    table = tools.get("optgen") if isinstance(tools, dict) else None
    return Config() if table is None else _config(table, file)


def _config(table: Any, file: Path) -> Config:
    def refuse(what: str, **values: str) -> UserError:
        return UserError("E407", loc=None, file=relative(str(file)), what=what, **values)

    if not isinstance(table, dict):
        raise refuse("is not a table")
    known = ("out", "maths", "build", "hashes")
    for key in table:
        if key not in known:
            raise refuse(f"has no entry `{key}`", hint=did_you_mean(key, known))
    out, maths = table.get("out", "generated"), table.get("maths", "fast")
    if not isinstance(out, str) or not out:
        raise refuse(f"`out` is the name of a folder, got {out!r}", hint="")
    if maths not in MATHS:
        raise refuse(f"`maths` is one of {', '.join(MATHS)}, got {maths!r}", hint="")
    if not isinstance(hashes := table.get("hashes", False), bool):
        raise refuse(f"`hashes` is true or false, got {hashes!r}", hint="")
    rules = table.get("build")
    if rules is not None and not isinstance(rules, list):
        raise refuse("`build` is a list of { specs, plans }")
    asked = None if rules is None else tuple(_rule(r, refuse) for r in rules)
    return Config(out, maths, asked, hashes)


def _rule(row: Any, refuse: Callable[[str], UserError]) -> BuildEntry:
    if not isinstance(row, dict) or set(row) - {"specs", "plans"} or "specs" not in row:
        raise refuse(f"an entry of `build` has `specs` and `plans`, got {row!r}")
    parts = []
    for key in ("specs", "plans"):
        names = row.get(key, list(DEFAULT_PLANS))
        if not isinstance(names, list) or not names or not all(isinstance(n, str) and n for n in names):
            raise refuse(f"`{key}` is a list of names, got {names!r}")
        parts.append(tuple(names))
    return BuildEntry(*parts)


def is_pattern(name: str) -> bool:
    return any(c in name for c in "*?[")


def wishes(project: Path, config: Config) -> list[Pairing]:
    """Return the pairs that the table asks for; without one, the project's own specs under the default plans."""
    own = [name for name, entry in load.entries(project).items() if entry.own]
    if config.build is None:
        return [Pairing(spec, plan, False) for spec in own for plan in DEFAULT_PLANS]
    out = []
    for rule in config.build:
        for spec in rule.specs:
            names = [n for n in own if fnmatchcase(n, spec)] if is_pattern(spec) else [placed(spec, project)]
            for name in names:
                out += plan_wishes(name, [placed(plan, project) for plan in rule.plans], project)
    return once(out)


def placed(name: str, project: Path) -> str:
    """Return a name of the table as it is found from any folder: files are below the project."""
    return str((project / name).resolve()) if name.partition(":")[0].endswith(".py") else name


def plan_wishes(spec: str, plans: Sequence[str], project: Path) -> list[Pairing]:
    """Return one spec under plans that may be patterns."""
    out = []
    for plan in plans:
        names = [x for x in load.plans(project) if fnmatchcase(x, plan)] if is_pattern(plan) else [plan]
        out += [Pairing(spec, name, is_pattern(plan)) for name in names]
    return out


def once(found: list[Pairing]) -> list[Pairing]:
    """Return each pair once; one requested by name is not optional."""
    return list({(w.spec, w.plan): w for w in sorted(found, key=lambda w: not w.optional)}.values())
