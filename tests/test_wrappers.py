"""Rules around rules: each wrapper beside a second text, in any order, and what they refuse."""

import math
import os
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytorch_optimizer import agc as unitwise
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import optgen
from optgen.base.errors import UserError
from optgen.driver import fuzz
from optgen.driver.fuzz import Example
from optgen.driver.load import find_spec
from optgen.driver.steps import rule_step
from optgen.lang import Spec, flag, hyper, nonneg, state, wrapper, wrappers
from tests.harness import make_step, plan_of, spec_of
from tests.oracles import clipped
from tests.training import bits

Step = Callable[[Tensor, Tensor, int, float], tuple[Tensor, Tensor]]
"""(p, g, t, factor of the learning rate) -> (p after decoupled decay, the new weight)."""

LR, DECAY = 0.1, 0.3
OPTIONS = {
    "max_norm": 0.7, "max_value": 0.5, "agc_beta": 0.6, "lambda_abs": 0.8, "lambda_rel": 0.9, "agc_steps": 3,
    "zclip_alpha": 0.6, "z_thresh": 0.4, "zclip_steps": 3, "gamma": 0.2, "spam_threshold": 1.5, "spam_k": 3,
    "spam_warmup": 2, "spam_after": 1, "lookahead_k": 2, "alpha": 0.3, "snoo_k": 3, "snoo_rate": 0.7, "snoo_mu": 0.4,
    "ema_decay": 0.7, "ema_start": 2, "average_start": 2, "sf_beta": 0.8, "warmup_steps": 3, "r": 0.5,
    "weight_lr_power": 1.5, "mu_x": 0.6, "mu_y": 0.7, "ahead": 0.4, "ahead_beta": 0.5, "total_steps": 6,
    "cooldown_steps": 4, "agc_clip": 0.4, "agc_eps": 0.9,
}  # fmt: skip
O = OPTIONS
BETA1 = {"adamw": 0.9, "lion": 0.9, "sgd": 0.6}
AVERAGES = {"ema", "averaged", "schedule_free", "gpa", "ema_nesterov"}
FOLLOWING = AVERAGES | {"lookahead", "snoo"}
SPLITTING = {"cautious", "grams", "cautious_decay", "hyperball", "schedule_free", "gpa"}


class Base:
    """A rule's own fp64 reading; `before` of those that decay first."""

    def __init__(self, name: str) -> None:
        self.spec, self.states, self.name = spec_of(name), ({}, {}), name
        self.other = {"momentum": 0.6} if name == "sgd" else {}

    def __call__(self, p: Tensor, g: Tensor, t: int, rate: float = 1.0) -> tuple[Tensor, Tensor]:
        given = {"lr": LR * rate, "weight_decay": DECAY, **self.other}
        new, *self.states = self.spec.evaluate(p, g, t, *self.states, **given)
        return p if self.name == "sgd" else p * (1 - LR * rate * DECAY), new


def of_gradient(change: Callable[..., Tensor]) -> Callable[[Step, str], Step]:
    """A wrapper that gives another gradient to the rule."""

    def make(inner: Step, base: str) -> Step:
        kept: dict[str, Any] = {"base": base}
        return lambda p, g, t, rate: inner(p, change(kept, p, g, t), t, rate)

    return make


def of_step(change: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Step, str], Step]:
    """A wrapper that makes other weights of (p, g, before, new, t, rate)."""

    def make(inner: Step, base: str) -> Step:
        kept: dict[str, Any] = {}
        return lambda p, g, t, rate: change(kept, p, g, *inner(p, g, t, rate), t, rate)

    return make


def agc(kept, p, g, t):
    if t < O["agc_steps"]:
        h = g * min(O["lambda_abs"] / (float(g.norm()) + 1e-8), 1.0)
        kept["avg"] = min(kept.get("avg", math.inf), float(h.norm()))
    else:
        h = g * min(1.0, O["lambda_rel"] * kept["avg"] / float(g.norm()))
        kept["avg"] += (1 - O["agc_beta"]) * (float(h.norm()) - kept["avg"])
    return h


def zclip(kept, p, g, t):
    """Their class of the same name, without its upper limit: a list of norms, then averages."""
    norm, seen = float(g.norm()), kept.setdefault("seen", [])
    if len(seen) < O["zclip_steps"]:
        seen.append(norm)
        kept["mean"] = sum(seen) / len(seen)
        kept["var"] = sum((x - kept["mean"]) ** 2 for x in seen) / len(seen)
        return g * min(1.0, norm / (norm + 1e-6))
    z = (norm - kept["mean"]) / (kept["var"] ** 0.5 + 1e-6)
    if z > O["z_thresh"]:
        kept["clipped"] = kept["mean"] + O["z_thresh"] * kept["var"] ** 0.5 / (z / O["z_thresh"])
    else:
        kept["clipped"] = norm
    a = O["zclip_alpha"]
    kept["mean"] = a * kept["mean"] + (1 - a) * kept["clipped"]
    kept["var"] = a * kept["var"] + (1 - a) * (kept["clipped"] - kept["mean"]) ** 2
    return g * min(1.0, kept["clipped"] / (norm + 1e-6))


def mars(kept, p, g, t):
    beta, last = BETA1[kept["base"]], kept.get("last", g)
    kept["last"] = g
    c = g + O["gamma"] * beta / (1 - beta) * (g - last)
    return c / c.norm().clamp(min=1)


def right(kept, p, g, t):
    tangent = g - (p * g).sum() / (p * p).sum() * p
    return tangent / tangent.norm() * g.norm()


def masked(kept, p, g, before, new, t, rate):
    u = before - new
    agrees = (u * g > 0).double()
    return before, before - u * agrees / agrees.mean().clamp(min=1e-3)


def ball(kept, p, g, before, new, t, rate):
    radius = kept.setdefault("radius", p.norm())
    u = before - new
    moved = before - LR * rate * radius * u / u.norm()
    return before, radius * moved / moved.norm()


def slow(kept, p, g, before, new, t, rate):
    held = kept.setdefault("slow", p)
    if t % O["lookahead_k"] == 0:
        kept["slow"] = new = held + O["alpha"] * (new - held)
    return before, new


def outer(kept, p, g, before, new, t, rate):
    """SGD of torch on the slow weights, whose gradient is their distance from p."""
    if "slow" not in kept:
        kept["slow"] = torch.nn.Parameter(p.clone())
        kept["sgd"] = torch.optim.SGD([kept["slow"]], lr=O["snoo_rate"], momentum=O["snoo_mu"], nesterov=True)
    if t % O["snoo_k"] == 0:
        kept["slow"].grad = kept["slow"].detach() - new
        kept["sgd"].step()
        new = kept["slow"].detach().clone()
    return before, new


def seen(start: str, average: Callable[..., Tensor] | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """torch's AveragedModel of the weights after a number of steps."""

    def step(kept, p, g, before, new, t, rate):
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        model.weight = torch.nn.Parameter(new.clone())
        if t <= O[start] + 1:
            kept["average"] = torch.optim.swa_utils.AveragedModel(model, avg_fn=average)
        kept["average"].update_parameters(model)
        kept["weights"] = kept["average"].module.weight.detach()
        WEIGHTS[:] = [kept["weights"]]
        return before, new

    return step


WEIGHTS: list[Tensor] = []  # for evaluation, after the last step of a wrapper that has such


def primal(c_of: Callable[..., float], beta: float, rate_of: Callable[..., float]) -> Callable[[Step, str], Step]:
    """x, y and z of Schedule-Free and GPA, each kept by itself."""

    def make(inner: Step, base: str) -> Step:
        kept: dict[str, Any] = {}

        def step(p, g, t, rate):
            x, z = kept.get("x", p), kept.get("z", p)
            z = inner(z, g, t, rate * rate_of(t))[1]
            c = c_of(kept, LR * rate * rate_of(t), t)
            kept["x"], kept["z"] = (1 - c) * x + c * z, z
            WEIGHTS[:] = [kept["x"]]
            return p, beta * kept["x"] + (1 - beta) * z

        return step

    return make


def free(kept, lr, t):
    kept["largest"] = max(kept.get("largest", 0.0), lr)
    weight = t ** O["r"] * kept["largest"] ** O["weight_lr_power"]
    kept["sum"] = kept.get("sum", 0.0) + weight
    return weight / kept["sum"]


def further(inner: Step, base: str) -> Step:
    kept: dict[str, Any] = {}

    def step(p, g, t, rate):
        real = kept.get("real", p)
        new = inner(real, g, t, rate)[1]
        kept["avg"] = O["ahead_beta"] * kept.get("avg", 0.0) + (1 - O["ahead_beta"]) * (new - real)
        kept["real"] = new
        WEIGHTS[:] = [new]
        return p, new + O["ahead"] * kept["avg"]

    return step


def risen(inner: Step, base: str) -> Step:
    def step(p, g, t, rate):
        falls = min(1.0, max(0.0, (O["total_steps"] + 1 - t) / O["cooldown_steps"]))
        return inner(p, g, t, rate * min(1.0, t / O["warmup_steps"]) * falls)

    return step


ORACLES: dict[str, Callable[[Step, str], Step]] = {
    "clipped": of_gradient(lambda kept, p, g, t: clipped(g, clip_grad_norm_, O["max_norm"])),
    "clipped_value": of_gradient(lambda kept, p, g, t: clipped(g, clip_grad_value_, O["max_value"])),
    "adagc": of_gradient(agc),
    "zclip": of_gradient(zclip), "mars": of_gradient(mars), "orthograd": of_gradient(right),
    "agc": of_gradient(lambda kept, p, g, t: unitwise(p, g, O["agc_eps"], O["agc_clip"])),
    "centralized": of_gradient(lambda kept, p, g, t: g - g.mean(1, keepdim=True)),
    "cautious": of_step(masked), "hyperball": of_step(ball), "lookahead": of_step(slow), "snoo": of_step(outer),
    "grams": of_step(lambda kept, p, g, before, new, t, rate: (before, before - g.sign() * (before - new).abs())),
    "cautious_decay": of_step(
        lambda kept, p, g, before, new, t, rate: (
            (kept_decay := torch.where((before - new) * p >= 0, before, p)), kept_decay - (before - new),
        )
    ),
    "ema": of_step(seen("ema_start", torch.optim.swa_utils.get_ema_avg_fn(O["ema_decay"]))),
    "averaged": of_step(seen("average_start", None)),
    "schedule_free": primal(free, O["sf_beta"], lambda t: min(1.0, t / O["warmup_steps"])),
    "gpa": primal(lambda kept, lr, t: 1 - O["mu_x"], O["mu_y"], lambda t: 1.0),
    "ema_nesterov": further, "warmed_up": risen,
}  # fmt: skip
"""Second texts, with each state as the paper has it; spam_reset has its own test."""


def composed(names: tuple[str, ...], base: str) -> tuple[Spec, dict[str, Any], Step]:
    """The rule inside of wrappers, the first of which is the innermost; its options, and the second text."""
    spec, step = spec_of(base), Base(base)
    options: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, **step.other}
    for name in names:
        made = getattr(wrappers, name)(spec)
        for h in made.hypers[len(spec.hypers) :]:
            options[h.name] = O[h.name if h.name in O else h.name.removeprefix(f"{name}_")]
        spec, step = made, ORACLES[name](step, base)
    return spec, options, step


def follows(names: tuple[str, ...], base: str, steps: int = 7) -> None:
    """The rule's fp64 reading and the second text take the same steps."""
    spec, options, step = composed(names, base)
    draw = torch.Generator().manual_seed(0)
    p = q = torch.randn(4, 3, generator=draw, dtype=torch.float64)
    states: Any = ({}, {})
    for t in range(1, steps + 1):
        g = torch.randn(4, 3, generator=draw, dtype=torch.float64) * (3.0 if t == 5 else 1.0)
        p, *states = spec.evaluate(p, g, t, *states, **options)
        q = step(q, g, t, 1.0)[1]
        torch.testing.assert_close(p, q, rtol=2.0**-36, atol=2.0**-36)
        if spec.evaluation is not None:
            own = spec.evaluation
            kept = states[0] | states[1]
            got = own.function(p, *(kept[s] for s in own.states), **{h: options[h] for h in own.hypers})
            torch.testing.assert_close(got, WEIGHTS[0], rtol=2.0**-36, atol=2.0**-36)


def test_arguments_of_wrappers_have_a_meaning() -> None:
    for name in wrappers.__all__:
        spec = find_spec(f"{name}(adamw)")
        assert all(h.meaning for h in spec.hypers), name


@pytest.mark.parametrize("base", ["adamw", "sgd"])
@pytest.mark.parametrize("name", ORACLES)
def test_a_wrapper_is_its_second_text(name: str, base: str) -> None:
    if refused((name,), base):
        with pytest.raises(UserError, match="sgd has none"):
            follows((name,), base)
    else:
        follows((name,), base)


def refused(names: tuple[str, ...], base: str) -> bool:
    """Return True if one of the wrappers does not fit what is inside of it."""
    inside: set[str] = set()
    for name in names:
        averages = name in AVERAGES | {"lookahead", "snoo"} and inside & AVERAGES
        if averages or name in SPLITTING and inside & FOLLOWING or name == "cautious_decay" and base == "sgd":
            return True
        inside.add(name)
    return False


@given(st.lists(st.sampled_from(sorted(ORACLES)), min_size=2, max_size=4, unique=True), st.sampled_from(sorted(BETA1)))
def test_wrappers_in_any_order_are_their_second_texts(names: list[str], base: str) -> None:
    """Each takes the step of what is inside of it, and what does not fit is refused.

    Six steps: the seventh of warmed_up has a rate of 0, and hyperball would normalize rounding noise.
    """
    if refused(tuple(names), base):
        with pytest.raises(UserError, match=r"both choose|keeps other weights|has none"):
            follows(tuple(names), base, 6)
    else:
        follows(tuple(names), base, 6)


def drawn(number: int) -> tuple[list[str], str, Spec, str]:
    """A chain of 3 to 5 wrappers, the innermost first, a ready-made rule that it fits, both as one, and a plan."""
    draw = random.Random(int(os.environ["OPTGEN_SAMPLE_SEED"]) * 1000 + number)
    while True:
        names = draw.sample(wrappers.__all__, draw.randint(3, 5))
        base = draw.choice(optgen.list("*") if number else [*BETA1])
        with suppress(UserError):
            spec = find_spec(f"{'('.join(reversed(names))}({base}{')' * len(names)}")
            spec.check()
            return names, base, spec, draw.choice(["fp32", "bf16_sr", "int8_split24", "int4_split24"])


@pytest.mark.parametrize("number", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, 24))])
def test_drawn_chains_of_wrappers_are_the_same_on_every_backend(number: int) -> None:
    """Bits of strict C++ kernels and of eager torch over four steps; and the fp64 reading is the second texts', where
    the rule has one."""
    names, base, spec, plan = drawn(number)
    if base in BETA1 and set(names) <= set(ORACLES):
        follows(tuple(names), base, 6)
    cls, made = optgen.compile(spec, plan=plan, maths="strict"), []
    for backend in ("reference", "cpp"):
        draw = torch.Generator().manual_seed(number)
        shapes = [(65, 65), (7, 9)]
        with suppress(ValueError):  # of a rule of rows
            cls([torch.nn.Parameter(torch.zeros(3))])
            shapes += [(70,)]
        params = [torch.nn.Parameter(torch.randn(s, generator=draw).bfloat16()) for s in shapes]
        opt = cls(params, backend=backend)
        opt.feed(keep=True, **dict.fromkeys(cls.INPUTS, torch.ones_like))
        for _ in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, generator=draw).bfloat16()
            make_step(opt)
        made.append(bits([params, [opt.state[p] for p in params]]))
    assert made[0] == made[1], (spec.name, plan)


CHAINS = (
    "hyperball(clipped_value(adamw))", "ema(cautious(warmed_up(mars(lion))))", "averaged(snoo(zclip(adamw)))",
    "gpa(orthograd(sgd))", "adagc(ema_nesterov(grams(spam_reset(adamw))))", "ema(gsam(adamw))",
)  # fmt: skip


@pytest.mark.parametrize("text", [*CHAINS[:2], *(pytest.param(text, marks=pytest.mark.slow) for text in CHAINS[2:])])
def test_wrapped_rules_keep_to_their_bounds_in_few_bits(text: str) -> None:
    """The compiled steps beside the fp64 reading, within the bounds derived for each value."""
    spec, plan = find_spec(text), plan_of("int8_split24")
    spec.check()
    ways = Example(shape=(65, 65), dtype="bfloat16", start=5, steps=3)
    report = fuzz.run(spec, plan, optgen.compile(spec, plan=plan), ways, backend="reference", maths="fast")
    assert report.ok and report.claimed == 1


SWEEPS = {
    "adamw": 1, "averaged(adamw)": 1, "cautious(adamw)": 2, "ema(cautious(adamw))": 2, "mars(adamw)": 2,
    "ema(grams(clipped_value(warmed_up(cautious_decay(adamw)))))": 1, "hyperball(adamw)": 2, "schedule_free(adamw)": 1,
    "muon": 2, "hyperball(muon)": 3, "ema(snoo(adamw))": 1,
}  # fmt: skip


@pytest.mark.parametrize("text", SWEEPS)
def test_wrappers_take_no_pass_over_memory_that_they_do_not_need(text: str) -> None:
    spec = find_spec(text)
    assert len(rule_step(spec, {f.name: f.default for f in spec.flags}, "fast").sweeps) == SWEEPS[text]


def test_spam_begins_anew() -> None:
    """Adam of clipped gradients that is made anew every k steps, in fp64."""
    spec, adam, k = find_spec("spam_reset(adamw)"), spec_of("adamw"), 4
    draw = torch.Generator().manual_seed(3)
    p = q = torch.randn(5, 3, generator=draw, dtype=torch.float64)
    states: list[Any] = [({}, {}), ({}, {})]
    options = {"spam_k": k, "spam_after": 2, "spam_threshold": 1.5, "spam_warmup": 3}
    hit = 0
    for t in range(1, 14):
        g = torch.randn(5, 3, generator=draw, dtype=torch.float64)
        p, *states[0] = spec.evaluate(p, g, t, *states[0], lr=0.2, **options)
        since, rate = (t - 1) % k + 1, 0.2
        if since == 1:
            states[1] = ({}, {})
        if t > k:
            x = min(since / 3, 1.0)
            assert abs(3 * x**2 - 2 * x**3 - (1 - math.cos(math.pi * x)) / 2) < 0.01
            rate *= 3 * x**2 - 2 * x**3
        if since > 2:
            second = 1.5 * states[1][0]["exp_avg_sq"]
            hit += int((g**2 > second).sum())
            g = torch.where(g**2 > second, g.sign() * second.sqrt(), g)
        q, *states[1] = adam.evaluate(q, g, since, *states[1], lr=rate)
        torch.testing.assert_close(p, q, rtol=2.0**-36, atol=2.0**-36)
    assert hit > 10


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("spam_reset(lion)", "spam_reset is for rules with exp_avg_sq"),
        ("mars(adagrad)", "mars is for rules with betas or momentum"),
        ("ema(schedule_free(adamw))", "ema and schedule_free_adamw both choose the weights"),
        ("gpa(schedule_free_sgd)", "gpa and schedule_free_sgd both choose the weights"),
        ("cautious(lookahead(adamw))", "lookahead_adamw keeps other weights beside p"),
        ("lookahead(ema(adamw))", "ema_adamw keeps other weights beside p"),
        ("cautious_decay(sgd)", "cautious_decay is for decoupled weight decay, and sgd has none"),
        ("hyperball(no_such_rule)", "no_such_rule"),
        ("ema(low_rank(muon))", r'in a file of specs/: low_rank\(muon, "momentum_buffer", when='),
    ],
)
def test_a_wrapper_that_does_not_fit_is_refused_before_anything_is_made(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        find_spec(text).check()
    assert caught.value.hint and (caught.value.code == "E404" or caught.value.locs)


@wrapper(cite="a test")
def shy(
    rule, p, g, t, seen=state(nonneg), *, alpha=hyper(0.5, ge=0, le=1), now=flag(every="shy_k"), shy_k=hyper(2, ge=1)
):  # fmt: skip
    """A rule that goes alpha of the way."""
    before, step = rule.split(p, g)
    seen = seen + abs(step)
    return before - (1.0 if now else alpha) * step, seen


def test_a_wrapper_of_ones_own_has_its_names_where_they_are_free() -> None:
    made = shy(spec_of("rmsprop"))  # which has an alpha
    assert made.doc == "RMSprop that goes shy_alpha of the way."
    assert {"alpha", "shy_alpha", "shy_k"} <= {h.name for h in made.hypers}
    made.check()
    with pytest.raises(UserError, match="`shy_alpha` cannot be used: shy_rmsprop has something of that name"):
        shy(made)
    with pytest.raises(UserError, match="shy goes around a rule, got 'rmsprop'"):
        shy("rmsprop")
