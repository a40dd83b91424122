"""Every generated kernel on the device, against the eager reference on the same device."""

from __future__ import annotations

import functools
import math
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpu import catalog
from gpu.catalog import Case
from gpu.compare import Rule, Stored, Verdict, allowance, decode
from gpu.machine import in_words
from optgen.runtime import checkpoint, launch, options, plans, state
from optgen.runtime.records import Variant

STEPS = 3
HYPERS = {"lr": 0.0437, "weight_decay": 0.0931, "lookahead_k": 2}
"""Updates of some percent of the weight: an error of the update is then well above that of the weight.  No round
numbers: with them, many bf16 weights would step onto exact ties, where the last bit of the maths decides.  What is
done at every so many steps only is done at the second of three."""


# What is stepped ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A parameter to make.

    offset    elements past a 16-byte boundary at which the weight starts
    layout    "contiguous", "transposed" (strides swapped), "channels_last"
    """

    size: tuple[int, ...]
    offset: int = 0
    layout: str = "contiguous"

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def __str__(self) -> str:
        words = ["x".join(map(str, self.size)) or "scalar"]
        words += [f"offset {self.offset}"] * bool(self.offset) + [self.layout] * (self.layout != "contiguous")
        return " ".join(words)

    def make(self, values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`values` (fp32, any shape of that numel) as such a tensor of its own."""
        values = values.reshape(self.size).to(device=device, dtype=dtype, copy=True)
        if self.layout == "transposed":
            return values.t().contiguous().t()
        if self.layout == "channels_last":
            return values.contiguous(memory_format=torch.channels_last)
        if self.offset:
            storage = torch.empty(self.numel + self.offset, dtype=dtype, device=device)
            return storage[self.offset :].copy_(values.reshape(-1)).view(self.size)
        return values


LARGE = (
    Shape((64, 64)),  # exactly the size from which tensors count as large, in full tiles
    Shape((4353,)),  # a tail of one element
    Shape((7919,)),  # a prime
    Shape((30000,)),  # several work items
    Shape((37, 131)),  # rows end within a block
    Shape((3, 7, 11, 29)),
    Shape((300, 20)),  # rows shorter than a block
    Shape((96, 80), layout="transposed"),
    Shape((4, 16, 9, 8), layout="channels_last"),
)
LARGE_UNALIGNED = (Shape((5000,), offset=1), Shape((50, 100), offset=3))
SMALL = (
    Shape(()),
    Shape((0,)),
    Shape((1,)),
    Shape((63,)),
    Shape((64,)),
    Shape((257,)),
    Shape((5, 70)),
    Shape((16, 64)),
    Shape((40, 24), layout="transposed"),
)
SMALL_UNALIGNED = (Shape((100,), offset=1), Shape((7, 33), offset=5))
TINY = (Shape((4353,)), Shape((33, 131)), Shape(()), Shape((5, 70)), Shape((64,), offset=1), Shape((0,)))
"""For Triton's interpreter, which takes milliseconds for what a GPU does in nanoseconds."""

FREE_GRADIENTS = hasattr(torch.Tensor, "grad_dtype")
"""Whether this torch lets a gradient have another dtype than its parameter."""

OTHER_GRADIENT = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32, torch.float16: torch.float32}


def shapes_of(case: Case, tiny: bool) -> tuple[Shape, ...]:
    if tiny:
        return TINY
    # Addressing is the same code under every flag: views are tried under the usual ones, to compile less.
    return LARGE + SMALL + (LARGE_UNALIGNED + SMALL_UNALIGNED if case.usual else ())


class Side:
    """One optimizer over fresh copies of the same parameters.

    order   in which the parameters are handed over; their names, and so their random numbers, stay
    """

    def __init__(
        self,
        case: Case,
        shapes: Sequence[Shape],
        weights: Sequence[Tensor],
        backend: str,
        device: torch.device,
        *,
        maximize: bool = False,
        order: Sequence[int] | None = None,
    ) -> None:
        self.shapes, self.device = shapes, device
        self.params = [
            torch.nn.Parameter(shape.make(w, case.dtype, device)) for shape, w in zip(shapes, weights, strict=True)
        ]
        for p in self.params:
            if FREE_GRADIENTS:
                p.grad_dtype = None
        listed = [(f"tensor{i}", self.params[i]) for i in (order or range(len(shapes)))]
        cls = catalog.generated_class(case.cls)
        self.options = catalog.options(case, **HYPERS) | {"maximize": maximize}
        self.optimizer = cls(listed, plan=case.plan, backend=backend, seed=12345, **self.options)

    @functools.cached_property
    def group(self) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.param_groups[0]
        return found

    def select(self, p: Tensor) -> tuple[Any, Variant]:
        _, module, variant = checkpoint.select(type(self.optimizer), self.group, p)
        return module, variant

    def stepped(self, k: int, step: int) -> tuple[Any, Variant]:
        """(plan, variant) that makes step number `step` of parameter `k`."""
        module, variant = self.select(self.params[k])
        return module, plans.at_step(module, variant, options.at_step(type(self.optimizer), self.group, step))

    def step(self, gradients: Sequence[Tensor]) -> None:
        for p, g in zip(self.params, gradients, strict=True):
            p.grad = g
        self.optimizer.step()

    def take(self, other: Side) -> None:
        """The other's weights, states and step counts, bit for bit."""
        with torch.no_grad():
            for mine, theirs in zip(self.params, other.params, strict=True):
                mine.copy_(theirs)
                kept = other.optimizer.state[theirs]
                self.optimizer.state[mine] = {
                    k: v.detach().to(self.device, copy=True) if isinstance(v, Tensor) else v for k, v in kept.items()
                }

    def stored(self, k: int) -> Stored:
        """What is kept of parameter `k`, on the CPU; before the first step as a fresh optimizer starts."""
        p = self.params[k]
        _, variant = self.select(p)
        kept: Mapping[str, Any] = self.optimizer.state[p]
        fields = {f.name: kept[f.name].cpu().clone() for f in variant.fields}
        host = {name: float(kept[name]) for name in variant.host_names}
        return Stored(p.detach().cpu().clone().contiguous(), fields, int(kept["step"]), host)

    def all_stored(self) -> list[Stored]:
        return [self.stored(k) for k in range(len(self.params))]

    def start(self) -> None:
        """Makes the states that the first step would make."""
        for p in self.params:
            module, variant = self.select(p)
            self.optimizer.state[p] = state.create(module, variant, p, {}, hypers=self.optimizer.param_groups[0])


# A case ---------------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of a case.

    kernels   the kernels that ran
    worst     per value: the largest distance as a share of the bound that is derived for it
    codes     per field: [elements with another code, how many were expected, of how many]
    """

    case: str
    kernels: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    codes: dict[str, list[float]] = field(default_factory=dict)
    elements: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problems


def check(case: Case, device_name: str = "cuda", tiny: bool = False) -> Outcome:
    """Runs one case; never raises."""
    start = time.perf_counter()
    outcome = Outcome(str(case), [f"{case.spec}.{case.plan}.{v.kernel_name}" for v in catalog.variants(case)])
    try:
        _check(case, torch.device(device_name), tiny, outcome)
    except Exception as error:  # whatever a kernel does must not end the run
        outcome.problems.append(describe(error))
    outcome.seconds = round(time.perf_counter() - start, 3)
    return outcome


def describe(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{in_words(error)} ({last.filename.rpartition('/')[2]}:{last.lineno})"


def _check(case: Case, device: torch.device, tiny: bool, outcome: Outcome) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    shapes = shapes_of(case, tiny)
    if "fp32" not in catalog.generated_class(case.cls).PLANS:
        outcome.problems.append("the class was not built under the plan fp32, from which bounds are derived: build it")
        return
    verdict = Verdict()
    gradients = functools.partial(draw_gradients, shapes, generator, device)
    weights = [torch.randn(shape.numel, generator=generator) * 0.5 for shape in shapes]
    setups: list[tuple[torch.dtype, bool]] = [(case.dtype, False)]
    # Gradients of another dtype, and other work items below, take kernels of their own: two of three that are compiled.
    often = case.usual and case.spec in catalog.FIRST
    if often and FREE_GRADIENTS:
        setups.append((OTHER_GRADIENT[case.dtype], True))  # and along the gradient, which is one scalar's sign
    for dtype, maximize in setups:
        steps = STEPS if not maximize else 1
        kernel = Side(case, shapes, weights, "triton", device, maximize=maximize)
        reference = Side(case, shapes, weights, "reference", device, maximize=maximize)
        kernel.start()
        for step in range(steps):
            reference.take(kernel)
            g = gradients(dtype, step)
            compare_step(kernel, reference, g, verdict)
    if case.usual:
        same_bits_however(case, shapes, weights, gradients(case.dtype, 0), device, verdict.problems, tiny, often)
    if device.type == "cuda":
        same_reference(case, shapes, weights, gradients(case.dtype, 0), verdict.problems)
    verdict.finish()
    outcome.problems += verdict.problems
    outcome.worst = {name: round(value, 4) for name, value in verdict.worst.items()}
    outcome.codes = {name: [c.seen, round(c.expected, 2), c.of] for name, c in verdict.codes.items()}
    outcome.elements = verdict.elements


def draw_gradients(
    shapes: Sequence[Shape], generator: torch.Generator, device: torch.device, dtype: torch.dtype, step: int
) -> list[Tensor]:
    """Normal gradients of a size that is the tensor's own; some are 0 in one step, a block is 0 in all."""
    made = []
    for shape in shapes:
        exponent = torch.empty(()).uniform_(-3.0, 1.0, generator=generator)
        g = torch.randn(shape.numel, generator=generator) * 10.0**exponent
        if step == 1:
            g[::3] = 0
        g[128:192] = 0
        # A gradient may be a view of a flat buffer, off the weight's own alignment, and may be strided.
        made.append(shape.make(g, dtype, device))
    return made


def compare_step(kernel: Side, reference: Side, g: Sequence[Tensor], verdict: Verdict) -> None:
    """One step of both from the same state; every tensor compared."""
    before = reference.all_stored()
    kernel.step(g)
    reference.step(g)
    by_variant: dict[Variant, list[int]] = {}
    for k in range(len(kernel.params)):
        by_variant.setdefault(kernel.stepped(k, before[k].step + 1)[1], []).append(k)
    for variant, numbers in by_variant.items():
        module = kernel.select(kernel.params[numbers[0]])[0]
        # Of all its flags: some follow a tensor's shape, some the step.
        rule = Rule.of(type(kernel.optimizer), tuple(variant.flags.items()))
        assert rule is not None
        allowed = allowed_of(module, variant, before, g, numbers, rule, kernel)
        for k in numbers:
            where = f"{kernel.shapes[k]} at step {before[k].step + 1} ({str(g[k].dtype)[6:]} gradient)"
            verdict.compare(module, variant, kernel.stored(k), reference.stored(k), allowed[k], where)


def allowed_of(
    module: Any,
    variant: Variant,
    before: Sequence[Stored],
    g: Sequence[Tensor],
    numbers: Sequence[int],
    rule: Rule,
    side: Side,
) -> dict[int, dict[str, Tensor]]:
    """`allowance` for several tensors at once: the rule is elementwise, so they are one long tensor to it."""
    decoded = [decode(module, variant, before[k]) for k in numbers]
    joined = {name: torch.cat([d[name].reshape(-1) for d in decoded]) for name in decoded[0]}
    gradient = torch.cat([g[k].detach().cpu().float().reshape(-1) for k in numbers])
    first = before[numbers[0]]
    sign = -1.0 if side.options["maximize"] else 1.0
    hypers = {hyper.name: hyper.read(side.group[hyper.name]) for hyper in side.optimizer.HYPERS}
    scalars = rule.scalars(first.step + 1, sign, hypers, first.host)
    total = allowance(rule, joined, gradient, scalars)
    out: dict[int, dict[str, Tensor]] = {k: {} for k in numbers}
    sizes = [before[k].p.numel() for k in numbers]
    for name, values in total.items():
        for k, part in zip(numbers, values.split(sizes), strict=True):
            out[k][name] = part.view(before[k].p.shape)
    return out


def same_bits_however(
    case: Case,
    shapes: Sequence[Shape],
    weights: Sequence[Tensor],
    g: Sequence[Tensor],
    device: torch.device,
    problems: list[str],
    tiny: bool,
    cut: bool,
) -> None:
    """Repeating, handing tensors over in another order and, with `cut`, other work items change no bit."""

    def run(tuning: launch.Tuning, order: Sequence[int] | None = None) -> list[Stored]:
        side = Side(case, shapes, weights, "triton", device, order=order)
        with launch.tuned(tuning):
            for _ in range(1 if tiny else 2):
                side.step(g)
        return side.all_stored()

    first = run(launch.Tuning())
    reverse = range(len(shapes))[::-1]
    others: dict[str, Callable[[], list[Stored]]] = {
        "again": lambda: run(launch.Tuning()),
        "in reverse order": lambda: run(launch.Tuning(), reverse),
    }
    if cut:
        others["with one tile per work item"] = lambda: run(launch.Tuning(tiles=1))
    if tiny:  # all at once
        others = {"in reverse order with one tile per work item": lambda: run(launch.Tuning(tiles=1), reverse)}
    for words, other in others.items():
        for shape, a, b in zip(shapes, first, other(), strict=True):
            if different := a.same_bits(b):
                problems.append(f"{shape}: {', '.join(different)} have other bits when run {words}")


def same_reference(
    case: Case, shapes: Sequence[Shape], weights: Sequence[Tensor], g: Sequence[Tensor], problems: list[str]
) -> None:
    """The strict reference gives the same bits on the device as on the CPU."""
    sides = []
    for device in (torch.device("cuda"), torch.device("cpu")):
        side = Side(case, shapes, weights, "reference", device)
        for _ in range(2):
            side.step([x.to(device) for x in g])
        sides.append(side.all_stored())
    for shape, a, b in zip(shapes, *sides, strict=True):
        if different := a.same_bits(b):
            problems.append(f"{shape}: the reference itself has other bits in {', '.join(different)} on the CPU")


# Far beyond 2^31 ------------------------------------------------------------------------------------------------------


HUGE = 2**31 + 2**20 + 17


def check_huge(case: Case, device_name: str = "cuda", numel: int = HUGE) -> Outcome:
    """One tensor of more than 2^31 elements: pieces of it step as tensors of their own do, bit for bit; never raises.

    case   draws no random numbers: those depend on an element's position
    """
    start = time.perf_counter()
    outcome = Outcome(name_of_huge(case, numel))
    try:
        _check_huge(case, torch.device(device_name), numel, outcome)
    except Exception as error:  # as in `check`
        outcome.problems.append(describe(error))
    if device_name == "cuda":
        with suppress(Exception):  # a context that is lost; else the memory is for other processes
            torch.cuda.empty_cache()
    outcome.seconds = round(time.perf_counter() - start, 3)
    return outcome


def name_of_huge(case: Case, numel: int) -> str:
    return f"{case}, {numel} elements"


def _check_huge(case: Case, device: torch.device, numel: int, outcome: Outcome) -> None:
    cls = catalog.generated_class(case.cls)
    options = catalog.options(case, **HYPERS)
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.empty(numel, dtype=case.dtype, device=device).normal_(0, 0.5))
    p.grad = torch.empty_like(p).normal_()
    block = 1024  # a multiple of every storage block
    piece = min(2**16, numel // block * block)
    starts = [0, (numel - piece) // 2 // block * block]
    if numel > 2**31:
        starts.append(2**31 - piece // 2)
    ends = [start + piece for start in starts]
    starts.append((numel - piece) // block * block)
    ends.append(numel)
    small = []
    for start, end in zip(starts, ends, strict=True):
        q = torch.nn.Parameter(p.detach()[start:end].clone())
        q.grad = p.grad[start:end].clone()
        small.append(q)
    big = cls([p], plan=case.plan, backend="triton", **options)
    little = cls(small, plan=case.plan, backend="triton", **options)
    for _ in range(2):
        big.step()
        little.step()
    for start, q in zip(starts, small, strict=True):
        pairs = [("p", p.detach()[start : start + q.numel()], q.detach())]
        for name, value in little.state[q].items():
            if isinstance(value, Tensor):
                whole = big.state[p][name]
                per = 1 if value.shape == q.shape else -(-q.numel() // value.numel())
                part = whole.reshape(-1)[start // per : start // per + value.numel()]
                pairs.append((name, part, value.reshape(-1)))
        for name, a, b in pairs:
            if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
                outcome.problems.append(f"elements from {start}: {name} differs from that of a tensor of its own")
    outcome.elements = numel


def huge_case() -> Case | None:
    """A plan whose codes draw no random numbers, over several fields."""
    found = [case for case in catalog.cases() if case.usual and case.param == "bfloat16"]
    quiet = [case for case in found if not any(v.stochastic for v in catalog.variants(case))]
    quiet.sort(key=lambda case: -max(v.block for v in catalog.variants(case)))
    return next(iter(quiet), None)
