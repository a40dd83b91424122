"""Rules beside their oracles: settings drawn at random, and every shape that a parameter has.

In fp64 the spec is the oracle for 50 steps, but for the order of its sums.  In fp32 the optimizer, compiled and
stepped as a user would, lies within the enclosure of each step, and so does the oracle: both start from the same
weight, the oracle with its own exact states.  The enclosure of the states is carried from the first step on.
"""

import itertools
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optgen import optim
from optgen.driver import targets
from optgen.driver.compile import compile as compile_class
from optgen.lang import Spec
from optgen.lang.declare import HyperDecl
from optgen.verify.differential import Trial, Values, enclose
from optgen.verify.intervals import Interval
from tests import oracles
from tests.harness import plan_of, sampled, spec_of
from tests.oracles import ELEMENTWISE, FED, REDUCING, WHOLE

STEPS = 50
SHAPES = ((), (1,), (7,), (1, 1), (1, 6), (6, 1), (5, 7), (2, 3, 4), (4, 3, 3, 3))
TEN = (*SHAPES, (3, 1100))  # more columns than are summed at a time
Shapes = tuple[tuple[int, ...], ...]
KEPT = ("eps", "adamw_eps", "min_norm", "scale_floor")  # nobody tunes them, or the oracle has no such
COUNTS = {"ns_steps": (2, 6), "warmup_steps": (0, 9), "lookahead_k": (1, 6), "alpha_warmup": (0, 30)}
COUNTS |= {"beta3_warmup": (0, 30), "update_proj_gap": (3, 30), "t0": (0, 30), "beta1_warmup": (0, 30)}
COUNTS |= {"grokfast_after_step": (0, 30), "memory_length": (1, 30), "warmup_epoch": (1, 9), "grad_accu_steps": (1, 4)}
COUNTS |= {"precondition_frequency": (1, 7), "inverse_every": (1, 9), "rank": (1, 5)}
COUNTS |= {"keep_num": (1, 11), "total_T": (1, 60), "restarting_iter": (2, 30), "n_stages": (1, 9), "sigma": (20, 200)}
START = {"d0": 1e-2, "growth_rate": 2.0, "max_ratio": 1.0}  # fifty steps show what the rule does with it; d may grow

TRIED: dict[str, Any] = {"adamp": ("delta", 0.2, 0.9, 2.5), "sgdp": ("delta", 0.2, 0.9, 2.5)}
TRIED |= {"swats": ("eps", 1e-9, 1e-3)}


def drawn(h: HyperDecl, draw: torch.Generator) -> Any:
    """A legal value about as far from its end of the range as the default is; nonzero where the default is 0."""
    if h.name in COUNTS and h.lt != 1:
        return int(torch.randint(*COUNTS[h.name], (), generator=draw))
    if h.series:
        return (3.4445, -4.7750, 2.0315)  # torch's Newton-Schulz takes a triple
    if h.name in KEPT or max(h.values) > 1e30 and h.name not in START:
        return h.default
    if isinstance(h.default, bool):
        return bool(torch.randint(2, (), generator=draw))
    h = replace(h, default=START.get(h.name, h.default))
    out = []
    for value in h.values:
        factor = 2.0 ** float(torch.empty(()).uniform_(-1, 1, generator=draw))
        decays = h.lt == 1 or h.name == "alpha"  # torch's RMSprop takes any
        far = 1 - (1 - value) * factor if decays and 0 < value < 1 else (value or 0.05) * factor
        out.append(far if h.allows(far) else value)
    return tuple(out) if isinstance(h.default, tuple) else out[0]


def cases(name: str) -> Iterator[tuple[dict[str, bool], dict[str, Any]]]:
    """(flags, hyper-parameters): every setting of the flags, each with hyper-parameters of its own."""
    spec, draw = spec_of(name), torch.Generator().manual_seed(zlib.crc32(name.encode()))
    free = [f.name for f in spec.flags if not f.derived]
    switches = [f.nonzero for f in spec.flags if f.nonzero]
    for values in itertools.product((False, True), repeat=len(free)):
        for zeros in itertools.product((False, True), repeat=len(switches)):
            hypers = {h.name: drawn(h, draw) for h in spec.hypers}
            hypers |= {name: 0.0 for name, zero in zip(switches, zeros, strict=True) if zero and name}
            flags = dict(zip(free, values, strict=True))
            if all(not flags.get(f.name) or not f.needs or hypers[f.needs] for f in spec.flags):
                hypers |= {f.excludes: 0.0 for f in spec.flags if f.excludes and flags.get(f.name)}
                # AdamP's threshold: by the default one, gradients at random are seldom at right angles to a weight.  At
                # 1 the cosine of rows of one element, which is 1 but for rounding, would decide.
                # SWATS changes to SGD within 50 steps, or not.
                key, *tried = TRIED.get(name, ("",))
                for more in [{key: x} for x in tried] or [{}]:
                    yield flags, hypers | more


def further(name: str) -> range:
    """Numbers of the settings that `redrawn` has beside the first: of flags, and of longest sides with factors."""
    spec = spec_of(name)
    limits = 3 if "max_precond_dim" in {h.name for h in spec.hypers} else 1
    return range(1, 1 + limits * 2 ** sum(not f.derived for f in spec.flags))


def redrawn(name: str, k: int, shape: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Options with each hyper-parameter drawn around its value in them, eps above it, and with the flags of setting k,
    in which factors have sides up to their own limit, up to the shorter one of the shape, or shorter ones."""
    if not k:
        return options
    spec, draw = spec_of(name), torch.Generator().manual_seed(zlib.crc32(f"{name} {k} {shape}".encode()))
    hypers = [replace(h, default=options.get(h.name, h.default)) for h in spec.hypers if h.name != "lr"]
    made = {h.name: drawn(h, draw) for h in hypers}
    made |= {"eps": made["eps"] * (1 + float(torch.rand((), generator=draw)))} if "eps" in made else {}
    made |= {f.name: bool((k - 1) >> i & 1) for i, f in enumerate(f for f in spec.flags if not f.derived)}
    short = min(shape[-2:] if len(shape) == 3 else (shape[0], math.prod(shape[1:]))) if shape else 1
    limits = options.get("max_precond_dim"), short, max(1, short - 1)
    return options | made | ({"max_precond_dim": limits[(k - 1) * 3 // len(further(name))]} if limits[0] else {})


class Steps:
    """Steps of a rule from a weight: of its own reading, backend "fp64", or of an optimizer in fp32."""

    def __init__(self, name: str, backend: str, start: Tensor, lr: float, options: Any, named: bool = True) -> None:
        self.name, self.spec, self.exact, self.options = name, spec_of(name), backend == "fp64", options
        self.weight, self.states, self.host, self.p = start.double(), {}, {}, nn.Parameter(start.clone())
        given = {"plan": "fp32", "backend": "auto" if self.exact else backend, "lr": lr}
        blocks = {"w": len(start)} if named and start.ndim == 3 else {}
        cls = getattr(optim, self.spec.class_name)
        self.opt = cls([("w", self.p) if named else self.p], blocks=blocks, **given, **options)

    def __call__(self, g: Tensor, t: int, lr: float) -> None:
        if self.exact:
            made = self.spec.evaluate(self.weight, g.double(), t, self.states, self.host, lr=lr, **self.options)
            self.weight, self.states, self.host = made
        else:
            self.p.grad, self.opt.param_groups[0]["lr"] = g, lr
            self.opt.step()
            self.weight = self.p.detach().double()

    @property
    def kept(self) -> Any:
        return self.states if self.exact else self.opt.state[self.p]

    def distance(self, oracle: Tensor) -> Tensor:
        """Return how far each weight is from the oracle's, which is recorded of the reading."""
        if self.exact:
            oracles.record(self.name, self.weight, oracle)
        return (self.weight - oracle).abs()


def settings(names: Iterable[str]) -> list[tuple[str, int]]:
    return [(name, k) for name in sorted(names) for k in range(len(list(cases(name))))]


CASES = settings(REDUCING)


def gradients(shape: tuple[int, ...], draw: torch.Generator) -> list[Tensor]:
    """fp32, of sizes that vary from step to step and from element to element."""
    sizes = [2.0 ** float(torch.randn((), generator=draw)) for _ in range(STEPS)]
    return [torch.randn(shape, generator=draw) * torch.randn(shape, generator=draw).exp() * s for s in sizes]


def rate(lr: float, t: int) -> float:
    return lr * (1 + 0.5 * math.sin(t))


@pytest.fixture
def double() -> Iterator[None]:
    """Peers keep some of their states in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def at_shapes(cases: list[tuple[str, int]], shapes: Shapes, daily: int) -> Iterator[Any]:
    """Yield (rule, setting, shapes): so many of the shapes in turn, and the others of a setting marked `full`."""
    for i, case in enumerate(cases):
        turned = [shapes[(i * daily + j) % len(shapes)] for j in range(len(shapes))]
        yield pytest.param(*case, turned[:daily])
        yield pytest.param(*case, turned[daily:], marks=pytest.mark.full)


OF_REDUCING = [*CASES, *settings(WHOLE)]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("name", "k", "shapes"),
    sampled("oracle", [*at_shapes(OF_REDUCING, TEN, 4), *at_shapes(settings(ELEMENTWISE | FED), TEN, 1)]),
)
def test_the_spec_is_its_oracle(name: str, k: int, shapes: Shapes) -> None:
    """Fewer than 64 roundings per element and step, and three chains of sums of all elements; in units of 2^-53.

    A rule of signs moves by lr either way: there a sum that is 0 but for rounding would decide, and none is.
    Prodigy measures its step by how far the weight has gone, which is d0 to begin with: a rounding of the weight counts
    for 1 / d0 as much there.  It and D-Adaptation take the signs of a descent to 3: at random ones d would stay at d0.
    """
    flags, hypers = list(cases(name))[k]
    spec = spec_of(name)
    for shape in shapes:
        oracle = (ELEMENTWISE | REDUCING | WHOLE | FED)[name](flags, hypers)
        draw = torch.Generator().manual_seed(k)
        ours = theirs = torch.randn(shape, generator=draw, dtype=torch.float64)
        states: dict[str, Any] = {}
        host: dict[str, Any] = {}
        for t, g in enumerate(gradients(shape, draw), 1):
            lr = rate(hypers["lr"], t)
            g = g.copysign(ours - 3) if "d0" in hypers else g
            fed, now = oracles.fed_at(spec, shape, t)
            options = hypers | flags | now | {"lr": lr}
            ours, states, host = spec.evaluate(ours, g.double(), t, states | fed, host, **options)
            theirs = oracle(theirs, g.double(), t, lr, **fed)
            allowed = t * (64 + 3 * ours.numel()) * 2.0**-53 / (hypers["d0"] if name == "prodigy" else 1.0)
            where = f"{shape}, step {t}"
            torch.testing.assert_close(ours, theirs, rtol=allowed, atol=allowed, msg=lambda m, at=where: f"{at}: {m}")
            oracles.record(name, ours, theirs)
        assert "d0" not in hypers or (states | host)["d"] > hypers["d0"], shape


@cache
def compiled(name: str) -> type[Any]:
    return compile_class(spec_of(name), plan_of("fp32"))


def storage_of(spec: Spec, trial: Trial) -> Any:
    return trial.storage(plan_of("fp32"), targets.recurrences_of(spec, tuple(sorted(trial.flags.items()))))


FIRST = [case for case in CASES if case[1] == 0]
OTHERS = [(*case, ((5, 7),)) for case in settings(ELEMENTWISE)]
OTHERS += [pytest.param(*case, ((5, 7),), marks=pytest.mark.full) for case in CASES if case[1] > 0]


def assert_enclosed(
    name: str, flags: dict[str, bool], hypers: dict[str, Any], shape: tuple[int, ...], draw: torch.Generator
) -> None:
    """Assert that fp32 steps and the oracle's lie in one enclosure, which is narrow."""
    spec, oracle = spec_of(name), (ELEMENTWISE | REDUCING)[name](flags, hypers)
    steps = STEPS // 2
    trial = Trial(compiled(name), spec, torch.randn(shape, generator=draw), plan="fp32", options=hypers | flags)
    storage, options = storage_of(spec, trial), hypers | flags
    carried = {s: Interval.point(v) for s, v in trial.decoded().items() if s != "p"}
    claimed, width, moved = 0.0, [], []
    for t, g in enumerate(gradients(shape, draw)[:steps], 1):
        before = trial.decoded()["p"]
        inside = enclose(spec, storage, Values(Interval.point(before), carried, trial.host, trial.step), g, options)
        exact = oracle(before.double(), g.double(), t, hypers["lr"])
        trial.run(g)
        after = trial.decoded()
        assert inside.p.contains(after["p"]).all(), t
        assert inside.p.contains(exact).all(), t
        assert all(inside.states[s].contains(after[s]).all() for s in carried), t
        carried = dict(inside.states)
        claimed += float(inside.p.known.double().mean()) / steps
        width.append((inside.p.hi - inside.p.lo).flatten())
        moved.append((exact - before).abs().flatten())
    # What is left of a lone number after a projection is rounding noise.
    alone = {"orthograd": math.prod(shape), "adamp": math.prod(shape[1:]), "sgdp": math.prod(shape[1:])}.get(name) == 1
    if not alone:
        assert claimed > 0.9
    # Most of RAdam's first steps are a hundredth of the later ones; FTRL's weights are quotients of sums that go on.
    if not alone and name not in ("radam", "ftrl"):
        # Narrow enough to tell one rule from another: a small part of a step, and four roundings of a weight below 1.
        assert float(torch.cat(width).nanmedian()) < 0.01 * float(torch.cat(moved).median()) + 4 * 2.0**-24


@pytest.mark.parametrize(
    ("name", "k", "shapes"),
    sampled("enclosure", [*at_shapes(FIRST, ((7,), (1, 6), (6, 1), (5, 7), (4, 3, 3, 3)), 2), *OTHERS]),
)
def test_fp32_and_the_oracle_lie_in_one_enclosure(name: str, k: int, shapes: Shapes) -> None:
    flags, hypers = list(cases(name))[k]
    for shape in shapes:
        assert_enclosed(name, flags, hypers, shape, torch.Generator().manual_seed(k))
