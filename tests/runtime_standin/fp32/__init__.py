from optgen.runtime import Field, Variant

from .. import records as rule

SMALL_NUMEL = 0
M = Field("exp_avg", "float32", state="exp_avg")
V = Field("exp_avg_sq", "float32", state="exp_avg_sq")
V_MAX = Field("max_exp_avg_sq", "float32", state="max_exp_avg_sq")

VARIANTS = tuple(
    Variant(
        function=f"adamw_amsgrad_{dtype}" if amsgrad else f"adamw_{dtype}",
        param=dtype,
        flags={"amsgrad": amsgrad},
        fields=(M, V, V_MAX) if amsgrad else (M, V),
        scalars=rule.SCALARS,
        host=rule.host,
    )
    for dtype in ("float32", "bfloat16", "float16")
    for amsgrad in (False, True)
)
