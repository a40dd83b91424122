"""The language of specs and storage formats."""

from optgen.lang.compose import low_rank, wrapper
from optgen.lang.declare import (
    FlagDecl, HostStateDecl, HyperDecl, StateDecl, col, flag, hyper, input, low_rank_state, mat, matrix_state,
    model_state, nonneg, orthogonal, row, scalar, shape_flag, state, symmetric, tensor_state, triangular,
)
from optgen.lang.matrices import (
    bjorck, column_norms, eigenvectors, finite, gram, identity, inverse_root, newton_schulz, norm_lower_bound,
    normal, orthogonal_iteration, qr, singular_vectors, solve_triangular, sorting, top_rows, trace, triangle,
    unwide, wide, zero_product,
)
from optgen.lang.optimizer import optimizer
from optgen.lang.reductions import (
    amax, col_max, col_mean, col_sum, columns, dot, elements, mat_max, mat_mean, mat_norm, mean, model_dot, model_norm,
    model_total, norm, rms, row_max, row_mean, row_sum, rows, total,
)
from optgen.lang.spec import Spec, Trace
from optgen.lang.values import (
    Value, atan2, capped, cbrt, clip, equal, exp, floor, log, maximum, minimum, power, rint, rsqrt, sigmoid, sign,
    sqrt, square, tanh, where,
)
from optgen.lang.wrappers import (
    adagc, agc, asam, averaged, cautious, cautious_decay, centralized, clipped, clipped_value, ema, ema_nesterov, gpa,
    grams, gsam, hyperball, lookahead, mars, orthograd, sam, schedule_free, snoo, spam_reset, warmed_up, zclip,
)

__all__ = [
    "FlagDecl", "HostStateDecl", "HyperDecl", "Spec", "StateDecl", "Trace", "Value", "adagc", "agc", "amax", "asam",
    "atan2", "averaged", "bjorck", "capped", "cautious", "cautious_decay", "cbrt", "centralized", "clip", "clipped",
    "clipped_value", "col", "col_max", "col_mean", "col_sum", "column_norms", "columns", "dot", "eigenvectors",
    "elements", "ema", "ema_nesterov", "equal", "exp", "finite", "flag", "floor", "gpa", "gram", "grams", "gsam",
    "hyper", "hyperball", "identity", "input", "inverse_root", "log", "lookahead", "low_rank", "low_rank_state", "mars",
    "mat", "mat_max", "mat_mean", "mat_norm", "matrix_state", "maximum", "mean", "minimum", "model_dot",
    "model_norm", "model_state", "model_total", "newton_schulz", "nonneg", "norm", "norm_lower_bound", "normal",
    "optimizer", "orthogonal", "orthogonal_iteration", "orthograd", "power", "qr", "rint", "rms", "row", "row_max",
    "row_mean", "row_sum", "rows", "rsqrt", "sam", "scalar", "schedule_free", "shape_flag", "sigmoid", "sign",
    "singular_vectors", "snoo", "solve_triangular", "sorting", "spam_reset", "sqrt", "square", "state", "symmetric",
    "tanh", "tensor_state", "top_rows", "total", "trace", "triangle", "triangular", "unwide",
    "warmed_up", "where", "wide", "wrapper", "zclip", "zero_product",
]  # fmt: skip
