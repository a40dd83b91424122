"""Strict maths: the Triton kernel, in the interpreter, gives the eager reference's bits: codes, scales, weights."""

import json
import re
import zlib
from pathlib import Path

import pytest
import torch

from optgen.lang import floor, hyper, optimizer
from tests import harness

SHAPES = [(), (1,), (63,), (64,), (257,), (16, 64), (5, 70), (3, 7, 11), (3, 320), (2048,)]
CASES = [
    *(("adamw", plan, "bfloat16", {}) for plan in ("fp32", "bf16", "bf16_sr", "bf16_kahan", "fp32_master", "split32")),
    *(("adamw", plan, "bfloat16", {}) for plan in ("int8_split24", "int8_rn_split24", "flashoptim", "bnb8")),
    *(("adamw", plan, "bfloat16", {}) for plan in ("int6_split24", "int5_split24", "int4_split24")),
    ("adamw", "int5_int3_split24", "bfloat16", {}),
    ("adamw", "int8", "float32", {}),
    ("adamw", "int8_split24", "float16", {}),
    ("adamw", "int8_split24", "bfloat16", {"amsgrad": True}),
    ("lion", "int8_split24", "bfloat16", {}),
    ("sgd", "int8_split24", "bfloat16", {"has_momentum": True}),
    ("sgd", "int8_rn_split24", "bfloat16", {"has_momentum": True, "nesterov": True}),
]


@pytest.mark.parametrize(("name", "plan", "param", "flags"), CASES, ids=lambda x: str(x))
def test_same_bits(name: str, plan: str, param: str, flags: dict[str, bool], tmp_path: Path) -> None:
    pair = harness.strict(name, plan, tmp_path, param, flags)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {plan}".encode()))
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
    ours, theirs = ([pair.buffers(w.shape, w) for w in weights] for _ in range(2))
    for step in range(1, 4):
        grads = []
        for shape in SHAPES:
            scale = 10.0 ** float(torch.randint(-8, 3, (), generator=generator))
            grads.append((torch.randn(shape, generator=generator) * scale).to(getattr(torch, param)))
            if step == 2:
                grads[-1].view(-1)[::3] = 0
        for mine, g in zip(ours, grads, strict=True):
            pair.run_reference(mine, g, step, 0x1234567 * step, 99, lr=1e-2)
        pair.run_together([(x, g, 99) for x, g in zip(theirs, grads, strict=True)], step, 0x1234567 * step, lr=1e-2)
        for shape, mine, other in zip(SHAPES, ours, theirs, strict=True):
            assert not [key for key in mine if not harness.same_bits(mine[key], other[key])], (shape, step)


@optimizer()
def stepped(p, g, *, lr=hyper(1e-2, ge=0)):
    p = p - lr * floor(g)
    return p


def test_floor_of_subnormals(tmp_path: Path) -> None:
    pair = harness.Pair(stepped, harness.case_of(stepped, harness.plan_of("fp32"), "float32"), tmp_path)
    g = torch.tensor([-1e-40, 1e-40, -0.0, -1.5, 2.0, -(2.0**-126), 3e38])
    ours, theirs = pair.buffers(g.shape, torch.zeros(7)), pair.buffers(g.shape, torch.zeros(7))
    pair.run_reference(ours, g, 1, 0, 0, lr=1.0)
    pair.run_triton(theirs, g, 1, 0, 0, lr=1.0)
    assert harness.same_bits(ours["p"], theirs["p"])
    assert ours["p"].tolist() == (-torch.floor(g)).tolist()


COMPILED = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tools")
import kernel_stats
import triton.language as tl
from optgen.runtime.gpu.compiled import launched
from tests import harness, test_triton_strict

found = []
kernel_stats._read_nvidia = lambda asm, listed: found.append(asm["ptx"]) or ("", 0, 0)
for name, plan, param in (("stepped", "fp32", "float32"), ("adamw", "int8_split24", "bfloat16")):
    spec = harness.spec_of(name) if name != "stepped" else test_triton_strict.stepped
    case = harness.case_of(spec, harness.plan_of(plan), param)
    variant, kernels = harness.Pair(spec, case, Path(sys.argv[1])).triton
    fn = getattr(kernels, variant.function)
    sweep = kernels.CONSTANTS[variant.function]["SWEEP"]
    constants = {"SWEEP": launched(sweep, grad=getattr(tl, param), tiles=4, aligned=True)}
    signature = {a: kernel_stats._POINTERS.get(a, "fp32") for a in fn.arg_names if a not in constants}
    kernel_stats.compile_for(fn, signature, constants, kernel_stats.TARGETS["sm_90"], aligned=("table", "work"))
print(json.dumps(found))
"""


def test_strict_kernels_for_a_device_flush_contract_and_approximate_nothing(
    compiling: dict[str, str], tmp_path: Path
) -> None:
    """The interpreter shows none of it."""
    stepped_text, adamw_text = json.loads(harness.python(COMPILED, str(tmp_path), env=compiling))
    assert "cvt.rmi.f32.f32" in stepped_text and "div.rn.f32" in adamw_text
    assert not re.findall(r".*(?:\.ftz|fma\.|\.approx|div\.full).*", stepped_text + adamw_text)
