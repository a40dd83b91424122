"""`optgen fuzz`: test random steps of a generated optimizer against the derived bounds and the fp64 oracle.

Examples are drawn from shapes with tails, scales from 1e-38 to 1e38, zeros, dtypes, flags, hyper-parameters within
their ranges, and numbers of steps; a seed fills in the numbers. Every element of every value is held to its own bound,
and the worst case is reported. A violation is made simpler and comes with the command that repeats it.
"""

from __future__ import annotations

import json
import math
import random
import shlex
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from optgen.base.errors import UserError
from optgen.driver import targets
from optgen.driver.compile import compile as compile_class
from optgen.driver.project import Maths
from optgen.formats.plan import Plan
from optgen.lang.declare import HyperDecl
from optgen.lang.spec import Spec
from optgen.lower import needs_matrix
from optgen.runtime.layout import layout
from optgen.runtime.records import fed_name
from optgen.verify.differential import Report, Trial
from optgen.verify.intervals import FAST, STRICT

SHRINK_SECONDS = 20.0
# On both sides of a block, a tile and the size under which tensors are not quantized; rows that end within a block.
SHAPES = (
    (0,), (1,), (), (63,), (64,), (65,), (127,), (4096,), (4097,), (4159,), (1, 4099), (4099, 1), (64, 64), (65, 65),
    (33, 129), (3, 5, 7, 41), (16, 257), (0, 7),
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Example:
    """A drawn case, from which everything else follows."""

    shape: tuple[int, ...] = (65, 65)
    dtype: str = "float32"
    grad_dtype: str = "float32"
    flags: Mapping[str, bool] = field(default_factory=dict)
    hypers: Mapping[str, Any] = field(default_factory=dict)
    p_scale: int = 0  # powers of ten
    g_scale: int = 0
    state_scale: int | None = None  # None: states as the rule itself makes them
    spread: int = 0  # powers of ten between elements
    zeros: float = 0.0  # share of zeros in p, g and states
    steps: int = 1
    start: int = 0  # steps already made
    seed: int = 0

    def text(self) -> str:
        """Return the fields that differ from the defaults, as `--case` takes them."""
        plain = asdict(Example())
        return json.dumps({k: v for k, v in asdict(self).items() if v != plain[k]}, separators=(",", ":"))


def read_example(text: str) -> Example:
    """Read an example: the inverse of Example.text."""
    try:
        data = json.loads(text)
        example = Example(**data)
        hypers = {k: tuple(v) if isinstance(v, list) else v for k, v in example.hypers.items()}
        return replace(example, shape=tuple(example.shape), hypers=hypers)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError("E411", option="--case", want="the text that fuzz reported", got=f"{text} ({error})") from None


# -- drawing


def _hyper_value(draw: random.Random, decl: HyperDecl, whole: bool) -> Any:
    """Draw the default, a small change of it, or an end of its range; `whole`: a positive whole number."""

    def one(default: float) -> float:
        changed = [default * f for f in (1.0, 0.5, 0.1, 1e-3, 10.0)] + [1 - (1 - default) * f for f in (0.1, 10.0)]
        ends = [x for x in (decl.ge, decl.le) if x is not None]
        drawn = [1.0, 2.0, default + 1, default * 10] if whole else [*changed, *ends]
        return draw.choice([default, *sorted({x for x in drawn if decl.allows(x)} - {default})])

    if isinstance(decl.default, bool):
        return draw.random() < 0.5
    return tuple(map(one, decl.default)) if isinstance(decl.default, tuple) else one(decl.default)


def examples(spec: Spec, *, steps: int, seed: int = 0) -> Iterator[Example]:
    """Yield examples of a spec, others under another seed."""
    draw = random.Random(seed)
    free = [f.name for f in spec.flags if not f.derived]
    counts = {f.every for f in spec.flags}  # of steps
    large = [s for s in SHAPES if math.prod(s) >= 4096]

    def scale(low: int, high: int) -> int:
        return draw.randint(*draw.choice([(low, high), (-6, 2), (-38, 38)]))

    while True:
        changed = (h for h in spec.hypers if draw.random() < 0.5)
        example = Example(
            shape=draw.choice(draw.choice([large, SHAPES])), dtype=draw.choice(DTYPES), grad_dtype=draw.choice(DTYPES),
            flags={name: draw.random() < 0.5 for name in free},
            hypers={h.name: _hyper_value(draw, h, h.name in counts) for h in changed},
            p_scale=scale(-3, 1), g_scale=scale(-6, 2), state_scale=draw.choice([None, scale(-6, 2)]),
            spread=draw.choice([0, 1, 3, 8, 20]), zeros=draw.choice([0.0, 0.5, 0.99, 1.0]),
            steps=draw.randint(1, steps), start=draw.choice([0, 0, 1, 9, 100]), seed=draw.randrange(2**16),
        )  # fmt: skip
        yield _allowed(spec, example)


def _simplest(spec: Spec, example: Example, fails: Callable[[Example], bool]) -> Example:
    """Return the example with each field at its default under which it fails all the same."""
    until, plain = time.monotonic() + SHRINK_SECONDS, Example()
    for f in fields(example):
        other = _allowed(spec, replace(example, **{f.name: getattr(plain, f.name)}))
        if time.monotonic() < until and fails(other):
            example = other
    return example


def _allowed(spec: Spec, example: Example) -> Example:
    """Return the example without flags that its hyper-parameters rule out, and as a matrix where the rule needs one."""
    values = {h.name: h.default for h in spec.hypers} | dict(example.hypers)
    ruled_out = {
        f.name for f in spec.flags if f.needs and values[f.needs] == 0 or f.excludes and values[f.excludes] != 0
    }
    flags = {name: on and name not in ruled_out for name, on in example.flags.items()}
    shape = example.shape
    if len(shape) < 2 and needs_matrix(spec, spec.flag_values({**example.hypers, **flags}, shape)):
        shape = (1,) * (2 - len(shape)) + shape  # vectors are refused
    return replace(example, flags=flags, shape=shape)


# -- one case


def _numbers(example: Example, scale: int, generator: torch.Generator, *, nonneg: bool = False) -> Tensor:
    """Return finite fp32 of the example's shape: normal numbers times powers of ten, some of them 0."""
    shape = example.shape
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    spread = torch.rand(shape, generator=generator, dtype=torch.float64) * -example.spread
    x = x * 10.0 ** (spread + scale)
    x = torch.where(torch.rand(shape, generator=generator) < example.zeros, 0.0, x)
    x = x.abs() if nonneg else x
    return x.clamp(-3e38, 3e38).float()


def run(spec: Spec, plan: Plan, cls: type[Any], example: Example, *, backend: str, maths: Maths) -> Report:
    """Return the report of one example; every step begins with the values stored by the one before."""
    generator = torch.Generator().manual_seed(example.seed)
    options = {**example.hypers, **example.flags}
    p = _numbers(example, example.p_scale, generator).clamp(-6e4, 6e4)
    flags = spec.flag_values(options, example.shape)
    states: dict[str, Tensor] = {}
    defaults = {h.name: h.default for h in spec.hypers}
    if example.state_scale is not None:
        for s in spec.present(flags):
            scale = 2 * example.state_scale if s.nonneg and abs(example.state_scale) < 19 else example.state_scale
            rank: Any = s.rank or 0
            rank = int(example.hypers.get(rank, defaults[rank])) if isinstance(rank, str) else rank
            shape = layout.value_shape(s.space.name, torch.Size(example.shape), spec.matrix, rank)
            states[s.name] = _numbers(replace(example, shape=shape), scale, generator, nonneg=s.nonneg)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a discouraged plan, of every example
        trial = Trial(
            cls, spec, p, states, dtype=getattr(torch, example.dtype), plan=plan.name, backend=backend,
            seed=example.seed, step=example.start, options=options,
            model=FAST if backend != "reference" and maths == "fast" else STRICT,
        )  # fmt: skip
    trial.optimizer._second = 1.0  # of two phases the second is made alone
    trial.optimizer.state[trial.param].update(dict.fromkeys(map(fed_name, cls.INPUTS), 2.0))  # kept as they were drawn
    recurrences = targets.recurrences_of(spec, tuple(sorted(trial.flags.items())))
    storage = trial.storage(plan, recurrences)
    dtype = getattr(torch, example.grad_dtype)
    limit = torch.finfo(dtype).max
    gradients = [
        _numbers(example, example.g_scale, generator).clamp(-limit, limit).to(dtype) for _ in range(example.steps)
    ]
    unknown = {name: type(fmt).__name__ for name, fmt in storage.states.items() if fmt.bound() is None}
    if storage.param.name != "f32" and storage.master.bound(storage.param) is None:
        unknown["p"] = type(storage.master).__name__
    return replace(trial.check_steps(storage, gradients), unknown=unknown)


# -- many


@dataclass
class Result:
    """The result of a fuzz run."""

    examples: int
    report: Report | None
    worst_cases: dict[str, Example]
    failure: Example | None = None
    reproduce: str = ""
    crash: str = ""

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def unbounded(self) -> Mapping[str, tuple[int, int]]:
        """Count (elements without a bound, elements) of values whose format has a bound for some elements only."""
        counts = self.report.unbounded if self.report else {}
        return {name: count for name, count in counts.items() if count[0] and name not in self.unknown}

    @property
    def unknown(self) -> Mapping[str, str]:
        """Map the values that were not checked to their formats, which have no known bound."""
        return self.report.unknown if self.report else {}


def fuzz(
    spec: Spec,
    plan: Plan,
    *,
    count: int = 100,
    random_seed: int = 0,
    backend: str = "reference",
    maths: Maths = "fast",
    steps: int = 4,
    case: Example | None = None,
    reference: str = "",
) -> Result:
    """Test `count` examples under a seed, or one `case`; `reference` names the spec as the command line did."""
    torch.set_num_threads(1)
    cls = compile_class(spec, plan, maths if backend != "reference" else "fast")
    result = Result(0, None, {})

    def look(example: Example) -> Report | str:
        try:
            return run(spec, plan, cls, example, backend=backend, maths=maths)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def fails(example: Example) -> bool:
        found = look(example)
        return isinstance(found, str) or not found.ok

    for example in [case] if case is not None else islice(examples(spec, steps=steps, seed=random_seed), count):
        result.examples += 1
        found = look(example)
        if not isinstance(found, str) and found.ok:
            _keep(result, found, example)
            continue
        result.failure = example if case is not None else _simplest(spec, example, fails)
        found = look(result.failure)
        result.report, result.crash = (result.report, found) if isinstance(found, str) else (found, "")
        command = f"optgen fuzz {reference or spec.name} --plan {plan.name} --backend {backend}"
        command += f" --maths {maths}" * (backend != "reference")
        result.reproduce = f"{command} --case {shlex.quote(result.failure.text())}"
        break
    return result


def _keep(result: Result, report: Report, example: Example) -> None:
    """Add an example's report, and keep the worst example of each value."""
    before = result.report.worst if result.report else {}
    for name, w in report.worst.items():
        if name not in before or w.ratio > before[name].ratio:
            result.worst_cases[name] = example
    result.report = report if result.report is None else result.report.join(report)
