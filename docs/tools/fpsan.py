"""Try Triton's FpSan on fast maths: the figures of docs/decisions.md, 21.

    python -W ignore -m docs.tools.fpsan      # minutes; Triton 3.9

For each rule, the buffers in which kernels in strict and in fast maths agree bit for bit under FpSan, to which floats
are integers; and for each wrong rewrite, who notices it.
"""

import os
import tempfile

os.environ |= {"TRITON_INSTRUMENTATION_MODE": "fpsan", "TRITON_CACHE_DIR": tempfile.mkdtemp()}

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import torch

from optgen import passes
from optgen.driver.compile import compile as compiled
from tests import harness
from tests.ptx import driver
from tests.test_identities import DECAY, differing, folding, is_enclosed

RULES = (
    "sgd sgdw lion tiger signum srsgd adam adamw adagrad rmsprop adabelief yogi laprop adan adopt ademamix adamax "
    "nadam radam qhadam lamb padam"
)
RATE = "mul($lr, $weight_decay)"
WRONG = (
    ("sgdw", DECAY, f"div(1.0, add(1.0, {RATE}))"),
    ("lion", DECAY, f"div(1.0, add(1.0, {RATE}))"),
    ("tiger", DECAY, f"where(lt({RATE}, 1e-4), 1.0, {DECAY})"),
    ("signum", DECAY, f"add(1.0, {RATE})"),
    ("lion", "sub(1.0, $beta2)", "sub($beta2, 1.0)"),
    ("tiger", "sub(1.0, $beta)", "sub(1.0, mul(1.0000001, $beta))"),
    ("srsgd", "sub($restarting_iter, 1.0)", "$restarting_iter"),
    ("adamw", "$eps", "mul(1.0000001, $eps)"),
)
"""A rule, a node that fast maths makes of it, and a wrong one in its place."""


def options_of(rule: str) -> dict[str, float]:
    return {"weight_decay": 0.1} if (rule, DECAY) in {row[:2] for row in WRONG} else {}


def kept(rule: str, maths: str, fold: object = passes.fold) -> Iterator[torch.Tensor]:
    """Yield the weight and the states after two steps at two rates, under FpSan."""
    with patch.object(passes, "PROGRAM_PASSES", (passes.decompose, fold, *passes.PROGRAM_PASSES[2:])):
        cls = compiled(replace(harness.spec_of(rule)), harness.plan_of("fp32"), maths)
    for lr in (1e-2, 1e-4):
        draw = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.randn(4, 256, generator=draw))
        opt = cls([p], lr=lr, backend="triton", **options_of(rule))
        for _ in range(2):
            p.grad = torch.randn(4, 256, generator=draw) * 0.01
            opt.step()
        yield from (p.detach(), *(x for x in opt.state[p].values() if isinstance(x, torch.Tensor) and x.ndim > 1))


def agreeing(rule: str, fold: object = passes.fold) -> list[bool]:
    pairs = zip(kept(rule, "strict"), kept(rule, "fast", fold), strict=True)
    return [torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs]


def main() -> None:
    driver.install(90)
    agree = {rule: agreeing(rule) for rule in RULES.split()}
    print(*agree.items(), f"{sum(map(all, agree.values()))} of {len(agree)} rules agree in all buffers", sep="\n")
    for rule, right, wrong in WRONG:
        fold = folding(right, wrong)
        found = any(was and not now for was, now in zip(agree[rule], agreeing(rule, fold), strict=True))
        enclosures = [is_enclosed(rule, x, **options_of(rule)) for x in (passes.fold, fold)] == [True, False]
        by = {"FpSan": found, "identities": bool(differing(harness.spec_of(rule), fold)), "enclosures": enclosures}
        print(rule, right, "->", wrong, by)


if __name__ == "__main__":
    main()
