"""`@optimizer`: a function's signature read as a schema."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, Literal, overload

from optgen.base.errors import UserError, did_you_mean
from optgen.base.loc import Loc, of_code
from optgen.base.names import camel, is_name, is_snake, is_text
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
        what = f'matrix= is "last", "first", "blocks" or "heads", got {matrix!r}'
        raise UserError("E113", loc=author_loc(), what=what)

    def make(function: Callable[..., Any]) -> Spec:
        plain = isinstance(function, FunctionType) and not function.__code__.co_flags & _YIELDS
        if not plain:
            called = getattr(function, "__name__", repr(function))
            what = f"a rule is a plain function without yield and async, got {called}"
            place = of_code(function.__code__) if isinstance(function, FunctionType) else author_loc()
            raise UserError("E113", loc=place, what=what)
        return _spec(function, cite, like, name, evaluate, matrix)

    return make if function is None else make(function)


_YIELDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

MOST_FLAGS = 10
"""Flags of a rule: code is generated for each of their settings."""

def _spec(
    function: Callable[..., Any], cite: str, like: str | None, name: str | None,
    evaluate: Callable[..., Any] | None, matrix: MatrixKind | Literal["blocks"],
) -> Spec:  # fmt: skip
    source = SpecSource(function)
    if not is_snake(source.name):
        hint = 'def my_rule(p, g, ...); the class is named by @optimizer(name="...")'
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
        raise UserError("E114", loc=source.head, got=", ".join(leaves) or "none")
    return "t" in leaves, schema([declaration_of(p, source) for p in parameters if p.name not in leaves])


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
    got = "without a default" if d is p.empty else f"`{getattr(d, '__name__', d)}`"
    raise UserError("E111", loc=loc, name=p.name, got=got)


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
        why = "it already names something else" if name in seen else _unusable(name, name in tensors)
        if why:
            both = [place for place in (loc, seen.get(name)) if place]
            raise UserError("E115", loc=both, name=name, why=why)
        seen[name] = loc


def _unusable(name: str, is_tensor: bool) -> str:
    """Return why a name cannot be used; "" where it can.  Tensors get an underscore in generated code where one of its
    own variables has the name."""
    if name in RESERVED or (name in VARIABLES | CALLED and not is_tensor):
        return "generated code needs this name"
    if is_tensor and name.startswith(("in_", "out_")):
        return "generated code puts in_ and out_ before the names of states"
    return "" if is_name(name) else "names are made of letters, digits and single underscores between them"


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
            if h.interval[0] < 1 or steps < 1 or not steps.is_integer():
                what = f"`{h.name}` counts steps of flag `{f.name}`: a whole number in a range from 1 on"
                places = [loc for loc in (h.loc, f.loc) if loc]
                raise UserError("E113", loc=places, what=f"{what}, got {steps:g}", hint=f"{h.name}=hyper(10, ge=1)")
    for h in spec.hypers:
        for part, value in zip(h.parts, h.values, strict=True):
            if not h.allows(value):
                hint = f"give it a default that is {h.range}, or {h.name} another range"
                raise UserError("E112", loc=h.loc, name=part, value=f"{value:g}", range=h.range, hint=hint)


def _check_return(spec: Spec) -> None:
    """Every `return` lists p and the states by name, in the order of the signature."""
    for node, parts in spec.source.returns or ((spec.source.node, ()),):
        names = [name for name, _ in parts]
        if names != [*spec.order]:
            wrong = (place for (name, place), want in zip(parts, spec.order, strict=False) if name != want)
            got = ", ".join(name or "an expression" for name in names) or "nothing"
            place = next(wrong, spec.source.loc(node) if parts else spec.loc)
            raise UserError("E120", loc=place, name=spec.name, want=", ".join(spec.order), got=got)
