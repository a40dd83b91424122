"""The class that a user imports, and the tables that the runtime reads: text from finished rows."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from optgen.backends import columns
from optgen.backends.printer import wrapped


def bounds(hyper: Any) -> list[tuple[str, float]]:
    """Return the ends of a hyper-parameter's range: ("ge", 0.0), ..."""
    return [(kind, float(x)) for kind in ("ge", "gt", "le", "lt") if (x := getattr(hyper, kind)) is not None]


def _default(hyper: Any) -> str:
    """Return the default of a hyper-parameter in the constructor."""
    whole = hyper.whole and not isinstance(hyper.default, tuple)
    return "None" if hyper.rounds_of else f"{hyper.default:.0f}" if whole else literal(hyper.default)


def _type(hyper: Any) -> str:
    """Return the type of a hyper-parameter in the constructor."""
    if hyper.series:
        return "str | Sequence[float] | Sequence[Sequence[float]]"
    if isinstance(hyper.default, bool):
        return "bool"
    one = "Sequence[float | Tensor]" if isinstance(hyper.default, tuple) else "float | Tensor"
    return f"{one} | None" if hyper.rounds_of else one


def described(hyper: Any) -> str:
    """Return the values that the constructor takes, in words: "2 numbers, >= 0, < 1"."""
    if hyper.series:
        return "a triple, a list of them, or the name of a set"
    if isinstance(hyper.default, bool):
        return "True or False"
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    count = f"{len(hyper.default)} numbers" if isinstance(hyper.default, tuple) else "a number"
    count = "a whole number" if hyper.whole else count
    count += f", None: that of {hyper.rounds_of}" if hyper.rounds_of else ""
    words = ", ".join([count, *(f"{signs[k]} {v:g}" for k, v in bounds(hyper))])
    words += "; rises and falls with lr" if hyper.scheduled else ""
    return words + (f", and is lr with {hyper.lr_if}=True" if hyper.lr_if else "")


def _described_flag(flag: Any) -> str:
    limits = [f"not with {flag.needs}=0"] if flag.needs else []
    limits += [f"not with {flag.excludes}"] if flag.excludes else []
    return ", ".join(["True or False", *limits])


def hyper_record(hyper: Any) -> str:
    """Return the record of a hyper-parameter."""
    more = "".join(f", {k}={v!r}" for k, v in bounds(hyper))
    more += f', rounds_of="{hyper.rounds_of}"' if hyper.rounds_of else ""
    more += ", whole=True" if hyper.whole else ""
    more += ", scheduled=True" if hyper.scheduled else ""
    more += f', lr_if="{hyper.lr_if}"' if hyper.lr_if else ""
    return f'{"Series" if hyper.series else "Hyper"}("{hyper.name}", {literal(hyper.default)}{more})'


def flag_record(flag: Any, shape: str) -> str:
    """Return the record of a flag; `shape`: the source of its function of the shape, if it has one."""
    said = [f"shape={shape}"] if shape else [] if flag.derived else [str(flag.default)]
    named = ("fed", "every", "nonzero") if flag.derived else ("needs", "excludes")
    said += [f'{kind}="{name}"' for kind in named if (name := getattr(flag, kind))]
    said += ["first=True"] if flag.first else []
    return f"Flag({', '.join([literal(flag.name), *said])})"


@dataclass(frozen=True)
class ClassRow:
    """Everything the class' file says; its hyper-parameters and flags are those that its author declares."""

    name: str
    module: str
    doc: str
    cite: str
    source: str
    digest: str
    hypers: tuple[Any, ...]
    flags: tuple[Any, ...]
    shapes: Mapping[str, str]  # flag -> the source of its function of the shape; "" if it has none
    plans: tuple[str, ...]
    evaluation: tuple[str, ...] = ()  # lines of the function that gives the weights to evaluate with
    inputs: tuple[str, ...] = ()  # the further values per element that its user feeds
    blocks: str = ""  # what blocks of rows are that its user may ask for: "rows" of its matrix, or "heads"
    ascent: str = ""  # the class of its first step, and the options of that as this class has them
    ascends: Mapping[str, str] = field(default_factory=dict)

    @property
    def switches(self) -> list[Any]:
        """The flags that are arguments."""
        return [f for f in self.flags if not f.derived]

    @property
    def signature(self) -> list[str]:
        return [f"{h.name}={_default(h)}" for h in self.hypers] + [f"{f.name}={f.default}" for f in self.switches]

    @property
    def typed(self) -> list[str]:
        """The signature as a stub states it."""
        out = [f"{h.name}: {_type(h)} = {_default(h)}" for h in self.hypers]
        return out + [f"{f.name}: bool = {f.default}" for f in self.switches]

    @property
    def summary(self) -> str:
        return self.doc.strip().partition("\n")[0]

    @property
    def arguments(self) -> list[str]:
        """The lines about the rule's own arguments: name, meaning, and the values that the constructor takes."""
        rows = {h: described(h) for h in self.hypers} | {f: _described_flag(f) for f in self.switches}
        width = max((len(x.name) for x in rows), default=0)
        lines = [f"{x.name:{width}}  {f'{x.meaning}: {words}' if x.meaning else words}" for x, words in rows.items()]
        return [part for line in lines for part in textwrap.wrap(line, 112, subsequent_indent=" " * (width + 2))]

    @property
    def given(self) -> list[str]:
        """The rule's own arguments as the constructor hands them on."""
        return [f"{x.name}={x.name}" for x in (*self.hypers, *self.switches)]


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
    env.filters |= {"hyper": hyper_record, "flag": flag_record}
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
