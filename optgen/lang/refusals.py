"""Name the Python construct that asked a traced value for its truth or its number, and the text to write instead."""

from __future__ import annotations

import ast
import re
import sys

from optgen.base.errors import UserError
from optgen.base.loc import Loc
from optgen.lang.source import TextSpan, smallest, span_of, within
from optgen.ops.prims import PRIMS

# Python's function -> ours, where that is not the primitive of its name.
_FUNCTIONS = {
    "max": "maximum(a, b)", "min": "minimum(a, b)", "log2": "log(x) / log(2.0)", "exp2": "2.0 ** x", "fabs": "abs(x)",
    "pow": "x ** y", "maximum": "maximum(a, b)", "minimum": "minimum(a, b)", "clamp": "clip(x, low, high)",
    "clip": "clip(x, low, high)", "isclose": "abs(a - b) < tolerance", "copysign": "abs(x) * sign(y)",
    "square": "square(x)", "round": "rint(x)", "ceil": "-floor(-x)", "lerp": "a + weight * (b - a)", "norm": "norm(x)",
    "arctan2": "atan2(y, x)",
    "sum": "total(x)", "mean": "mean(x)", "amax": "amax(x)", "dot": "dot(a, b)",
}  # fmt: skip
_OPERANDS = {1: "x", 2: "a, b", 3: "c, a, b"}
# Families that do not exist, by the names that they go by in torch, NumPy and math.
_MISSING = (
    (
        "rand randn rand_like randn_like randint normal uniform bernoulli random gauss noise dropout",
        "random numbers of rules are normal(like, key) and uniform(like, key) in optgen.lang, of a matrix and a step",
    ),
    (
        "mm bmm mv addmm einsum outer kron mT t svd qr eigh eig inv inverse pinv cholesky linalg matrix_power",
        "of whole matrices there are a @ b, x.T, qr(x), eigenvectors(x), inverse_root(x, p) and "
        "newton_schulz(x) in optgen.lang; of elements dot(a, b), row_sum(a * b) and col_sum(a * b)",
    ),
    ("diag diagonal", "identity(x) * x is x with zeros beside its diagonal, and trace(x) the sum of that"),
    (
        "softplus softmax atan arctan sin cos tan sinh cosh log1p expm1 logsumexp erfc",
        "element-wise there are exp, log, tanh, sigmoid, erf, atan2, sqrt, rsqrt, cbrt, square and power",
    ),
)


def missing(name: str) -> str:
    """Return the hint for a function or attribute of a family that does not exist; "" for other names."""
    return next((hint for names, hint in _MISSING if name in names.split()), "")


FUNCTIONS = (
    "sqrt, rsqrt, cbrt, square, power, exp, log, tanh, sigmoid, erf, atan2, sign, floor, rint, maximum, minimum, clip, "
    "equal and where"
)
_TRUTH = {
    "max": "", "min": "", "sorted": "use maximum(a, b) and minimum(a, b) from optgen.lang",
    "any": "write (a) | (b)", "all": "write (a) & (b)", "bool": "a value has no truth while the spec is traced",
    "filter": "use where(c, a, b) from optgen.lang", "next": "use where(c, a, b) from optgen.lang",
}  # fmt: skip
MODULES = ("torch.", "np.", "numpy.", "math.")
NO_TENSORS = "a value is neither a tensor nor a number: operators, and functions of optgen.lang, take it"


def _span(loc: Loc) -> TextSpan:
    return (loc.line, loc.col, loc.end_line, loc.end_col)


def called(loc: Loc) -> tuple[str, str]:
    """(last name, whole name as written) of the innermost call around a place; empty where there is none."""
    call = smallest(loc.file, _span(loc), (ast.Call,))
    if not isinstance(call, ast.Call):
        return "", ""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name, ast.unparse(call.func)


def of_module(loc: Loc, name: str) -> bool:
    """Return True if something is taken from a module of that name at a place: math.pi, np.sqrt(x)."""
    attribute = smallest(loc.file, _span(loc), (ast.Attribute,))
    return isinstance(attribute, ast.Attribute) and isinstance(attribute.value, ast.Name) and attribute.value.id == name


def indexed(loc: Loc) -> str:
    """The name in the innermost `name[...]` around a place, or nothing."""
    subscript = smallest(loc.file, _span(loc), (ast.Subscript,))
    return getattr(subscript.value, "id", "") if isinstance(subscript, ast.Subscript) else ""


def _ours(name: str) -> str:
    """Return our expression for a function of Python's of that name, or nothing."""
    row = PRIMS.get(name)
    if name in _FUNCTIONS or row is None or name not in (*sys.modules["optgen.lang"].__dict__["__all__"], "abs"):
        return _FUNCTIONS.get(name, "")
    return f"{name}({_OPERANDS[row.arity]})"


def instead_of(name: str) -> str:
    """The hint that names our function for Python's, or says that there is none; "" for unknown names."""
    ours = _ours(name)
    exported = sys.modules["optgen.lang"].__dict__["__all__"]
    from_lang = any(word in exported for word in re.findall(r"(\w+)\(", ours))
    return f"use {ours}" + (" from optgen.lang" if from_lang else "") if ours else missing(name)


def foreign(loc: Loc) -> UserError:
    """A function of another module, such as NumPy's."""
    name, written = called(loc)
    return UserError("E102", loc=loc, what=f"{written}()" if written else "numpy", hint=instead_of(name) or NO_TENSORS)


def length(loc: Loc) -> UserError:
    """len(), asked for directly or by a function of another module."""
    if called(loc)[0] != "len":
        return foreign(loc)
    hint = "use rows(x), columns(x) or elements(x) from optgen.lang"
    return UserError("E102", loc=loc, what="len()", hint=hint)


def number(loc: Loc, default: str) -> UserError:
    """float() and int(), asked for directly or by a function of the math module."""
    what = called(loc)[1]
    return _asked(loc, f"{what}()" if what else default, "a value has no number while the spec is traced")


def iteration(loc: Loc) -> UserError:
    """iter(), asked for by an unpacking, a loop or a function such as sum()."""
    return _asked(loc, "unpacking", "only a tuple hyper-parameter has parts")


def _asked(loc: Loc, what: str, hint: str) -> UserError:
    """Return the error for something asked of a value, unless that is by a function of which there is one of ours."""
    name, written = called(loc)
    if _ours(name):
        return UserError("E102", loc=loc, what=f"{written}()", hint=instead_of(name))
    return UserError("E102", loc=loc, what=what, hint=hint)


_WORDS = {ast.If: "if", ast.IfExp: "if", ast.While: "while", ast.Assert: "assert"}


def _switch(scalar: str, denied: str = "") -> dict[str, str]:
    """The hint for a condition that asks whether a host scalar is 0; nothing where it asks otherwise."""
    if not scalar:
        return {}
    flag = f"has_{scalar}"
    return {"hint": f'{flag}=flag(nonzero="{scalar}") in the signature is a switch that follows it: if {denied}{flag}:'}


def compared(loc: Loc, mark: str, scalar: str) -> UserError:
    """`==` or `!=`; `scalar`: the hyper-parameter that is compared with 0, or nothing."""
    ours = "equal(a, b)" if mark == "==" else "~equal(a, b)"
    member = smallest(loc.file, _span(loc), (ast.Compare,))
    if isinstance(member, ast.Compare) and isinstance(member.ops[0], (ast.In, ast.NotIn)):
        word, either = "in", "equal(a, x) | equal(a, y)"
        if isinstance(member.ops[0], ast.NotIn):
            word, either = "not in", f"~({either})"
        return UserError("E102", loc=loc, what=word, hint=f"write {either}, equal from optgen.lang")
    at = smallest(loc.file, _span(loc), tuple(_WORDS))
    test = getattr(at, "test", None)
    if test is None or not within(_span(loc), span_of(test)):
        where_from = " from optgen.lang" if mark == "==" else ", equal from optgen.lang"
        return UserError("E102", loc=loc, what=mark, hint=f"use {ours}{where_from}")
    hint = _switch(scalar) or {"hint": f"write where({ours}, x, y), equal and where from optgen.lang"}
    return UserError("E101", loc=loc, what=_WORDS[type(at)], **hint)


def _is_test(loc: Loc) -> bool:
    """Return True if a statement or an operator of Python's, and no call, asks for the truth of the value at a place.
    """
    at = smallest(loc.file, _span(loc), (*_WORDS, ast.BoolOp, ast.UnaryOp))
    asked = getattr(at, "values", None) or [getattr(at, "operand", None) or getattr(at, "test", None)]
    return any(x is not None and span_of(x) == _span(loc) for x in asked)


def _negated(operand: ast.expr, scalar: str, condition: bool) -> dict[str, str]:
    """The hint for `not x`; `condition`: whether x is one."""
    text = ast.unparse(operand)
    if scalar:
        return _switch(scalar, "not ")
    if not condition:
        return {"hint": f"write equal({text}, 0.0); for an `if`, where(equal({text}, 0.0), a, b)"}
    return {"hint": f"write ~({text}); for an `if`, where(~({text}), a, b)"}


def truth(loc: Loc, scalar: str = "", condition: bool = True) -> UserError:
    """bool(), asked for by a statement, an operator or a function.

    scalar     of which hyper-parameter, or nothing
    condition  whether it is asked of a comparison, not of a number
    """
    at = smallest(loc.file, _span(loc), (*_WORDS, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.Call))
    name, written = called(loc)
    if isinstance(at, ast.Call) and (name in _TRUTH or written.startswith(MODULES) or not _is_test(loc)):
        ours = instead_of(name) or _TRUTH.get(name, NO_TENSORS)
        return UserError("E102", loc=loc, what=f"{written}()", hint=ours)
    if isinstance(at, ast.Compare) and len(at.ops) > 1:
        return UserError("E101", loc=loc, what="a < b < c", hint="write (low < x) & (x < high)")
    # A plain comparison or call is what is asked, not who asks.
    return _asked_by(loc, scalar, condition)


def _asked_by(loc: Loc, scalar: str, condition: bool) -> UserError:
    """Return the error for the truth that the innermost statement or operator around a place asks for."""
    at = smallest(loc.file, _span(loc), (*_WORDS, ast.BoolOp, ast.UnaryOp))
    if isinstance(at, ast.BoolOp):
        word, mark = ("and", "&") if isinstance(at.op, ast.And) else ("or", "|")
        return UserError("E101", loc=loc, what=word, hint=f"write (a) {mark} (b)")
    test = at if isinstance(at, ast.UnaryOp) else getattr(at, "test", None)
    denied = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    more = _switch(scalar)
    if isinstance(at, ast.Assert):
        more = {"hint": f"drop it; what a hyper-parameter may be is its range: {scalar or 'lr'}=hyper(..., gt=0)"}
    elif isinstance(test, ast.UnaryOp) and denied:
        more = _negated(test.operand, scalar, condition)
    what = "not" if test is at and denied else _WORDS.get(type(at), "if")
    return UserError("E101", loc=loc, what=what, **more)
