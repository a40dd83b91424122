"""The language of specs and storage formats."""

from optgen.lang.compose import clipped, lookahead
from optgen.lang.declare import (
    FlagDecl, HostStateDecl, HyperDecl, StateDecl, col, flag, hyper, model_state, nonneg, row, scalar, shape_flag,
    state, tensor_state,
)
from optgen.lang.matrices import newton_schulz
from optgen.lang.optimizer import optimizer
from optgen.lang.reductions import (
    amax, col_max, col_mean, col_sum, columns, dot, elements, mat_mean, mat_norm, mean, model_dot, model_norm,
    model_total,
    norm, rms, row_max, row_mean, row_sum, rows, total,
)
from optgen.lang.spec import Spec, Trace
from optgen.lang.values import (
    Value, cbrt, clip, equal, exp, floor, log, maximum, minimum, power, rint, rsqrt, sign, sqrt, square, where,
)

__all__ = [
    "FlagDecl", "HostStateDecl", "HyperDecl", "Spec", "StateDecl", "Trace", "Value", "amax", "cbrt", "clip",
    "clipped", "col", "col_max", "col_mean", "col_sum", "columns", "dot", "elements", "equal", "exp", "flag",
    "floor", "hyper", "log", "lookahead", "mat_mean", "mat_norm", "maximum", "mean", "minimum",
    "model_dot", "model_norm",
    "model_state", "model_total", "newton_schulz", "nonneg", "norm", "optimizer", "power", "rint", "rms", "row",
    "row_max", "row_mean", "row_sum", "rows", "rsqrt", "scalar", "shape_flag", "sign", "sqrt", "square", "state",
    "tensor_state", "total", "where",
]  # fmt: skip
