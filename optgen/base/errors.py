"""Every error a user can cause: one row each, with a stable code.

    raise UserError("E105", loc=here(), name="m", when="momentum")

reads

    error[E105]: state `m` is off here: it is declared with when='momentum'
     --> specs/trusty.py:7:9 in trusty
      7 |     m = 0.9 * m + g
        |         ^^^^^^^
      note: ...
      hint: ...
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from optgen.base.loc import Loc


@dataclass(frozen=True)
class Row:
    """message, note and hint are format strings over the keyword arguments of the error."""

    message: str
    note: str = ""
    hint: str = ""


TABLE: dict[str, Row] = {
    # E1xx: the language
    "E101": Row(
        "{what} of Python's, such as `if`, `and`, `not` or `in`, cannot depend on a value of the spec",
        "specs are traced once per flag setting; only flags have a truth value while tracing",
        "write where(condition, a, b), with (a > 0) & (b > 0), | and ~, or make the condition a flag: "
        'has_momentum=flag(nonzero="momentum")',
    ),
    "E102": Row(
        "{what} does not work on spec values",
        "a value is neither a tensor nor a number: operators take it, and functions of optgen.lang",
        "maximum(a, b), sqrt(x), sign(x), norm(x), dot(a, b), rows(x) ... are in docs/language.md",
    ),
    "E103": Row("`{function}` takes {want}, got {got}"),
    "E104": Row(
        "cannot combine a spec value with {got}",
        "",
        "numbers, flags and other values of the same spec are what arithmetic takes",
    ),
    "E105": Row(
        "state `{name}` is off here: it is declared with when={when!r}",
        "a state that is off may be carried to the return, never computed with or assigned to",
        "use it under `if` on that flag",
    ),
    "E106": Row(
        "input `{name}` is read where no flag says that it was fed",
        "with these flags on: {on}; an input that was not fed has no value",
        "read it under `if {flags}` alone; a flag of two inputs is flag(fed=\"x and y\")",
    ),
    "E110": Row("{what} is declared with {option}={value!r}, but no {kind} has that name"),
    "E111": Row(
        "parameter `{name}` is {got}, not a declaration",
        "",
        "before the `*` each has a state: state(), row(), col(), mat(), scalar(); after it: hyper(...), flag(...)",
    ),
    "E112": Row("the default {name} = {value} is out of its own range {range}"),
    "E113": Row("{what}", "", "docs/language.md has what there is"),
    "E114": Row(
        "a spec's first parameters are `p, g` or `p, g, t`, got {got}",
        "p is the weight, g its gradient, t the step counted from 1",
        "every other parameter has a declaration as its default: a state is average=state(), a further tensor, such as "
        "a Hessian, an input that opt.feed(hessian=...) gives, hessian=input()",
    ),
    "E115": Row("the name `{name}` cannot be used: {why}", "", "take another one, such as `my_{name}`"),
    "E116": Row("{kind} `{name}` is never used", "", "{remedy}"),
    "E117": Row("hyper-parameter `{name}` has {want} parts, unpacked into {got}"),
    "E118": Row("{name} has no {kind} `{got}`"),
    "E119": Row(
        "state `{name}` cannot be normalized_by `{root}`",
        "the quotient of a signed state and the root of a nonneg state of the same space; where "
        "the root starts at 0, so does the signed one",
    ),
    "E120": Row(
        "{name} must return {want}, got {got}",
        "new values are matched with the weight and the states by their names, in the order of the signature",
        "write `name = ...` on a line of its own for each, and end with `return {want}`",
    ),
    "E124": Row(
        "`{name}` is returned as {got}, but it is {want}",
        "spaces: elem is one value per element, row and col one per row and column, mat one per matrix, "
        "tensor one per parameter, host one number per step",
        "compute it from p, g, states and hyper-parameters; reductions such as row_mean() and mean() lead to smaller "
        "spaces, and where(c, 1.0, 0.0) makes a number of a condition",
    ),
    "E125": Row(
        "shape flag `{name}` is not a lambda in the signature that reads its argument only",
        "its text goes into the generated class",
        "shape_flag(lambda shape: len(shape) >= 2)",
    ),
    "E126": Row(
        "state `{name}` cannot depend on `{flag}`, which changes from step to step",
        "a state exists at every step or at none",
        "keep the state, and branch on the flag in the rule",
    ),
    "E127": Row(
        "`{name}` cannot give the weights to evaluate with: {why}",
        "its text goes into the generated class, where torch tensors are put in",
        "def averaged(p, z, *, betas): ... return p + (1 - 1 / betas[0]) * (z - p)",
    ),
    "E128": Row(
        "`{name}` became another expression when the rule was read a second time",
        "a rule is read several times, once for each setting of its flags: it may depend on its arguments only",
        "change no global or nonlocal name or list in it, and draw no random number; what steps keep is a state()",
    ),
    "E129": Row("{function} cannot be used here: {why}", "", "{remedy}"),
    "E131": Row(
        "{kind}: {text}",
        "raised by Python while the spec was traced",
        "values have operators, no methods, and functions of optgen.lang take them, not those of torch and NumPy",
    ),
    "E132": Row(
        "the source of `{name}` cannot be read",
        "names and places come from the source",
        "a spec is a `def` of its own in a file of UTF-8",
    ),
    "E140": Row(
        "this gives {value} at step {step}",
        "with p = {p}, g = {g} and default hyper-parameters",
        "add a small eps where it divides, 1e-30 or larger, or choose with where(); a root and a power of a fraction "
        "want an operand >= 0, a logarithm one > 0; of host scalars both sides of where() are computed, so limit what "
        "they take: maximum(x, smallest)",
    ),
    "E142": Row(
        "state `{name}` is declared nonneg, but it becomes {value} at step {step}",
        "with p = {p}, g = {g} and default hyper-parameters",
        "declare it state(), or clip it: maximum(x, 0.0)",
    ),
    "E143": Row(
        "state `{name}` is declared {trait}, but after step {step} on random matrices an entry is {off} off",
        "formats keep what the trait leaves alone, and would change this one",
        "declare it without the trait, or restore that: (x + x.T) / 2 is symmetric, qr(x) orthogonal, triangle(x) "
        "triangular; vectors of low rank have length 1",
    ),
    # E2xx: spaces and dtypes
    "E201": Row(
        "{function}() takes {want} values, got {got}",
        "spaces: a row or col value has one entry per row or column, a tensor value one per parameter",
        "reduce the element-wise value, before it is averaged",
    ),
    "E202": Row(
        "{function} wants a host scalar for x, got a value in space {got}",
        "host scalars depend on hyper-parameters and t only; they are computed once per step in fp64",
        "exp(y * log(x)) of x > 0; x ** y and power(x, y) take a number or host scalar y",
    ),
    "E205": Row(
        "{function} does not take host scalars",
        "host scalars depend on hyper-parameters and t only; they are computed once per step in fp64",
        "operators and comparisons do, and abs, sqrt, rsqrt, cbrt, square, power, exp, log, tanh, "
        "sigmoid, atan2, sign, floor, rint, maximum, minimum, clip, equal and where",
    ),
    "E206": Row(
        "{function} takes {want}, got {got}",
        "a matrix state is (rows, rows) or (columns, columns); a value per element is (rows, columns)",
    ),
    # E3xx: formats and plans
    "E301": Row(
        "{what}",
        "a negative value could not be told from a positive one",
        "declare it state(nonneg) if it is never negative, or give it a signed format in the plan's overrides",
    ),
    "E302": Row(
        "plan {plan} stores `{first}` in blocks of {a} and `{second}` in blocks of {b}",
        "a kernel reads all states in blocks of one size",
        "use one block size",
    ),
    "E303": Row(
        "plan {plan} keeps `{state}` in another format than fp32, but it has one value per {space}: {format}",
        "few values beside the elements are worked on between sweeps, in fp32",
        "leave it out of the plan's `overrides`",
    ),
    "E305": Row("{what} is not a format: use {want}"),
    "E307": Row(
        "{spec} under plan {plan}: {finding}",
        "{reason}",
        "choose another format or rounding for `{state}`, or give the plan `discouraged=` with your reason",
    ),
    "E308": Row(
        "plan {plan} keeps {first} and {second} both under the name `{field}`",
        "the parts of what is kept are named by the value and a suffix; opt.state[p] has one tensor per name",
        "give the state another name than `{field}`",
    ),
    "E309": Row(
        "`{part}` of a plan is {want}, got {got}",
        "",
        'my_plan = Plan("8-bit moments.", signed=Blocked(), nonneg=LogMinMax())',
    ),
    "E310": Row(
        "plan {plan} overrides the state `{state}`, which no rule here has",
        "an override of it would change nothing",
    ),
    "E311": Row(
        "a codebook cannot have {what}: it takes {want}",
        "its numbers are what codes read as, times the largest magnitude of their block",
        "Codebook(codebooks.dynamic(), 8), or sorted numbers of your own",
    ),
    # E4xx: finding, building and writing
    "E401": Row("{text}", "Python cannot read this file"),
    "E402": Row("{kind}: {text}", "raised by Python while this file was loaded"),
    "E403": Row("{file} has no {kind}", "", "{remedy}"),
    "E404": Row("there is no {kind} `{name}`"),
    "E405": Row("{file} has several {kind}s", "they are {names}", "name one: {file}:{first}"),
    "E406": Row(
        "{out} holds files that optgen did not write like this: {names}",
        "they were edited by hand, or made by something else; nothing was changed",
        "move them away, or delete them",
    ),
    "E407": Row(
        "[tool.optgen] in {file}: {what}",
        "",
        'an entry of `build` is a table of two lists: specs = ["*"], plans = ["fp32", "int8_split24"]',
    ),
    "E408": Row("{file} exists already", "nothing was changed", "choose another name, or delete the file"),
    "E409": Row("`{name}` cannot be the name of a spec", "it becomes a Python module and function", "{remedy}"),
    "E411": Row("{option} is {want}, got `{got}`"),
    "E412": Row("two definitions would become {what}", "", "give one of the two another name"),
    "E413": Row("{path} cannot be written: {why}"),
    "E414": Row("nothing to build", "specs/ holds no spec, and pyproject.toml names none", "optgen new my_rule"),
    "E415": Row(
        "{file} cannot be read: {why}",
        "it says which files optgen wrote; without it they cannot be told from yours; nothing was changed",
        "restore it (git checkout), or delete the folder and build it anew",
    ),
    "E417": Row("{path} cannot be read: {why}"),
    "E418": Row("{path} cannot be converted: {why}", "nothing was written"),
    "E419": Row(
        "one file does not serve {name}: {why}",
        "nothing was written",
        "`optgen build {name} --out FOLDER` generates a package",
    ),
}


_MADE: ContextVar[list[UserError] | None] = ContextVar("_MADE", default=None)
"""The errors made since `insisted` began; None where nobody insists."""


@contextlib.contextmanager
def insisted() -> Iterator[None]:
    """Raise the first UserError made inside, also where the code that runs inside caught it.

    An author's `try` around a refusal would otherwise make another rule than is written.
    """
    made: list[UserError] = []
    token = _MADE.set(made)
    try:
        yield
    except (Exception, SystemExit) as error:
        if not made or error is made[0]:
            raise
    finally:
        _MADE.reset(token)
        if made and (around := _MADE.get()) is not None:
            around.append(made[0])
    if made:
        raise made[0]


class UserError(Exception):
    """An error in what a user wrote; `code` is a key of TABLE, `locs` the places, the first one primary."""

    def __init__(self, code: str, *, loc: Loc | Iterable[Loc] | None = None, **values: object) -> None:
        row = TABLE[code]
        self.code = code
        self.locs: tuple[Loc, ...] = () if loc is None else (loc,) if isinstance(loc, Loc) else tuple(loc)
        self.message = row.message.format(**values)
        self.note = str(values["note"]) if "note" in values else row.note.format(**values)
        self.hint = str(values["hint"]) if "hint" in values else row.hint.format(**values)
        super().__init__(self.message)
        made = _MADE.get()
        if made is not None:
            made.append(self)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors come back from worker processes; Exception would call __init__ with the message alone.
        return _restore, (self.code, self.locs, self.message, self.note, self.hint)

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.message}"]
        for loc in self.locs:
            where = f" in {loc.function}" if loc.function and loc.function != "<module>" else ""
            lines.append(f" --> {loc}{where}")
            source = loc.source()
            if source:
                number = str(loc.line)
                lines.append(f"  {number} | {source}")
                lines.append(f"  {' ' * len(number)} | {_marks(source, loc)}")
        if self.note:
            lines.append(f"  note: {self.note}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in place of a traceback through the compiler."""
        return str(self).splitlines()


def _marks(source: str, loc: Loc) -> str:
    """Carets under a span of a line.  Columns count bytes of UTF-8; a span that goes on is marked to the end."""
    row = source.encode()
    start = len(row[: loc.col].decode(errors="replace"))
    end = len(source)
    if loc.end_line == loc.line and loc.end_col > loc.col:
        end = len(row[: loc.end_col].decode(errors="replace"))
    return " " * start + "^" * max(1, end - start)


def _restore(code: str, locs: tuple[Loc, ...], message: str, note: str, hint: str) -> UserError:
    error = UserError.__new__(UserError, message)
    error.code, error.locs, error.message, error.note, error.hint = code, locs, message, note, hint
    return error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint naming the known word that the word is most likely a misspelling of, or else the five most like it."""
    plain = {name.lower(): name for name in sorted(known, reverse=True)}  # AdamW is meant where adamw is known
    if close := difflib.get_close_matches(word.lower(), plain, n=1, cutoff=0.66):
        return f"did you mean '{plain[close[0]]}'?"
    nearest = difflib.get_close_matches(word.lower(), plain, n=5, cutoff=0.0)
    return f"known: {', '.join(sorted(plain[name] for name in nearest))}{' ...' * (len(plain) > 5)}" if nearest else ""


def said(error: BaseException) -> str:
    """An exception's text; where a module lies on this machine is no part of the mistake."""
    path = error.path if isinstance(error, ImportError) else None
    return str(error).removesuffix(f" ({path})")
