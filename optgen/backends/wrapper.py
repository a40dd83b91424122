"""The class that a user imports, and the tables that the runtime reads: text from finished rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from optgen.backends import columns
from optgen.backends.printer import wrapped


@dataclass(frozen=True)
class HyperRow:
    """A hyper-parameter of the constructor and its range."""

    name: str
    default: float | tuple[float, ...]
    bounds: tuple[tuple[str, float], ...]  # ("ge", 0.0), ...
    parts: tuple[str, ...]
    series: bool = False
    rounds_of: str = ""
    whole: bool = False

    @property
    def signature(self) -> str:
        whole = self.whole and not isinstance(self.default, tuple)
        default = f"{self.default:.0f}" if whole else literal(self.default)
        return f"{self.name}={'None' if self.rounds_of else default}"

    @property
    def typed(self) -> str:
        """The argument's type."""
        if self.series:
            return "str | Sequence[float] | Sequence[Sequence[float]]"
        if isinstance(self.default, bool):
            return "bool"
        one = "Sequence[float | Tensor]" if isinstance(self.default, tuple) else "float | Tensor"
        return f"{one} | None" if self.rounds_of else one

    @property
    def described(self) -> str:
        """The values that the constructor takes, in words: "2 numbers, >= 0, < 1"."""
        if self.series:
            return "a triple, a list of them, or the name of a set"
        if isinstance(self.default, bool):
            return "True or False"
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        count = f"{len(self.default)} numbers" if isinstance(self.default, tuple) else "a number"
        count = "a whole number" if self.whole else count
        count += f", None: that of {self.rounds_of}" if self.rounds_of else ""
        return ", ".join([count, *(f"{signs[k]} {v:g}" for k, v in self.bounds)])

    @property
    def declaration(self) -> str:
        bounds = "".join(f", {k}={v!r}" for k, v in self.bounds)
        bounds += f', rounds_of="{self.rounds_of}"' if self.rounds_of else ""
        bounds += ", whole=True" if self.whole else ""
        return f'{"Series" if self.series else "Hyper"}("{self.name}", {literal(self.default)}{bounds})'


@dataclass(frozen=True)
class FlagRow:
    """A static switch: a constructor argument, or derived from a hyper-parameter."""

    name: str
    default: bool
    nonzero: str | None
    needs: str | None
    excludes: str | None
    shape: str = ""  # the source of a function of the shape
    every: str | None = None
    first: bool = False
    fed: str | None = None

    @property
    def derived(self) -> bool:
        """True if no constructor argument sets it."""
        return bool(self.nonzero or self.shape or self.every or self.first or self.fed)

    @property
    def described(self) -> str:
        """The values that the constructor takes, in words."""
        limits = [f"not with {self.needs}=0"] if self.needs else []
        limits += [f"not with {self.excludes}"] if self.excludes else []
        return ", ".join(["True or False", *limits])

    @property
    def declaration(self) -> str:
        said = [f"shape={self.shape}"] if self.shape else [] if self.derived else [str(self.default)]
        named = ("fed", "every", "nonzero") if self.derived else ("needs", "excludes")
        said += [f'{kind}="{name}"' for kind in named if (name := getattr(self, kind))]
        said += ["first=True"] if self.first else []
        return f"Flag({', '.join([literal(self.name), *said])})"


@dataclass(frozen=True)
class ClassRow:
    """Everything the class' file says."""

    name: str
    module: str
    doc: str
    cite: str
    source: str
    digest: str
    hypers: tuple[HyperRow, ...]
    flags: tuple[FlagRow, ...]
    plans: tuple[str, ...]
    rule: tuple[str, ...]  # the lines of the author's function
    own: Mapping[str, str] = field(default_factory=dict)  # the user's plans -> their packages
    evaluation: tuple[str, ...] = ()  # lines of the function that gives the weights to evaluate with
    inputs: tuple[str, ...] = ()  # the further values per element that its user feeds
    blocks: str = ""  # what blocks of rows are that its user may ask for: "rows" of its matrix, or "heads"

    @property
    def signature(self) -> list[str]:
        out = [h.signature for h in self.hypers]
        return out + [f"{f.name}={f.default}" for f in self.flags if not f.derived]

    @property
    def typed(self) -> list[str]:
        """The signature as a stub states it."""
        kinds = [h.typed for h in self.hypers]
        kinds += ["bool"] * (len(self.signature) - len(kinds))
        pairs = (argument.split("=", 1) for argument in self.signature)
        return [f"{name}: {kind} = {default}" for (name, default), kind in zip(pairs, kinds, strict=True)]

    @property
    def summary(self) -> str:
        return self.doc.strip().partition("\n")[0]

    @property
    def arguments(self) -> list[str]:
        """A line for each argument of the rule's own: its name, and what it may be."""
        rows: list[HyperRow | FlagRow] = [*self.hypers, *(f for f in self.flags if not f.derived)]
        width = max((len(row.name) for row in rows), default=0)
        return [f"{row.name:{width}}  {row.described}" for row in rows]

    @property
    def given(self) -> list[str]:
        """The rule's own arguments as the constructor hands them on."""
        names = [h.name for h in self.hypers] + [f.name for f in self.flags if not f.derived]
        return [f"{name}={name}" for name in names]


def literal(value: float | str | tuple[Any, ...]) -> str:
    """A default as a person writes it: 1e-3, 0.9, (0.9, 0.999)."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"({', '.join(literal(v) for v in value)})"
    text = f"{value:g}"
    if float(text) != value:
        text = repr(value)
    if "e" in text:
        mantissa, exponent = text.split("e")
        return f"{mantissa}e{int(exponent)}"
    return text if "." in text else f"{text}.0"


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The templates: they decide the shape of a file, Python the text of each line in it."""
    env = Environment(
        loader=PackageLoader("optgen.backends"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    # An author's text as it stands between triple quotes.
    env.filters["quoted"] = lambda text: text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    env.filters["imported"] = imported
    return env


def imported(names: Iterable[str], module: str) -> str:
    """An import of names: one line, or as many as it takes in parentheses."""
    found = list(names)
    plain = f"from {module} import {', '.join(found)}"
    return plain if len(plain) <= 114 else "\n".join(wrapped(f"from {module} import (", found, ")"))


def render(template: str, **values: Any) -> str:
    """Return a file from its template: no long lines, no trailing blanks, one newline at the end."""
    text = environment().get_template(template).render(**values)
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return columns.python("\n".join(lines) + "\n")
