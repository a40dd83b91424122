"""The text of a PTX kernel, read into blocks of statements."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.ptx.instructions import PTXError

BRANCHES = ("bra", "ret", "exit", "bar", "barrier")
"""Instructions after which threads may go on elsewhere, or wait: the last ones of their block."""

_NAME = r"[%$\w.]+"
_TOKEN = re.compile(r"\s*(?:(?P<label>[$\w.]+)\s*:(?!:)|(?P<brace>[{}])|(?P<statement>[^;{}]*(?:\{[^}]*\}[^;{}]*)*);)")
_STATEMENT = re.compile(rf"(?:@(!?)({_NAME})\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_NOISE = re.compile(r"/\*.*?\*/|//[^\n]*|^\s*\.(?:loc|file)\b[^\n]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Statement:
    """One instruction: `@[!]guard opcode operands;`."""

    text: str
    opcode: str
    operands: tuple[str, ...]
    guard: str = ""
    negated: bool = False


@dataclass
class Text:
    """A kernel: its parameters by name, its threads per program, the widths of its registers, its blocks in order, and
    the block that each label stands before."""

    name: str
    params: list[str]
    threads: int
    blocks: list[list[Statement]] = field(default_factory=lambda: [[]])
    labels: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)

    def width(self, register: str) -> int:
        """Return the bits of a register, 1 for a predicate."""
        found = self.widths.get(register) or self.widths.get(register.rstrip("0123456789"))
        if found is None:
            raise PTXError(f"{self.name}: register {register} is not declared")
        return found


def read(ptx: str) -> Text:
    """Read the one kernel of a PTX file."""
    found = re.search(r"\.visible\s+\.entry\s+([\w$.]+)\s*\((.*?)\)([^{]*)", _NOISE.sub("", ptx), re.DOTALL)
    threads = found and re.search(r"\.(?:req|max)ntid\s+(\d+)", found[3])
    if not found or not threads:
        raise PTXError("no kernel, or none of a known number of threads")
    params = re.findall(r"([\w$]+)\s*(?:,|$)", re.sub(r"\s*\n\s*", "\n", found[2]).strip(), re.MULTILINE)
    made = Text(found[1], params, int(threads[1]))
    targets = set(re.findall(r"\bbra(?:\.uni)?\s+([$\w.]+)", ptx))  # other labels are for debuggers
    scopes: list[dict[str, str]] = []
    for kind, text in _tokens(_NOISE.sub("", ptx), found.end()):
        if kind == "label":
            if text in targets:
                if made.blocks[-1]:
                    made.blocks.append([])
                made.labels[text] = len(made.blocks) - 1
        elif text == "{":
            scopes.append({})
        elif text == "}":
            scopes.pop()
            if not scopes:
                break
        elif text.startswith(".reg"):
            _declare(made, text, scopes)
        elif text.startswith("."):
            if not text.startswith(".pragma"):
                raise PTXError(f"{made.name}: {text}")
        else:
            _add(made, text, scopes)
    return made


def _tokens(text: str, at: int) -> Iterator[tuple[str, str]]:
    while token := _TOKEN.match(text, at):
        at = token.end()
        kind = str(token.lastgroup)
        yield kind, token[kind].strip()
    raise PTXError(f"cannot read {text[at : at + 80].strip()!r}")


def _declare(made: Text, text: str, scopes: list[dict[str, str]]) -> None:
    """`.reg .b32 %r<99>;`, or names of their own within braces, which inline assembly has."""
    found = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL)
    if found is None:
        raise PTXError(f"{made.name}: {text}")
    digits = re.search(r"\d+", found[1])
    width = int(digits[0]) if digits else 1
    for name in (x.strip() for x in found[2].split(",")):
        if many := re.fullmatch(r"(%\w+?)<\d+>", name):
            made.widths[many[1]] = width
        else:
            scopes[-1][name] = inner = f"%{name.strip('%')}.{len(made.widths)}"
            made.widths[inner] = width


def _add(made: Text, text: str, scopes: list[dict[str, str]]) -> None:
    for name, inner in (pair for scope in scopes if scope for pair in scope.items()):
        text = re.sub(rf"(?<![%\w.$]){re.escape(name)}(?!\w)", inner, text)
    found = _STATEMENT.fullmatch(text)
    if found is None:
        raise PTXError(f"{made.name}: cannot read {text!r}")
    made.blocks[-1].append(Statement(text, found[3], tuple(parts(found[4])), found[2] or "", found[1] == "!"))
    if found[3].split(".")[0] in BRANCHES:
        made.blocks.append([])


def parts(text: str) -> list[str]:
    """Split operands at commas, and at the bar before a second result, outside brackets."""
    return [x.strip() for x in re.split(r"[,|](?![^{]*\}|[^\[]*\])", text) if x.strip()]
