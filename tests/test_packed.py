"""Codes of fewer than 8 bits: how they lie in bytes, what they take, and that nothing is lost on the way."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

import optgen
from optgen.formats import Blocked, LogMinMax, Plan, narrow
from optgen.ops import dtypes
from optgen.runtime.cpu import native
from optgen.runtime.reference.eager import Blocks
from specs import plans
from tests.harness import optimized
from tests.training import different, trained

PLANS = (plans.int6_split24, plans.int5_split24, plans.int4_split24)
each_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)
# Rows of whole blocks, of whole eights, of neither; shorter than a block, than eight; one element, and none.
SHAPES = [
    (64, 128), (70, 72), (70, 101), (200, 6), (4096,), (5001,), (1,), (), (0,), (3, 0), (2, 3, 3, 50), (1, 1),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [dtypes.u4, dtypes.u2, dtypes.u1], ids=str)
@pytest.mark.parametrize("columns", [8, 61, 64, 100])
def test_a_byte_holds_neighbours_lowest_bits_first(dtype: dtypes.DType, columns: int) -> None:
    """Against numpy's own unpacking of bits."""
    bits = dtype.bits
    b = Blocks(torch.empty(3, columns), 64)
    width = -(-columns // 8) * bits
    stored = torch.randint(0, 256, (3, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    ones = np.unpackbits(stored.numpy(), axis=1, bitorder="little").reshape(3, -1, bits)
    expected = (ones * (1 << np.arange(bits))).sum(-1)[:, :columns]
    codes = b.codes(stored, bits)
    assert np.array_equal(codes.reshape(3, -1)[:, :columns].numpy(), expected)
    again = b.codes(b.flat_codes(codes, bits), bits)
    assert np.array_equal(again.reshape(3, -1)[:, :columns].numpy(), expected)
    assert not again.reshape(3, -1)[:, columns:].any()


@pytest.mark.parametrize("bits", sorted(narrow.PIECES))
def test_codes_are_cut_and_joined(bits: int) -> None:
    code = torch.arange(1 << bits, dtype=torch.int32)
    parts = narrow.cut(code, bits)
    assert torch.equal(torch.as_tensor(narrow.joined(parts, bits)), code)
    assert sum(f.dtype.bits for f in narrow.fields(bits).values()) == bits


@pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("name", "plan"),
    [("adamw", plans.int5_split24), ("stable_adamw", plans.int5_split24), ("came", plans.int4_split24)],
    ids=str,
)
def test_every_shape_gives_the_same_bits(name: str, plan: Plan) -> None:
    """Small tensors are packed too, here; CAME has rows and columns beside codes."""
    shapes = [shape for shape in SHAPES if name != "came" or len(shape) > 1]
    tight = plan.but(small_numel=0, name="tight")
    cls = optgen.compile(name, tight, maths="strict")
    with optimized() if name == "adamw" else nullcontext():
        sides = [trained(cls, x, shapes, torch.bfloat16, plan="tight", lr=1e-2) for x in ("reference", "cpp")]
    assert not different(*sides)


@each_plan
def test_what_a_tensor_takes(plan: Plan) -> None:
    """Bytes of every field, rows of whole eights; exact, measured on the states."""
    cls = optgen.compile("adamw", plan)
    assert isinstance(plan.signed, Blocked) and isinstance(plan.nonneg, LogMinMax)
    bits = plan.signed.bits + plan.nonneg.bits
    for rows, columns in ((128, 256), (70, 101)):
        p = torch.nn.Parameter(torch.randn(rows, columns).bfloat16())
        p.grad = torch.randn_like(p)
        opt = cls([p])
        opt.step()
        kept = sum(t.numel() * t.element_size() for t in opt.state[p].values() if isinstance(t, torch.Tensor))
        blocks = -(-columns // 64)
        assert kept == rows * (columns + -(-columns // 8) * bits + 2 * 2 * blocks)
        assert opt.memory().total == kept + 2 * p.numel()
