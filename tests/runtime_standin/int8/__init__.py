from optgen.runtime import Field, Variant

from .. import records as rule

SMALL_NUMEL = 16
BLOCK = 8
WEIGHT = {
    "float32": (),
    "bfloat16": (Field("weight_low", "int16", state="p"),),
    "float16": (Field("weight_master", "float32", state="p"),),
}
LARGE = (
    Field("exp_avg", "uint8", zero=128, state="exp_avg"),
    Field("exp_avg_scale", "float32", per=BLOCK, state="exp_avg"),
    Field("exp_avg_sq", "float32", state="exp_avg_sq"),
)
SMALL = (Field("exp_avg", "float32", state="exp_avg"), Field("exp_avg_sq", "float32", state="exp_avg_sq"))

VARIANTS = tuple(
    Variant(
        function=f"adamw_{dtype}_small" if small else f"adamw_{dtype}",
        param=dtype,
        small=small,
        flags={"amsgrad": False, "has_decay": decay},
        fields=(*WEIGHT[dtype], *(SMALL if small else LARGE)),
        scalars=rule.SCALARS,
        host=rule.host,
        block=1 if small else BLOCK,
        stochastic=not small,
        host_states=(("decay_product", 1.0),),
    )
    for dtype in WEIGHT
    for small in (False, True)
    for decay in (False, True)
)
