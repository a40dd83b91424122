"""`@optimizer`: a function's signature read as a schema."""

from __future__ import annotations

import ast
import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, Literal, overload

from optgen.base.errors import UserError, did_you_mean
from optgen.base.loc import Loc, of_code
from optgen.base.names import camel, is_name, is_snake, is_text, snake, unique
from optgen.lang import check
from optgen.lang.declare import (
    Declaration,
    FlagDecl,
    HostStateDecl,
    HyperDecl,
    Schema,
    StateDecl,
    flags_in,
    schema,
    usual,
)
from optgen.lang.source import SpecSource
from optgen.lang.spec import Evaluation, MatrixKind, Readings, Spec
from optgen.lang.tracing import check_weights
from optgen.lang.values import author_loc
from optgen.ops import spaces
from optgen.runtime.records.keys import DRAW

LEAVES = ("p", "g", "t")
_NUMBER = "hyper-parameter"
# Names that users of the optimizer pass or read: constructor arguments, keys of a group and of a state.
RESERVED = frozenset(
    "p g t step params maximize plan overrides blocks module offload backend seed self state defaults param_groups "
    "streams grad_scale weight weight_low weight_master weight_compensation".split()
)
# Names of variables of kernels: tensors of that name get an underscore there.
VARIABLES = frozenset(
    "step_key stream_key place index table work numel at at_block live live_block b values scalars tl triton torch "
    "ALIGNED ALL BLOCKS DENSE FEW GRAD LANES LESS MASKED OPTIONS RAGGED ROUND ROWS STORED TILE TILES WARPS".split()
)
# Functions that generated code calls where hyper-parameters, flags and host states are variables.
CALLED = frozenset(
    "abs both choose cube_root divide either exp floor larger log maximum minimum negated power root smaller where "
    "dict super options foreach fused capturable differentiable "
    "get put pointer reciprocal inverse rint rotl sign minus block_max block_min block_magnitude quotient sqrt "
    "widened counter joined byte apart rounded within numbered opaque packed unpacked term fold down "
    "lookup search PLAN beside kept plus read times".split()
)


@overload
def optimizer(function: Callable[..., Any], /) -> Spec: ...


@overload
def optimizer(
    *, cite: str = "", like: str | None = None, name: str | None = None, evaluate: Callable[..., Any] | None = None,
    matrix: MatrixKind | Literal["blocks"] = "last",
) -> Callable[[Callable[..., Any]], Spec]: ...


def optimizer(
    function: Callable[..., Any] | None = None, /, *, cite: str = "", like: str | None = None, name: str | None = None,
    evaluate: Callable[..., Any] | None = None, matrix: MatrixKind | Literal["blocks"] = "last",
) -> Spec | Callable[[Callable[..., Any]], Spec]:  # fmt: skip
    """Make a Spec of a function (p, g[, t], states..., *, hyper-parameters and flags...).

    cite  the paper
    like  the optimizer whose names, defaults and checkpoints it shares, e.g. "torch.optim.AdamW"
    name  the generated class; by default the function's name in CamelCase
    evaluate  the weights that the model is evaluated with, where they are not p: a function (p, states..., *,
          hyper-parameters...) of plain arithmetic, with the names that the spec has for them
    matrix  whose rows and columns are reduced: "last", of the last two dimensions, once for each index of the leading
            ones; "first", of the first dimension (output neurons, channels) against all others; "blocks", the same,
            and the user may say of single parameters how many blocks of consecutive rows are one row each; "heads",
            the same, where each block is a matrix, as is each index of a stack of matrices
    """
    for option, text in (("cite", cite), ("like", like or ""), ("name", name or "")):
        if not is_text(text):
            raise UserError("E113", loc=author_loc(), what=f"{option}= is a text, got {text!r}", hint="")
    if name is not None and (not name.isidentifier() or not name.isascii() or keyword.iskeyword(name)):
        raise UserError("E113", loc=author_loc(), what=f"name= is that of a class, got {name!r}", hint='name="MyRule"')
    if evaluate is not None and not isinstance(evaluate, FunctionType):
        called = getattr(evaluate, "__name__", repr(evaluate))
        raise UserError("E127", loc=author_loc(), name=called, why="it is not a function of its own, made with def")
    if matrix not in ("last", "first", "blocks", "heads"):
        hint = (
            "last: the last two dimensions; first: dimension 0 against all others; blocks: the same, where the user "
            "may put consecutive rows together; heads: the same, where these are a matrix"
        )
        what = f'matrix= is "last", "first", "blocks" or "heads", got {matrix!r}'
        raise UserError("E113", loc=author_loc(), what=what, hint=hint)

    def make(function: Callable[..., Any]) -> Spec:
        if not isinstance(function, FunctionType):
            what = f"`@optimizer` makes a spec of a function, got {getattr(function, '__name__', repr(function))}"
            raise UserError("E113", loc=author_loc(), what=what, hint="def my_rule(p, g, average=state(), *, lr=...):")
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            what = f"`{function.__name__}` does not return: it yields, or is async"
            raise UserError("E113", loc=of_code(function.__code__), what=what, hint="a plain def that ends with return")
        return _spec(function, cite, like, name, evaluate, matrix)

    return make if function is None else make(function)


MOST_FLAGS = 10
"""Flags of a rule: code is generated for each of their settings."""

_NO_TENSORS = (
    "a further tensor, such as the diagonal of a Hessian, is an input, which opt.feed(hessian=...) gives: "
    "hessian=input(); what steps keep is a state: average=state()"
)


def _spec(
    function: Callable[..., Any], cite: str, like: str | None, name: str | None,
    evaluate: Callable[..., Any] | None, matrix: MatrixKind | Literal["blocks"],
) -> Spec:  # fmt: skip
    source = SpecSource(function)
    if not is_snake(source.name):
        spelled = snake(source.name)
        hint = f"def {spelled}(p, g, ...)" if is_snake(spelled) else "def my_rule(p, g, ...)"
        hint += '; the class is named by @optimizer(name="...")'
        raise UserError("E115", loc=source.head, name=source.name, why="a spec is named in snake_case", hint=hint)
    takes_step, signature = _schema(function, source)
    defaults = {d.name: d.default for d in signature.hypers}
    spec = Spec(
        name=source.name,
        class_name=name or camel(source.name),
        doc=_doc(function),
        cite=cite,
        like=like,
        loc=source.head,
        hypers=signature.hypers,
        flags=tuple(usual(d, defaults) if d.limits else d for d in signature.flags),
        states=signature.states,
        host_states=signature.host_states,
        takes_step=takes_step,
        matrix="first" if matrix == "blocks" else matrix,
        order=("p", *signature.order),
        function=function,
        source=source,
        readings=Readings(check.trace, check.check),
        evaluation=evaluation_of(evaluate, signature) if evaluate is not None else None,
        blocks=matrix in ("blocks", "heads"),
    )
    check_declarations(spec)
    _check_return(spec)
    return spec


def _schema(function: Callable[..., Any], source: SpecSource) -> tuple[bool, Schema]:
    """Return whether a rule takes the step, and what its signature declares."""
    parameters = list(inspect.signature(function).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    leaves = [p.name for p in parameters if p.kind in positional and p.default is p.empty]
    if leaves not in (["p", "g"], ["p", "g", "t"]):
        more = {"hint": _NO_TENSORS} if leaves[:2] == ["p", "g"] else {}
        raise UserError("E114", loc=source.head, got=", ".join(leaves) or "none", **more)
    if "t" in source.parameters and "t" not in leaves:
        hint = f"def {source.name}(p, g, t, ...) takes the step; a state or hyper-parameter is called otherwise"
        raise UserError("E115", loc=source.parameters["t"], name="t", why="it is the number of the step", hint=hint)
    return "t" in leaves, schema([declaration_of(p, source) for p in parameters if p.name not in LEAVES])


def check_declarations(spec: Spec) -> None:
    """Raise UserError for names, references and defaults of the signature that are wrong."""
    if not is_text(spec.doc) or not is_text(spec.cite):
        what = f"the docstring of `{spec.name}`, or its cite=, has a NUL or half of a character"
        raise UserError("E113", loc=spec.loc, what=what, hint=r'a text with backslashes is r"""..."""')
    if len(spec.flags) > MOST_FLAGS:
        what = f"`{spec.name}` has {len(spec.flags)} flags, and each of their 2^{len(spec.flags)} settings is a rule"
        hint = f"{MOST_FLAGS} at most: what differs by a number is a hyper-parameter, and where() chooses by it"
        raise UserError("E113", loc=spec.loc, what=what, hint=hint)
    _check_names(spec)
    _check_references(spec)
    _check_uses(spec)
    _check_defaults(spec)


def evaluation_of(function: Callable[..., Any], declared: Schema) -> Evaluation:
    """The function of the weights to evaluate with; E127 where it takes or reads what generated code does not have,
    and what reading it on values raises, as of a rule."""
    source = SpecSource(function)
    states = {d.name: True for d in declared.states if d.space == spaces.elem}
    states |= {d.name: False for d in declared.host_states}
    hypers = {d.name: d for d in declared.hypers}
    parameters = inspect.signature(function).parameters
    options = [name for name, x in parameters.items() if x.kind is x.KEYWORD_ONLY]
    given = [name for name in parameters if name not in options]
    first = given.pop(0) if given else "none"
    for wrong, why in (
        ([first] if first != "p" else [], "its first parameter is p, got {}"),
        (sorted({*given} - states.keys()), "before the `*` it takes element-wise states and scalars, got {}"),
        (sorted({*options} - hypers.keys()), "after the `*` it takes hyper-parameters, got {}"),
        (source.free_names(), "it reads {}, which generated code does not have"),
    ):
        if wrong:
            raise UserError("E127", loc=source.head, name=source.name, why=why.format(", ".join(wrong)))
    check_weights(function, source, {name: states[name] for name in given}, [hypers[name] for name in options])
    return Evaluation(tuple(given), tuple(options), source.text(), function)


def _doc(function: Callable[..., Any]) -> str:
    """The function's docstring, else its module's.  A notebook, a module without a file, has IPython's own."""
    module = function.__globals__
    own = inspect.getdoc(function) or (module.get("__doc__") if "__file__" in module else "")
    return inspect.cleandoc(own or "")


def declaration_of(p: inspect.Parameter, source: SpecSource) -> Declaration:
    """Return a parameter's declaration with its name and place; E111 where it has none, or stands in a wrong place."""
    loc, d = source.parameters.get(p.name, source.head), p.default
    if isinstance(d, (StateDecl, HostStateDecl, HyperDecl, FlagDecl)):
        option = isinstance(d, (HyperDecl, FlagDecl))
        if option == (p.kind is p.KEYWORD_ONLY):
            named = replace(d, name=p.name, loc=loc)
            return replace(named, parts=_parts(p.name, named, source)) if isinstance(named, HyperDecl) else named
        kind = "a hyper-parameter" if isinstance(d, HyperDecl) else "a flag"
        got = f"{kind} before the `*`" if option else "a state after the `*`"
        hint = "it stands after the `*`" if option else "states stand before the `*`"
        raise UserError("E111", loc=loc, name=p.name, got=got, hint=hint)
    if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
        stars = "*" if p.kind is p.VAR_POSITIONAL else "**"
        hint = "name every state and hyper-parameter; a lone `*` divides them"
        raise UserError("E111", loc=loc, name=f"{stars}{p.name}", got="any number of arguments", hint=hint)
    if callable(d) and d is not p.empty:
        called = getattr(d, "__name__", "it")
        raise UserError("E111", loc=loc, name=p.name, got=f"`{called}` itself", hint=f"call it: {called}(...)")
    raise UserError("E111", loc=loc, name=p.name, got="without a default" if d is p.empty else f"{d!r}")


def _parts(name: str, decl: HyperDecl, source: SpecSource) -> tuple[str, ...]:
    """The names of a hyper-parameter's scalars: the author's own where a tuple is unpacked."""
    if not decl.divided:
        return (name,)
    names, count = source.unpacked(name), len(decl.values)
    if names is None:
        return tuple(f"{name}_{k}" for k in range(count))
    if len(names) != count:
        loc = source.parameters[name]
        raise UserError("E117", loc=loc, name=name, want=count, got=", ".join(part for part, _ in names))
    # `_, beta2 = betas` leaves a part without a name; `a, b = betas` names one as generated code names something else.
    taken = {"_", *RESERVED, *VARIABLES, *CALLED} - {*LEAVES}
    return tuple(f"{name}_{k}" if part in taken else part for k, (part, _) in enumerate(names))


def _check_names(spec: Spec) -> None:
    """Every name of the schema is its own, and none is one that generated code needs."""
    named = [(d.name, d.loc) for d in (*spec.kept, *spec.flags)]
    for h in spec.hypers:
        places = dict(spec.source.unpacked(h.name) or ())
        named += [(h.name, h.loc)] + [(part, places.get(part, h.loc)) for part in h.parts if part != h.name]
    tensors, seen = {s.name for s in spec.states}, dict[str, Loc | None]()
    for name, loc in named:
        why, hint = _unusable(name, name in tensors, [other for other, _ in named])
        if not why and name in seen:
            both = [place for place in (loc, seen[name]) if place]
            hint = "call one of the two otherwise"
            raise UserError("E115", loc=both, name=name, why="it already names something else", hint=hint)
        if why:
            raise UserError("E115", loc=loc, name=name, why=why, hint=hint)
        seen[name] = loc


def _unusable(name: str, is_tensor: bool, others: Sequence[str]) -> tuple[str, str]:
    """Return why a name cannot be used, and a hint; empty where it can.  Tensors get an underscore in generated code
    where one of its own variables has the name."""
    if name in RESERVED or (name in VARIABLES | CALLED and not is_tensor):
        free = unique(name, {*RESERVED, *VARIABLES, *CALLED, *others})
        return "generated code needs this name", f"take another one, such as `{free}`"
    if is_tensor and name.startswith(("in_", "out_")):
        hint = f"take another one, such as `{name.partition('_')[2]}`"
        return "generated code puts in_ and out_ before the names of states", hint
    if re.fullmatch(rf"{DRAW}\d+", name):
        return "random numbers of elements have this name in generated code", f"take another one, such as `own_{name}`"
    if not is_name(name):
        plain = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
        hint = f"for instance `{plain}`" if is_name(plain) else "for instance `exp_avg`"
        return "names are made of letters, digits and single underscores between them", hint
    return "", ""


_REFERENCES: dict[type, dict[str, str]] = {
    StateDecl: {"when": "flag", "rank": _NUMBER, "init": _NUMBER, "normalized_by": "nonneg state"},
    HostStateDecl: {"when": "flag"},
    FlagDecl: {**dict.fromkeys(("nonzero", "every", "needs", "excludes"), _NUMBER), "fed": "input"},
    HyperDecl: {"lr_if": "flag"},
}
"""Option of a declaration -> what it names in quotes."""


def _names(d: Declaration, option: str) -> Sequence[str]:
    text = getattr(d, option)
    if not isinstance(text, str) or not text:
        return ()
    return flags_in(text) if option == "when" else text.split(" and ") if option == "fed" else (text,)


def _scalars(spec: Spec) -> set[str]:
    return {h.name for h in spec.hypers if not isinstance(h.default, (tuple, bool))}


def _check_references(spec: Spec) -> None:
    """Check the names in quotes: when=, nonzero=, init=, normalized_by=."""
    positive = {s.name for s in spec.states if s.nonneg}
    flags = {f.name for f in spec.flags}
    known = {"flag": flags, _NUMBER: _scalars(spec), "input": set(spec.inputs), "nonneg state": positive}
    for d in (*spec.kept, *spec.flags, *spec.hypers):
        for option, kind in _REFERENCES[type(d)].items():
            for name in _names(d, option):
                _refuse_unknown(spec, d, option, name, kind, known[kind])


def _check_uses(spec: Spec) -> None:
    """Check that what is named in quotes is of the kind that it has to be."""
    hypers, states = {h.name: h for h in spec.hypers}, {s.name: s for s in spec.states}
    for h in spec.hypers:
        if h.scheduled and len({h.name, "lr"} & _scalars(spec)) < 2:
            what = f"`{h.name}` is scheduled: a number beside `lr`, with which it rises and falls"
            raise UserError("E113", loc=h.loc, what=what, hint="lr=hyper(1e-3, ge=0) has to be there")
    clocks = {f.name for f in spec.flags if f.clock is not None}
    for d in spec.kept:
        for word in (w for w in flags_in(d.when) if w in clocks):
            raise UserError("E126", loc=d.loc, name=d.name, flag=word)
    for s in spec.states:
        _check_state(s, hypers, states)


def _refuse_unknown(spec: Spec, d: Declaration, option: str, name: str, kind: str, known: set[str]) -> None:
    """Raise UserError E110 unless what an option of a declaration names is known."""
    words, listed = [], f"{kind}s"
    if isinstance(d, HyperDecl):
        known = {f.name for f in spec.flags if not f.derived and d.scheduled}
        listed = "flags that are arguments"
    elif kind == _NUMBER:
        listed = f"numbers among the {kind}s"
    if option == "init" and isinstance(d, StateDecl):
        words = ["identity" if d.space.name in spaces.MATRICES else "param"]
    if name in (*known, *words):
        return
    what = f"{'flag' if isinstance(d, FlagDecl) else _NUMBER if isinstance(d, HyperDecl) else 'state'} `{d.name}`"
    note = f"{listed} of this spec: {', '.join(sorted(known)) or 'none'}"
    hint = did_you_mean(name, [*known, *words])
    if option == "rank" and hint.startswith("known"):
        hint = f"write {name}=hyper(128, ge=1, whole=True) after the `*`"
    value = getattr(d, option)
    raise UserError("E110", loc=d.loc, what=what, option=option, value=value, kind=kind, note=note, hint=hint)


def _check_state(s: StateDecl, hypers: Mapping[str, HyperDecl], states: Mapping[str, StateDecl]) -> None:
    """Check that what a state's rank=, init= and normalized_by= name is of the kind that it has to be."""
    rank, start, root = hypers.get(str(s.rank)), hypers.get(str(s.init)), states.get(s.normalized_by or "")
    if rank and not (rank.whole and rank.interval[0] >= 1 and {x.rank for x in states.values()} <= {"", s.rank}):
        what = f"`{s.rank}`, the rank of state `{s.name}`, is a whole number from 1 on, and one for all states"
        raise UserError("E113", loc=s.loc, what=what, hint=f"{s.rank}=hyper(128, ge=1, whole=True)")
    if start and s.nonneg and start.interval[0] < 0:
        what = f"state `{s.name}` is declared nonneg, and `{s.init}`, at which it starts, may be below 0"
        raise UserError("E113", loc=s.loc, what=what, hint=f"{s.init}=hyper(..., ge=0)")
    if root and not _is_quotient(s, root):
        raise UserError("E119", loc=[loc for loc in (s.loc, root.loc) if loc], name=s.name, root=root.name)


def _is_quotient(s: StateDecl, root: StateDecl) -> bool:
    """Return True if a state may be bounded by the root of another."""
    return not s.nonneg and root.space == s.space and (s.init in (0, "param") or root.init != 0)


def _check_defaults(spec: Spec) -> None:
    for f in spec.flags:
        if f.every is not None:
            h = spec.hyper(f.every)
            (steps,) = h.values
            if steps < 1 or not steps.is_integer():
                what = f"`{h.name}` counts the steps of flag `{f.name}`: a whole number from 1 on, got {steps:g}"
                places = [loc for loc in (h.loc, f.loc) if loc]
                raise UserError("E113", loc=places, what=what, hint=f"{h.name}=hyper({max(1, round(steps))}, ge=1)")
            if h.interval[0] < 1:
                what = f"`{h.name}` counts steps of flag `{f.name}`, from 1 on, and its range is {h.range or 'open'}"
                raise UserError("E113", loc=h.loc, what=what, hint=f"{h.name}=hyper({steps:g}, ge=1)")
    for h in spec.hypers:
        for part, value in zip(h.parts, h.values, strict=True):
            if not h.allows(value):
                hint = f"give it a default that is {h.range}, or {h.name} another range"
                raise UserError("E112", loc=h.loc, name=part, value=f"{value:g}", range=h.range, hint=hint)


def _check_return(spec: Spec) -> None:
    """Every `return` lists p and the states by name, in the order of the signature."""
    want = list(spec.order)
    line = f"return {', '.join(want)}"
    if not spec.source.returns:
        raise UserError("E122", loc=spec.loc, name=spec.name, want=len(want), got=0, hint=f"end with `{line}`")
    for node, parts in spec.source.returns:
        names = [name for name, _ in parts]
        for (name, loc), wanted in zip(parts, want, strict=False):
            if name is None and isinstance(node.value, (ast.List, ast.Dict, ast.Set)):
                raise UserError("E121", loc=loc, name=wanted, hint=f"end with `{line}`")
            if name is None:
                raise UserError("E121", loc=loc, name=wanted)
            if name != wanted:
                known = did_you_mean(name, want) if name not in want else ""
                note = f"`{name}` is another state" if name in want else ""
                hint = f"end with `{line}`" + (f"; {known}" if known.startswith("did") else "")
                raise UserError("E120", loc=loc, want=wanted, got=name, note=note, hint=hint)
        if len(names) != len(want):
            loc = spec.source.loc(node)
            raise UserError("E122", loc=loc, name=spec.name, want=len(want), got=len(names), hint=f"end with `{line}`")
