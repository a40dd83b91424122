"""The page about a rule, generated from its spec and the formats: headings, blocks of code, and blocks of HTML."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from docs.tools.formulas import formulas, symbols
from optgen.base.errors import UserError
from optgen.driver import explain, judge, memory
from optgen.formats.plan import Plan
from optgen.lang.declare import INPUT, FlagDecl, HostStateDecl, StateDecl
from optgen.lang.spec import Spec
from optgen.ops import dtypes, spaces

Link = Callable[[str], str]
"""The name of a plan or rule -> the address of its page; "" if it has none."""

UNINDEXED = "{ data-search-exclude }"
_KEPT = {"row": "one per row", "col": "one per column", "mat": "one per matrix", "tensor": "one per tensor",
         "model": "one for the model"}  # fmt: skip


def no_link(name: str) -> str:
    """Return no address."""
    return ""


# -- pieces


def inline(text: str) -> str:
    """Return one line of an author's text as HTML: `names` in code, arXiv numbers linked."""
    found = re.sub(r"`+([^`]+)`+", r"<code>\1</code>", escape(text, quote=False))
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>', found)


def prose(text: str) -> str:
    """Return an author's text as paragraphs; indented ones are code."""
    return "\n\n".join(
        f"<pre>{escape(part)}</pre>" if part.startswith("    ") else f"<p>{inline(' '.join(part.split()))}</p>"
        for part in text.split("\n\n")
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already, in a box that scrolls."""
    columns = "".join(f"<th>{name}</th>" for name in head)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scrolls"><table>\n<thead><tr>{columns}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def listed(lines: Iterable[str]) -> str:
    """Return a list of lines of an author's text."""
    return "<ul>\n" + "\n".join(f"<li>{inline(line)}</li>" for line in lines) + "\n</ul>"


def code(name: object, link: Link = no_link) -> str:
    """Return a name in code, linked to its page if it has one."""
    text = f"<code>{escape(str(name))}</code>"
    return f'<a href="{link(str(name))}">{text}</a>' if link(str(name)) else text


def fenced(text: str, language: str) -> str:
    """Return a block of code."""
    return f"````{language}\n{text.rstrip()}\n````"


def folded(title: str, block: str) -> str:
    """Return a block that is shown when its title is clicked."""
    return f"<details markdown='1'>\n<summary>{title}</summary>\n\n{block}\n\n</details>"


# -- a rule


def rule_page(spec: Spec, plans: Sequence[Plan], *, link: Link = no_link, kernel: str = "") -> str:
    """Return the page of a rule, whose passes are those under the first of the plans.

    kernel   the text of its Triton kernels; "" leaves them out
    """
    like = f" Drop-in for `{spec.like}`: the same arguments and state names." if spec.like else ""
    use = f"from optgen.optim import {spec.class_name}\n\nopt = {spec.class_name}(model.named_parameters(), "
    use += f'lr=..., plan="{plans[0].name}")'
    for s in (s for s in spec.states if s.trait == INPUT):
        use += f"\nopt.feed({s.name}=...)  # before a step: tensors, a dict by parameter, or a function of a parameter"
    parts = [
        f"# {spec.class_name}", prose(spec.doc), f"<p>{inline(f'{spec.cite}.{like}')}</p>", fenced(use, "python"),
        "## The rule", *_rule(spec), "## States", _states(spec), "## Arguments", _arguments(spec),
        "## Bytes per parameter",
        table(("plan", "bf16 parameters", "fp32 parameters", "note"), _plans(spec, plans, link)),
        "<p>Weight and states between steps, without the gradient, of a large matrix.</p>", *_explained(spec, plans[0]),
    ]  # fmt: skip
    if kernel:
        parts += [f"## Kernels {UNINDEXED}", folded("The generated Triton text", fenced(kernel, "python"))]
    return "\n\n".join(filter(None, parts)) + "\n"


def _equations(lines: Iterable[tuple[str, str]]) -> str:
    row = '<mtr><mtd style="text-align:right">{}</mtd><mtd style="text-align:left"><mo>=</mo>{}</mtd></mtr>'
    rows = "".join(row.format(*line) for line in lines)
    return f'<div class="scrolls"><math display="block"><mtable displaystyle="true">{rows}</mtable></math></div>'


def _rule(spec: Spec) -> Iterator[str]:
    """Yield the formulas of the default setting, the lines that each flag changes, and the author's source."""
    usual, *others = spec.settings()
    lines = formulas(spec, usual)
    yield _equations(lines)
    for flag in spec.flags:
        setting = usual | {flag.name: not usual[flag.name]}
        if setting in others:
            other = [line for line in formulas(spec, setting) if line not in lines]
            block = _equations(other) if other else "<p>It only leaves lines out.</p>"
            yield folded(f"Lines that differ with {code(f'{flag.name}={setting[flag.name]}')}", block)
    text, made = inspect.getsource(spec.source.code), spec.loc.source() if spec.loc else ""
    text = text if made in text else f"{made}\n\n{text}"  # a rule in a wrapper
    yield folded("The spec, as its author wrote it", fenced(text, "python"))


def _letters(spec: Spec) -> dict[str, str]:
    return {name: f"<math>{symbol}</math>" for name, symbol in symbols(spec).items()}


def _states(spec: Spec) -> str:
    letters = _letters(spec)
    rows = []
    for s in spec.kept:
        start = f"{s.init:g}" if isinstance(s.init, float) else s.init
        kept, trait = _kept(s)
        rows.append((code(s.name), letters[s.name], kept, trait, start, code(s.when) if s.when else "always"))
    head = ("state", "symbol", "kept", "trait", "begins at", "exists")
    return table(head, rows) if rows else "<p>It keeps nothing between steps but the weight.</p>"


def _kept(state: StateDecl | HostStateDecl) -> tuple[str, str]:
    """Return how many values a state has, and its trait."""
    if isinstance(state, HostStateDecl):
        return "one number per tensor, fp64 on the host", ""
    trait = state.trait or ("nonnegative" if state.nonneg else "signed")
    if state.space is spaces.elem:
        return "one per element", trait
    return _KEPT.get(state.space.name) or f"a matrix {spaces.shown(state.space)}", trait


def _arguments(spec: Spec) -> str:
    letters = _letters(spec)
    rows = [
        (code(h.name), ", ".join(letters[part] for part in h.parts), code(re.sub(r"\.0\b", "", str(h.default))),
         escape(h.range), inline(h.meaning))
        for h in spec.hypers
    ]
    rows += [(code(f.name), "", *_flag(f), inline(f.meaning)) for f in spec.flags]
    return table(("argument", "symbol", "default", "range", "meaning"), rows)


def _flag(flag: FlagDecl) -> tuple[str, str]:
    """Return the default of a flag, and its range or what sets it."""
    if not flag.derived:
        return code(flag.default), "True or False"
    if flag.shape:
        return "no argument", "set by the parameter's shape"
    if flag.nonzero:
        return "no argument", f"on if {code(flag.nonzero)} is not 0"
    if flag.fed:
        return "no argument", f"on at steps for which {' and '.join(map(code, flag.inputs))} was fed"
    return "no argument", f"on every {code(flag.every)} steps" if flag.every else "on at the first step"


def _plans(spec: Spec, plans: Sequence[Plan], link: Link) -> Iterator[tuple[str, ...]]:
    """Yield the bytes of weight and states under each plan, and what the lint says."""
    for plan in plans:
        try:
            errors = [f for f in judge.look(spec, plan).findings if f.severity == "error"]
            note = "" if not errors else "discouraged: an average can stall" if plan.discouraged else errors[0].reason
            yield code(plan.name, link), *sizes(spec, plan), inline(note)
        except UserError as error:
            yield code(plan.name, link), "", "", inline(f"does not fit: {error.message}")


def sizes(spec: Spec, plan: Plan) -> tuple[str, ...]:
    """Return the bytes for bf16 and fp32 parameters; raises UserError where the plan does not fit."""
    storages = (explain.case_of(spec, plan, dtype.torch, {}).storage for dtype in (dtypes.bf16, dtypes.f32))
    return tuple(f"{sum(k.bytes for k in memory.memory(spec, storage)):.6g}" for storage in storages)


def kept_table(rows: Sequence[memory.ValueBytes], first: str) -> str:
    """Return what is stored of each value, with the bound of one store and the range in which it holds."""
    cells = ((code(k.name), escape(k.stored), f"{k.bytes:g}", escape(k.error), escape(k.valid)) for k in rows)
    return table((first, "stored as", "bytes", "|error| &le;", "where"), cells)


def _explained(spec: Spec, plan: Plan) -> Iterator[str]:
    """Yield the sections of what `optgen explain` says under one plan."""
    x = explain.explain(spec, plan)
    yield f"## Between steps, under {plan.name}"
    yield kept_table(x.memory, "value")
    yield from (f"<p>{code(k.name)}, stored again at every step: {escape(k.steady)}.</p>" for k in x.memory if k.steady)
    yield "## Passes over memory, and why"
    yield table(("pass for", "reads", "writes", "reduces", "bytes"), (
        (inline(re.sub(r" \([\w/.-]+\.py:(\d+)\)", r" (line \1)", s.why)),
         *(" ".join(map(code, names)) for names in (s.reads, s.writes)), ", ".join(s.reduces), f"{s.bytes:g}")
        for s in x.sweeps
    ))  # fmt: skip
    yield f"<p>{x.traffic:g} bytes per parameter and step: {x.traffic / 4.8:.3g} ms for 1e9 parameters at 4.8 TB/s.</p>"
    if x.findings:
        yield "## The lint"
        yield listed(map(str, x.findings))
