"""Generated kernels on a device: run by `make gpu-check`, which sets OPTGEN_TEST_DEVICE.

Kernels in fast maths are held to the enclosure that running error analysis derives of each step; kernels in strict
maths to every bit of eager torch on the same device. OPTGEN_TEST_DEVICE=cpu tries the checks in Triton's interpreter,
as the tests at the end do every day for a few of them.
"""

import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import optgen
from optgen import optim
from optgen.base import ready
from optgen.driver import targets
from optgen.driver.project import DEFAULT_PLANS
from optgen.ops import dtypes
from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.gpu import stages
from optgen.runtime.layout import layout
from optgen.runtime.records import sums
from optgen.runtime.reference import eager
from optgen.verify.differential import Values, compare, enclose, oracle, reading
from optgen.verify.intervals import FAST
from tests import product
from tests.harness import plan_of, same_bits, spec_of
from tests.product import Cell

DEVICE = torch.device(os.environ.get("OPTGEN_TEST_DEVICE") or "cpu")
PATTERNS = tuple(os.environ.get("OPTGEN_TEST_KERNELS", "").split())
FIRST = ("adamw", "lion", "sgd", "came", "lamb", "adafactor", "sm3", "prodigy", "muon")
"""Common rules, which `tools/gpu_check.py` checks before the others: between them they have every kind of stage."""

STEPS = 3
HYPERS = {"lr": 0.0437, "weight_decay": 0.0931, "lookahead_k": 2}
"""Updates of some percent of the weight, whose errors are well above the weight's own. No round numbers: bf16 weights
would step onto exact ties. What is done at every so many steps only is done at the second of three."""

Shape = tuple[int, ...]
TINY: tuple[Shape, ...] = ((4353,), (33, 131), (), (5, 70), (0,))
"""For Triton's interpreter, which takes milliseconds for what a GPU does in nanoseconds."""
SHAPES: tuple[Shape, ...] = (
    *((64, 64), (4353,), (7919,), (30000,), (37, 131), (3, 7, 11, 29), (300, 20)),  # full tiles, tails, ragged rows
    *((), (0,), (1,), (63,), (64,), (257,), (5, 70), (16, 64), (1, 300), (300, 1), (200, 1100), (4, 128, 64)),
)  # fmt: skip


CHECKED = TINY if DEVICE.type == "cpu" or "OPTGEN_PRETEND" in os.environ else SHAPES


def plans_of(rule: str) -> tuple[str, ...]:
    return ready.plans() if rule == "adamw" else DEFAULT_PLANS


def cells() -> Iterator[Cell]:
    """Yield every rule under the usual plans, AdamW under all, with every parameter dtype and flag setting."""
    order = sorted(product.WITH_MATRICES, key=lambda s: (FIRST.index(s) if s in FIRST else len(FIRST), s))
    for spec in order:
        follow = {f.name for f in spec_of(spec).flags if f.shape is not None or f.clock is not None}
        for plan, param in itertools.product(plans_of(spec), product.PARAMS):
            for flags in product.settings_of(spec):
                asked = not PATTERNS or f"{spec}.{plan}.{param}.".startswith(tuple(f"{p}." for p in PATTERNS))
                cell = Cell(spec, plan, param, flags)
                if asked and not follow & {name for name, _ in flags}:
                    yield cell


def drawn(cell: Cell) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(str(cell).encode()))


def made(value: Tensor, dtype: torch.dtype, device: torch.device, offset: int = 0) -> Tensor:
    """Return a tensor of its own, `offset` elements past a 16-byte boundary, in column-major order if it is 96 x 80."""
    if value.shape == (96, 80):
        return value.to(device, dtype).t().contiguous().t()
    storage = torch.empty(value.numel() + offset, dtype=dtype, device=device)
    return storage[offset:].copy_(value.reshape(-1)).view(value.shape)


class Side:
    """One optimizer over fresh copies of the same parameters; `order` is the one in which they are handed over."""

    def __init__(
        self, cell: Cell, weights: Sequence[Tensor], backend: str, device: torch.device, cls: Any = None,
        order: Sequence[int] | None = None, offset: int = 0, **more: Any,
    ) -> None:  # fmt: skip
        spec, flags = spec_of(cell.spec), product.flags_of(cell)
        self.params = [nn.Parameter(made(w, getattr(torch, cell.param), device, offset)) for w in weights]
        self.options = product.hypers_of(cell, **HYPERS) | more
        self.options |= {f.name: flags[f.name] for f in spec.flags if not f.derived}
        for p in self.params:
            p.grad_dtype = None  # type: ignore[attr-defined]  # gradients of any dtype
        named = [(f"tensor{i}", self.params[i]) for i in (order or range(len(weights)))]
        cls = cls or getattr(optim, spec.class_name)
        self.opt = cls(named, plan=cell.plan, backend=backend, seed=12345, **self.options)

    def step(self, grads: Sequence[Tensor]) -> None:
        for p, g in zip(self.params, grads, strict=True):
            p.grad = g.to(p.device, copy=True)
        self.opt.step()

    def variant(self, p: Tensor) -> Any:
        return checkpoint.select(type(self.opt), self.opt.param_groups[0], p)

    def decoded(self, p: nn.Parameter) -> dict[str, Tensor]:
        _, module, variant = self.variant(p)
        return {
            k: v.cpu() for k, v in layout.decode(module, variant, p, self.opt.state[p], ("p", *variant.states)).items()
        }

    def kept(self) -> list[dict[str, Tensor]]:
        """Return all stored tensors, on the CPU."""
        state = self.opt.state
        return [
            {"p": p.detach().cpu()} | {k: v.cpu() for k, v in state[p].items() if isinstance(v, Tensor) and v.ndim}
            for p in self.params
        ]


def gradients(shapes: Sequence[Shape], draw: torch.Generator, dtype: torch.dtype, step: int) -> list[Tensor]:
    """Return normal gradients of a size that is the tensor's own; some are 0 in one step, a block is 0 in all."""
    found = []
    for shape in shapes:
        g = torch.randn(shape, generator=draw) * 10.0 ** float(torch.empty(()).uniform_(-3.0, 1.0, generator=draw))
        g.view(-1)[128:192] = 0
        if step == 1:
            g.view(-1)[::3] = 0
        found.append(g.to(dtype))
    return found


def differences(one: Sequence[dict[str, Tensor]], two: Sequence[dict[str, Tensor]], where: str) -> list[str]:
    return [
        f"{where}: {name} of tensor {k}, {list(a[name].shape)}, has other bits"
        for k, (a, b) in enumerate(zip(one, two, strict=True))
        for name in a
        if not same_bits(a[name].contiguous(), b[name].contiguous())
    ]


# Fast maths -----------------------------------------------------------------------------------------------------------
def outside(
    cell: Cell,
    shapes: Sequence[Shape],
    device: torch.device,
    after: Callable[[Side], None] = lambda side: None,
    **more: Any,
) -> list[str]:
    """Return the values that a step of the fast kernels put outside of what running error analysis allows.

    after  is called with the optimizer after each step
    """
    spec, plan, draw, found = spec_of(cell.spec), plan_of(cell.plan), drawn(cell), []
    side = Side(cell, [torch.randn(s, generator=draw) * 0.5 for s in shapes], "triton", device, **more)
    hypers = {k: v for k, v in side.options.items() if k != "maximize"}
    grad = torch.float32 if more.get("maximize") else getattr(torch, cell.param)
    for step in range(STEPS + 1):  # the first makes the states
        before = [(side.decoded(p), dict(side.opt.state[p])) if step else None for p in side.params]
        grads = gradients(shapes, draw, grad, step)
        side.step(grads)
        after(side)
        for p, g, old in zip(side.params, grads, before, strict=True):
            if old is None or not p.numel():
                continue
            values, entry = old
            _, _, variant = side.variant(p)
            host = {name: float(entry[name]) for name in variant.host_names}
            flags = spec.flag_values(hypers, tuple(p.shape), step + 1)
            recurrences = targets.recurrences_of(spec, tuple(sorted(flags.items())))
            param, present = dtypes.FROM_TORCH[cell.param], spec.present(flags)
            storage = plan.storage(present, param, variant.small, recurrences, vector=variant.vector)
            g = -g if more.get("maximize") else g
            start, kept = Values.decoded(values, host, step, FAST), side.decoded(p)
            inside = enclose(spec, storage, start, g, hypers, kept=kept)
            exact = oracle(spec, values, g.float(), step, host, hypers)
            report = compare(kept, inside, exact, reading(spec, start, g, hypers))
            found += [f"{name} of {list(p.shape)} at step {step + 1}: {report.worst[name]}" for name in report.broken]
    return found


@pytest.mark.cuda
@pytest.mark.parametrize("cell", [c for c in cells() if c.spec not in product.OF_MATRICES], ids=str)
def test_fast_kernels_keep_to_their_enclosures(cell: Cell) -> None:
    shapes = CHECKED
    if "model" in product.spaces_of(cell.spec):  # an enclosure sums over one tensor
        assert not [x for shape in shapes if shape != (0,) for x in outside(cell, [shape], DEVICE)]
        return
    assert not outside(cell, shapes, DEVICE)
    if not cell.flags:  # addressing is the same code under every flag
        assert not outside(cell, [*shapes[:2], (96, 80)], DEVICE, offset=1)
        assert not outside(cell, shapes[:4], DEVICE, maximize=True)  # and gradients in fp32


@pytest.mark.cuda
@pytest.mark.parametrize("cell", [c for c in cells() if not c.flags and c.spec in FIRST[:3]], ids=str)
def test_neither_order_nor_work_items_change_a_bit(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, draw = CHECKED, drawn(cell)
    weights = [torch.randn(s, generator=draw) for s in shapes]
    grads = gradients(shapes, draw, getattr(torch, cell.param), 0)

    def kept(order: Sequence[int] | None = None) -> list[dict[str, Tensor]]:
        side = Side(cell, weights, "triton", DEVICE, order=order)
        side.step(grads)
        side.step(grads)
        return side.kept()

    first = kept()
    assert not differences(first, kept(), "again")
    assert not differences(first, kept(order=range(len(shapes))[::-1]), "in reverse order")
    monkeypatch.setattr(stages, "TILES", 1)
    assert not differences(first, kept(), "with one tile per work item")


# Strict maths ---------------------------------------------------------------------------------------------------------
def strict_class(cell: Cell) -> Any:
    return optgen.compile(cell.spec, plan=cell.plan, maths="strict")


def strict_differences(cell: Cell, shapes: Sequence[Shape], device: torch.device) -> list[str]:
    """Return what the strict kernels and eager torch store with other bits, on the device and on the CPU."""
    cls, draw = strict_class(cell), drawn(cell)
    weights = [torch.randn(s, generator=draw) for s in shapes]
    sides = [Side(cell, weights, backend, device, cls) for backend in ("triton", "reference")]
    host = Side(cell, weights, "reference", torch.device("cpu"), cls)
    for step in range(STEPS):
        grads = gradients(shapes, draw, getattr(torch, cell.param), step)
        for side in (*sides, host):
            side.step(grads)
        kept = [side.kept() for side in sides]
        if found := differences(*kept, f"step {step + 1}"):
            return found
        if cell.spec not in product.OF_MATRICES and (found := differences(kept[1], host.kept(), "eager on the CPU")):
            return found
    return []


def strict_cells() -> list[Cell]:
    return [c for c in cells() if not c.flags and (c.plan, c.param) != ("fp32", "bfloat16") and c.param != "float16"]


@pytest.mark.cuda
@pytest.mark.parametrize("cell", strict_cells(), ids=str)
def test_strict_kernels_give_the_bits_of_eager_torch(cell: Cell) -> None:
    assert not strict_differences(cell, CHECKED, DEVICE)


# CUDA graphs ----------------------------------------------------------------------------------------------------------

GRAPHS = (("AdamW", "int8_split24"), ("AdamW", "fp32"), ("LAMB", "int8_split24"), ("CAME", "int8_split24"),
          ("Prodigy", "fp32"), ("Muon", "fp32"))  # fmt: skip
"""One sweep, several, sums over the model, and matrix products between kernels."""


GRAPHED: tuple[Shape, ...] = ((64, 200), (130, 150), (33, 7))


def captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return what does the work again: a CUDA graph, on the CPU the work itself."""
    if device.type == "cpu":
        return work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def replayed_differences(
    name: str, plan: str, fresh: bool, device: torch.device, capture: Any = captured, host: bool = False,
    shapes: Sequence[Shape] = (),
) -> list[str]:  # fmt: skip
    """Return what replayed steps store with other bits than the same steps outside a graph.

    fresh  gradients are new tensors, made in the graph
    host   rates are floats, which the host sends
    """
    dtype = torch.float32 if plan == "fp32" else torch.bfloat16
    shapes = shapes or (((3, 8), (4, 5), (2, 2)) if device.type == "cpu" else GRAPHED)
    draw, cls = torch.Generator().manual_seed(1), getattr(optim, name)
    start = [torch.randn(s, generator=draw).to(dtype) for s in shapes]
    sides = []
    for _ in range(2):
        params = [nn.Parameter(w.to(device, copy=True)) for w in start]
        lr = torch.tensor(1e-2, device=device)
        opt = cls(params, lr=lr, plan=plan, backend="triton", capturable="host" if host else True)
        sides.append((params, [torch.zeros_like(p) for p in params], lr, opt))

    def feed(step: int) -> None:
        for _, inputs, lr, opt in sides:
            opt.param_groups[0].update({"lr": 1e-2 / (step + 1)} if host else {})
            again = torch.Generator().manual_seed(100 + step)
            for x in inputs:
                x.copy_(torch.randn(x.shape, generator=again))
            lr.fill_(1e-2 / (step + 1))

    def work(params: Any, inputs: Any, lr: Any, opt: Any) -> None:
        for p, x in zip(params, inputs, strict=True):
            if fresh or p.grad is None:
                p.grad = x * 2
            else:
                torch.mul(x, 2, out=p.grad)
        opt.step()

    def kept(params: Any, inputs: Any, lr: Any, opt: Any) -> list[dict[str, Tensor]]:
        entries = [{"p": p.detach(), **opt.state[p]} for p in params]
        return [{k: v.cpu().clone() for k, v in e.items() if isinstance(v, Tensor)} for e in entries]

    feed(0)
    for side in sides:
        work(*side)
    replay = capture(lambda: work(*sides[0]), device)
    for step in range(1, 6 if device.type == "cuda" else 3):
        feed(step)
        assert not host or sides[0][3].next_graph() == (0 if device.type == "cuda" else None)
        replay()
        work(*sides[1])
        if found := differences(kept(*sides[0]), kept(*sides[1]), f"step {step}"):
            return found
    return []


@pytest.mark.cuda
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize(("name", "plan"), GRAPHS)
def test_replayed_steps_are_the_steps_outside_a_graph(name: str, plan: str, host: bool, fresh: bool) -> None:
    assert not replayed_differences(name, plan, fresh, DEVICE, host=host)


# Far beyond 2^31 ------------------------------------------------------------------------------------------------------
def huge_differences(numel: int, device: torch.device) -> list[str]:
    """Return the pieces of a large tensor that step otherwise than tensors of their own; nothing is drawn at random."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.empty(numel, dtype=torch.bfloat16, device=device).normal_(0, 0.5))
    p.grad = torch.empty_like(p).normal_()
    piece = min(2**16, numel // 1024 * 1024)
    starts = [0, (numel - piece) // 2 // 1024 * 1024, *([2**31 - piece // 2] if numel > 2**31 else [])]
    small = [nn.Parameter(p.detach()[a : a + piece].clone()) for a in starts]
    for q, a in zip(small, starts, strict=True):
        q.grad = p.grad[a : a + piece].clone()
    big, little = (optim.AdamW(x, plan="int8_rn_split24", backend="triton") for x in ([p], small))
    for _ in range(2):
        big.step()
        little.step()
    found = []
    for q, a in zip(small, starts, strict=True):
        for name, x in {"p": q.detach(), **little.state[q]}.items():
            if isinstance(x, Tensor) and x.ndim:
                whole, per = (p.detach() if name == "p" else big.state[p][name]).reshape(-1), piece // x.numel()
                same = same_bits(whole[a // per : a // per + x.numel()].cpu(), x.reshape(-1).cpu())
                found += [] if same else [f"elements from {a}: {name} differs from that of a tensor of its own"]
    return found


@pytest.mark.cuda
def test_a_tensor_of_more_than_2_to_the_31_elements() -> None:
    assert not huge_differences(2**31 + 2**20 + 17 if DEVICE.type == "cuda" else 2**14 + 17, DEVICE)


# The checks themselves, in Triton's interpreter -----------------------------------------------------------------------

CPU = torch.device("cpu")
LION = Cell("lion", "fp32", "float32")


def test_right_kernels_pass_and_wrong_ones_do_not() -> None:
    """A moment that is a hundredth of a percent too large is found."""

    def wrong(side: Side) -> None:
        side.opt.state[side.params[0]]["exp_avg"].mul_(1.0001)

    assert not outside(LION, TINY, CPU)
    assert outside(LION, TINY[:1], CPU, wrong)[0].startswith("exp_avg of [4353] at step 2")


def test_strict_kernels_are_compared_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    lamb = Cell("lamb", "int8_split24")
    assert not strict_differences(lamb, ((6, 70), (), (5,), (0,)), CPU)
    monkeypatch.setattr(eager.Blocks, "tensor_sum", lambda self, x: sums.tensor(2 * x.reshape(-1)))
    assert strict_differences(Cell("stable_adamw", "fp32", "float32"), ((6, 70),), CPU)
    one, two = ([{"p": torch.full((3,), x)}] for x in (1.0, 1.0 + 2**-23))
    assert differences(one, two, "here") == ["here: p of tensor 0, [3], has other bits"]


def test_a_step_that_is_not_repeated_is_seen() -> None:
    assert not any(replayed_differences("AdamW", "fp32", False, CPU, host=host) for host in (False, True))
    nothing = lambda work, device: lambda: None  # noqa: E731
    assert replayed_differences("AdamW", "fp32", True, CPU, nothing)[0].startswith("step 1: p of tensor 0")


def test_pieces() -> None:
    assert not huge_differences(2**12 + 17, CPU)


def test_every_kernel_has_a_check() -> None:
    found = list(cells())
    assert len(set(found)) == len(found) and found[0].spec == "adamw"
    named = {(c.spec, c.plan, c.param) for c in found}
    for rule in ready.classes().values():
        assert {(rule, plan, param) for plan in plans_of(rule) for param in product.PARAMS} <= named


def test_the_reference_leaves_no_division_to_the_device_s_ways_with_numbers() -> None:
    """torch divides by a number that the host knows with its reciprocal on CUDA, and any number with the tensor's:
    `quotient` hands the device tensors of its own."""
    divided: list[tuple[Any, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.div.Tensor:
                divided.append(args)
            return func(*args, **(kwargs or {}))

    x = torch.ones(5, device="meta")
    with Watch():
        for a, b in ((x, 127.0), (127.0, x), (x, x)):
            eager.quotient(a, b)
    assert [[y.device.type for y in args] for args in divided] == [["meta", "meta"]] * 3
    # As before on a CPU: 127 and 255 have no reciprocal in fp32.
    y = torch.arange(-300, 300, dtype=torch.float32)
    assert all(torch.equal(eager.quotient(y, c), (y.double() / c).float()) for c in (127.0, 255.0, 448.0))
