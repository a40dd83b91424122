"""A generated package as a person would fake it: AdamW with three plans, to test the runtime without the compiler.

fp32    fp32 states under torch's names; the same operations as torch's own AdamW, so the same bits
int8    toy 8-bit momentum in blocks of 8, rounded stochastically; split or copied weights; a host state
probe   no optimizer: a Triton kernel that counts the visits to every element and block
"""

from importlib import import_module

from optgen.runtime import Flag, Hyper, Optimizer, Variant
from optgen.runtime.layout import plans
from optgen.runtime.records.join import Pair, Reference


class AdamW(Optimizer):
    SPEC = "adamw"
    HYPERS = (
        Hyper("lr", 1e-3, ge=0.0),
        Hyper("betas", (0.9, 0.999), ge=0.0, lt=1.0),
        Hyper("eps", 1e-8, ge=0.0),
        Hyper("weight_decay", 1e-2, ge=0.0),
    )
    FLAGS = (Flag("amsgrad", False), Flag("has_decay", nonzero="weight_decay"))
    PLANS = ("fp32", "int8", "probe", "absent")
    DEFAULT_PLAN = {"float32": "fp32", "bfloat16": "int8", "float16": "int8"}

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        *,
        maximize=False,
        plan=None,
        backend="auto",
        seed=0,
        foreach=None,
        fused=None,
        capturable=False,
        differentiable=False,
    ):
        hypers = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize)
        super().__init__(
            params, hypers, plan=plan, backend=backend, seed=seed,
            foreach=foreach, fused=fused, capturable=capturable, differentiable=differentiable,
        )  # fmt: skip


def pair(name: str) -> Pair:
    """A plan's module, whose `reference` has functions for each variant, as the runtime sees what is generated."""
    module = import_module(f"{__name__}.{name}")

    def reference(variant: Variant) -> Reference:
        own, name = import_module(f"{module.__name__}.reference"), variant.function
        names = name, f"{name}_decode", f"{name}_encode"
        return Reference(*(lambda *args, at=at, **more: getattr(own, at)(*args, **more) for at in names))

    return Pair(name, module.VARIANTS, module.SMALL_NUMEL, reference, module)


for _name in ("fp32", "int8", "probe"):
    plans.known[AdamW, _name] = pair(_name)
