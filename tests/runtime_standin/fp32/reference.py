import torch

from .. import records as rule


def step(p, g, m, v, *rest):
    *v_max, scalars = (*rest[:-10], rest[-10:-2])
    weight = p.float()  # p itself where it is fp32
    rule.update(weight, g.float(), m, v, *(v_max or [None]), *scalars)
    if weight is not p:
        p.copy_(weight)


def decode(p, m, v, v_max=None):
    found = {"p": p.float(), "exp_avg": m, "exp_avg_sq": v}
    return found if v_max is None else {**found, "max_exp_avg_sq": v_max}


def maker(dtype):
    return lambda values: {**values, "p": values["p"].to(dtype)}


for _name in ("float32", "bfloat16", "float16"):
    for _rule in ("adamw", "adamw_amsgrad"):
        globals()[f"{_rule}_{_name}"] = step
        globals()[f"{_rule}_{_name}_decode"] = decode
        globals()[f"{_rule}_{_name}_encode"] = maker(getattr(torch, _name))
