"""Optimizers that somebody else wrote, and papers' rules written out in plain torch: what specs are held against.

An oracle is made from flags and hyper-parameters by constructor name, and steps one parameter of any shape.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import typing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import came_pytorch
import dadaptation
import prodigyopt
import pytest
import pytorch_optimizer
import schedulefree
import torch
from adam_mini import Adam_mini
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from optgen.lang.declare import INPUT
from optgen.lang.spec import Spec

Step = Callable[..., Tensor]  # (p, g, t, lr, **inputs) -> new p
Oracle = Callable[[dict[str, bool], dict[str, Any]], Step]
FOLDER = Path(sys.prefix) / "oracles"


def optional(name: str) -> Any:
    """A module from the environment or from FOLDER, into which `make setup` puts it; without it the test is skipped."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    pytest.importorskip(name.partition(".")[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typing, "override", lambda method: method, raising=False)  # of Python 3.12, as a package has it
        return importlib.import_module(name)


def stepping(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> Step:
    """A torch.optim.Optimizer as a function; the parameter that it owns takes p at every step."""
    held: list[tuple[torch.nn.Parameter, torch.optim.Optimizer]] = []

    def step(p: Tensor, g: Tensor, t: int, lr: float, **fed: Tensor) -> Tensor:
        if not held:
            parameter = torch.nn.Parameter(p.clone())
            held.append((parameter, make([parameter])))
        parameter, optimizer = held[0]
        parameter.data.copy_(p)
        parameter.grad = g.clone()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step(**{name: [value] for name, value in fed.items()})
        return parameter.data.clone()

    return step


def fed_at(spec: Spec, shape: tuple[int, ...], t: int) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """Return a step's inputs, fp64 of fp32 from 0.5 to 2, and the flags that follow them: a rule that goes on without
    is fed every third step."""
    draw, flags = torch.Generator().manual_seed(t), {f.name: t % 3 == 1 for f in spec.flags if f.fed}
    inputs = [s.name for s in spec.states if s.trait == INPUT and all(flags.values())]
    return {x: (0.5 + 1.5 * torch.rand(shape, generator=draw, dtype=torch.float32)).double() for x in inputs}, flags


def record(name: str, ours: Tensor, theirs: Tensor) -> None:
    """Raise the distance of a rule from its oracle in the file that OPTGEN_DISTANCES names: docs/distances.json, which
    the list of rules shows.  By one process."""
    if path := os.environ.get("OPTGEN_DISTANCES"):
        known = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        distance = float(((ours - theirs).abs() / (1 + theirs.abs())).max())
        known[name] = float(f"{max(distance, known.get(name, 0.0)):.1e}")
        Path(path).write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")


def torch_optim(cls: str, **fixed: Any) -> Oracle:
    return package(getattr(torch.optim, cls), foreach=False, **fixed)


def peer(cls: str, **fixed: Any) -> Oracle:
    return package(getattr(pytorch_optimizer, cls), **fixed)


def package(cls: Any, **fixed: Any) -> Oracle:
    """Another package's optimizer with our names of options."""
    return lambda flags, hypers: stepping(lambda ps: cls(ps, **flags, **hypers, **fixed))


def named(inner: Oracle, **names: str) -> Oracle:
    """An oracle by its own names of flags and hyper-parameters."""
    return lambda *given: inner(*({names.get(k, k): v for k, v in x.items()} for x in given))


class States(SimpleNamespace):
    """The states of a rule: each reads as 0 of the weight's dtype until it is set."""

    dtype = torch.float64

    def __getattr__(self, name: str) -> Tensor:
        return torch.zeros((), dtype=self.dtype)


def paper(rule: Callable[..., Tensor]) -> Oracle:
    """The oracle of a step that is written out: (options, states, p, g, t, lr) -> new p."""

    def make(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
        options, states = SimpleNamespace(**flags, **hypers), States()

        def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
            states.dtype = p.dtype
            return rule(options, states, p, g, t, lr)

        return step

    make.__name__ = rule.__name__
    return make


def table(*own: Oracle, **others: Oracle) -> dict[str, Oracle]:
    """Return oracles by the rules that they are of, which functions have as their names."""
    return {oracle.__name__: oracle for oracle in own} | others


def moments(o: Any, s: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    """Adam's two averages after this gradient, without their corrections."""
    beta1, beta2 = o.betas
    s.m, s.v = beta1 * s.m + (1 - beta1) * g, beta2 * s.v + (1 - beta2) * g * g
    return s.m, s.v


def adam_update(o: Any, s: Any, g: Tensor, t: int) -> Tensor:
    """Adam's step of unit size."""
    m, v = moments(o, s, g)
    return m / (1 - o.betas[0] ** t) / ((v / (1 - o.betas[1] ** t)).sqrt() + o.eps)


def sgd(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """torch.optim.SGD refuses nesterov without momentum, where it has no effect, and with dampening."""
    if flags["nesterov"] and hypers["momentum"] == 0:
        flags = {"nesterov": False}
    return (damped_nesterov if flags["nesterov"] and hypers["dampening"] else torch_optim("SGD"))(flags, hypers)


@paper
def damped_nesterov(o, s, p, g, t, lr):
    """torch's rule written out, for the one combination that its constructor refuses."""
    g = g + o.weight_decay * p
    s.buf = g if t == 1 else o.momentum * s.buf + (1 - o.dampening) * g
    return p - lr * (g + o.momentum * s.buf)


# -- rules of elements


def adamw(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """torch.optim.AdamW; torch has no decouple_lr, so there the decay is applied outside."""
    if not flags["decouple_lr"]:
        return torch_optim("AdamW")({"amsgrad": flags["amsgrad"]}, hypers)
    inner, s = torch_optim("AdamW")({"amsgrad": flags["amsgrad"]}, hypers | {"weight_decay": 0.0}), States()

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        s.peak = max(float(s.peak), lr)
        return inner(p * (1 - hypers["weight_decay"] * lr / s.peak), g, t, lr)

    return step


def sgdw(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """torch.optim.SGD around a decoupled decay.  pytorch_optimizer's SGDW starts its buffer as a copy of p."""
    inner = sgd(flags, hypers | {"weight_decay": 0.0})
    return lambda p, g, t, lr: inner(p * (1 - lr * hypers["weight_decay"]), g, t, lr)


@paper
def signum(o, s, p, g, t, lr):
    """The paper's algorithm 2: pytorch_optimizer.SignSGD zeroes its buffer at every step and ignores decay."""
    s.m = o.momentum * s.m + (1 - o.momentum) * g
    return p - lr * (torch.sign(s.m) + o.weight_decay * p)


@paper
def ademamix(o, s, p, g, t, lr):
    """The paper's algorithm 1: pytorch_optimizer divides the slow average by 1 - beta1^t too."""
    beta1, beta2, b3 = o.betas
    alpha = min(t * o.alpha / o.alpha_warmup, o.alpha) if o.alpha_warmup else o.alpha
    if o.beta3_warmup:
        share, l1, l3 = t / o.beta3_warmup, math.log(max(beta1, 1e-8)), math.log(b3)
        b3 = min(math.exp(l1 * l3 / ((1 - share) * l3 + share * l1)), b3)
    s.m1 = beta1 * s.m1 + (1 - beta1) * g
    s.m2 = b3 * s.m2 + (1 - b3) * g
    s.v = beta2 * s.v + (1 - beta2) * g**2
    m1_hat, v_hat = s.m1 / (1 - beta1**t), s.v / (1 - beta2**t)
    return p - lr * ((m1_hat + alpha * s.m2) / (v_hat.sqrt() + o.eps) + o.weight_decay * p)


@paper
def adopt(o, s, p, g, t, lr):
    """The paper's algorithm 2, first gradient as g_0: pytorch_optimizer's clipping counts steps from 2."""
    beta1, beta2 = o.betas
    if not o.decoupled_weight_decay:
        g = g + o.weight_decay * p
    if t == 1:
        s.v = g * g
        return p
    if o.decoupled_weight_decay:
        p = p - lr * o.weight_decay * p
    bound = (t - 1) ** 0.25 if o.clipped else math.inf
    s.m = beta1 * s.m + (1 - beta1) * (g / s.v.sqrt().clamp(min=o.eps)).clamp(-bound, bound)
    s.v = beta2 * s.v + (1 - beta2) * g * g
    return p - lr * s.m


@paper
def adam_atan2(o, s, p, g, t, lr):
    """The paper's equation, with torch's atan2: pytorch_optimizer has it inside of Prodigy and Ranger25 only."""
    m, v = moments(o, s, g)
    angle = torch.atan2(m / (1 - o.betas[0] ** t), o.denom_scale * (v / (1 - o.betas[1] ** t)).sqrt())
    return p * (1 - lr * o.weight_decay) - lr * o.out_scale * angle


@paper
def laprop(o, s, p, g, t, lr):
    """The paper's algorithm 1 with the authors' flags: pytorch_optimizer averages lr * gradient."""
    beta1, beta2 = o.betas
    s.v, s.c = beta2 * s.v + (1 - beta2) * g * g, beta2 * s.c + (1 - beta2) * g
    after = not o.centered or t > o.steps_before_using_centered
    v = s.v - s.c**2 if o.centered and after else s.v
    if o.amsgrad and after:
        s.top = v = torch.maximum(s.top, v)
    s.m = beta1 * s.m + (1 - beta1) * g / ((v / (1 - beta2**t)).sqrt() + o.eps)
    p = p - lr * s.m / (1 - beta1**t)
    return p - lr * o.weight_decay * p


@paper
def yogi(o, s, p, g, t, lr):
    """The paper's algorithm 2 with Adam's bias correction: pytorch_optimizer starts m at the accumulator too."""
    beta1, beta2 = o.betas
    v = s.v if t > 1 else torch.tensor(o.initial_accumulator, dtype=torch.float64)
    p = p - lr * o.weight_decay * p
    s.m = beta1 * s.m + (1 - beta1) * g
    s.v = v - (1 - beta2) * torch.sign(v - g * g) * g * g
    return p - lr * (s.m / (1 - beta1**t)) / ((s.v / (1 - beta2**t)).sqrt() + o.eps)


@paper
def adabound(o, s, p, g, t, lr):
    """The authors' code, but for the largest rate so far: pytorch_optimizer adds 1e-15 to AMSBound's maximum."""
    m, v = moments(o, s, g + o.weight_decay * p)
    s.peak, s.top = max(float(s.peak), lr), torch.maximum(s.top, v)
    final, debias = o.final_lr * lr / s.peak, math.sqrt(1 - o.betas[1] ** t) / (1 - o.betas[0] ** t)
    rate = lr * debias / ((s.top if o.amsbound else v).sqrt() + o.eps)
    return p - m * rate.clamp(final * (1 - 1 / (o.gamma * t + 1)), final * (1 + 1 / (o.gamma * t)))


@paper
def adapnm(o, s, p, g, t, lr):
    """Algorithm 3, with a momentum for odd steps and one for even: pytorch_optimizer divides eps by a correction."""
    (beta1, beta2), key = o.betas, f"m{t % 2}"
    g, p = (g, p * (1 - lr * o.weight_decay)) if o.decoupled else (g + o.weight_decay * p, p)
    setattr(s, key, beta1**2 * getattr(s, key) + (1 - beta1**2) * g)
    s.v = beta2 * s.v + (1 - beta2) * g * g
    s.top = torch.maximum(s.top, s.v)
    m = ((1 + o.beta0) * getattr(s, key) - o.beta0 * getattr(s, f"m{1 - t % 2}")) / math.hypot(1 + o.beta0, o.beta0)
    return p - lr * m / (1 - beta1**t) / (((s.top if o.amsgrad else s.v) / (1 - beta2**t)).sqrt() + o.eps)


@paper
def diffgrad(o, s, p, g, t, lr):
    """The paper's equations: pytorch_optimizer has the friction in its rectified form only."""
    g = g + o.weight_decay * p
    friction, s.g = torch.sigmoid((s.g - g).abs()), g
    return p - lr * friction * adam_update(o, s, g, t)


@paper
def padam(o, s, p, g, t, lr):
    """The authors' code: pytorch_optimizer's lacks amsgrad, which is on by default."""
    m, v = moments(o, s, g + o.weight_decay * p)
    s.top = torch.maximum(s.top, v)
    rate = lr * math.sqrt(1 - o.betas[1] ** t) / (1 - o.betas[0] ** t)
    return p - rate * m / ((s.top if o.amsgrad else v).sqrt() + o.eps) ** (2 * o.partial)


@paper
def qhadam(o, s, p, g, t, lr):
    """The paper's equation 12: pytorch_optimizer adds 1 - beta2 g^2 to the second moment for (1 - beta2) g^2."""
    decay, (nu1, nu2) = o.weight_decay, o.nus
    g, p = (g, p * (1 - lr * decay)) if o.decouple_weight_decay else (g + decay * p, p)
    m, v = (x / (1 - beta**t) for x, beta in zip(moments(o, s, g), o.betas, strict=True))
    return p - lr * ((1 - nu1) * g + nu1 * m) / (((1 - nu2) * g**2 + nu2 * v).sqrt() + o.eps)


def at_rate(inner: Oracle, rate: Callable[[dict[str, bool], dict[str, Any]], float], *others: str) -> Oracle:
    """The oracle at lr times a rate; `others` are flags and hyper-parameters that it has not."""

    def make(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
        given = ({k: v for k, v in x.items() if k not in others} for x in (flags, hypers))
        step, scale = inner(*given), rate(flags, hypers)
        return lambda p, g, t, lr: step(p, g, t, lr * scale)

    return make


def adamod(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """pytorch_optimizer's, which has the three decays as one option."""
    hypers = hypers | {"betas": (*hypers["betas"], hypers["beta3"])}
    return peer("AdaMod")({}, {k: v for k, v in hypers.items() if k != "beta3"})


@paper
def srmm(o, s, p, g, t, lr):
    """The paper's recursion of both averages: pytorch_optimizer's begin at 0, so that the first step shrinks p."""
    w = 1.0 if t == 1 else (t % o.memory_length + 1) ** -o.beta
    s.g, s.p = (1 - w) * s.g + w * g, (1 - w) * s.p + w * p
    s.p = s.p - lr * s.g
    return s.p


@paper
def bcos(o, s, p, g, t, lr):
    """The paper's BCOS-c: pytorch_optimizer's estimate has the new momentum, in which the gradient is already."""
    last, b = s.m if t > 1 else g, o.beta
    s.m = b * last + (1 - b) * g
    v = (3 * b**2 - 2 * b**3) * last**2 + (1 - b) ** 2 * g**2 + 2 * b * (1 - b) ** 2 * last * g
    v = (1 - (1 - b) ** 2) * last**2 + (1 - b) ** 2 * g**2 if o.simple_cond else v
    return p * (1 - lr * o.weight_decay) - lr * s.m / (v.sqrt() + o.eps)


@paper
def adamc(o, s, p, g, t, lr):
    """The paper's algorithm 2: pytorch_optimizer adds 1e-15 under the root, and its largest rate is an option."""
    s.peak = max(float(s.peak), lr)
    decay = lr * lr / s.peak if o.normalized else lr
    return p * (1 - decay * o.weight_decay) - lr * adam_update(o, s, g, t)


@paper
def simplified_ademamix(o, s, p, g, t, lr):
    """The paper's sum of gradients: pytorch_optimizer takes an average, and divides by the correction."""
    (beta1, beta2), until = o.betas, o.beta1_warmup
    if t < until:
        start, end = (math.log(0.5) / math.log(b) - 1 for b in (o.min_beta1, beta1))
        beta1 = 0.5 ** (1 / ((1 - t / until) * start + t / until * end + 1))
    s.m, s.v = beta1 * s.m + g, beta2 * s.v + (1 - beta2) * g * g
    return p * (1 - lr * o.weight_decay) - lr * (s.m + o.alpha * g) / ((s.v / (1 - beta2**t)).sqrt() + o.eps)


@paper
def lion_k(o, s, p, g, t, lr):
    """The paper's scheme with autograd's gradient of K."""
    beta1, beta2 = o.betas
    x = (beta1 * s.m + (1 - beta1) * g).expand_as(p).clone().requires_grad_()
    huber = torch.nn.functional.huber_loss(x, torch.zeros_like(x), reduction="sum", delta=o.e) / o.e
    (huber if o.huber else (x**2 + o.e**2).sqrt().sum()).backward()
    s.m = beta2 * s.m + (1 - beta2) * g
    return p * (1 - lr * o.weight_decay) - lr * x.grad


@paper
def eadam(o, s, p, g, t, lr):
    """The paper's algorithm: no package of the tests has it."""
    m, s.v = moments(o, s, g + o.weight_decay * p)
    s.v = s.v + o.eps
    return p - lr * m / (1 - o.betas[0] ** t) / (s.v / (1 - o.betas[1] ** t)).sqrt()


@paper
def acprop(o, s, p, g, t, lr):
    """The paper's algorithm, with the corrections and eps of the authors' code: no package of the tests has it."""
    beta1, beta2 = o.betas
    p, s.m = p * (1 - lr * o.weight_decay), beta1 * s.m + (1 - beta1) * g
    s.s = s.s + o.eps if t > 1 else torch.zeros_like(p)
    p = p - lr * (g / ((s.s / (1 - beta2 ** (t - 1))).sqrt() + o.eps) if t > 1 else g)
    s.s = beta2 * s.s + (1 - beta2) * (g - s.m) ** 2
    return p


@paper
def agd(o, s, p, g, t, lr):
    """The paper's algorithm 1: no package of the tests has it."""
    beta1, beta2 = o.betas
    p, last = p * (1 - lr * o.weight_decay), s.hat
    s.m = beta1 * s.m + (1 - beta1) * g
    s.hat = s.m / (1 - beta1**t)
    s.b = beta2 * s.b + (1 - beta2) * (s.hat - last) ** 2
    s.top = torch.maximum(s.top, s.b)
    return p - lr * s.hat / ((s.top if o.amsgrad else s.b) / (1 - beta2**t)).sqrt().clamp(min=o.delta)


@paper
def adams(o, s, p, g, t, lr):
    """The paper's algorithm: pytorch_optimizer's AdamS is the stable decay of Xie et al."""
    (beta1, beta2), last = o.betas, s.m
    s.m = beta1 * last + (1 - beta1) * g
    return p * (1 - lr * o.weight_decay) - lr * s.m / ((beta2 * last**2 + (1 - beta2) * g**2).sqrt() + o.eps)


@paper
def sadam(o, s, p, g, t, lr):
    """The paper's algorithm 1 with torch's softplus: no package of the tests has it."""
    m, v = moments(o, s, g + o.weight_decay * p)
    s.top = torch.maximum(s.top, v)
    lr *= math.sqrt(1 - o.betas[1] ** t) / (1 - o.betas[0] ** t) if o.bias_correction else 1
    root = (s.top if o.amsgrad else v).sqrt()
    return p - lr * m / torch.nn.functional.softplus(root, beta=o.sharpness, threshold=1e9)


@paper
def nosadam(o, s, p, g, t, lr):
    """The paper's mean of weighted squares: no package of the tests has it."""
    g = g + o.weight_decay * p
    s.m, s.sum, s.b = o.beta1 * s.m + (1 - o.beta1) * g, s.sum + t**-o.gamma * g * g, s.b + t**-o.gamma
    return p - lr / (1 - o.beta1**t if o.bias_correction else 1) * s.m / ((s.sum / s.b).sqrt() + o.eps)


@paper
def sgdf(o, s, p, g, t, lr):
    """The paper's filter, with an eps in the gain's divisor: no package of the tests has it."""
    (beta1, beta2), g = o.betas, g + o.weight_decay * p
    s.m = beta1 * s.m + (1 - beta1) * g
    s.s = beta2 * s.s + (1 - beta2) * (g - s.m) ** 2
    m, v = s.m / (1 - beta1**t), s.s / (1 - beta2**t)
    v = v / ((1 + beta1) / ((1 - beta1) * (1 - beta1 ** (2 * t)))) if o.of_average else v
    gain = v / (v + (g - m) ** 2 + o.eps)
    return p - lr * (m + (gain.sqrt() if o.root_gain else gain) * (g - m))


@paper
def innaprop(o, s, p, g, t, lr):
    """The authors' code in the paper's two states: no package of the tests has it."""
    s.v, kept = o.sigma * s.v + (1 - o.sigma) * g * g, 1 - o.alpha * lr
    u = g / ((s.v / (1 - o.sigma**t)).sqrt() + o.eps)
    s.m = kept * s.m + lr**2 * (1 - o.alpha * o.beta) / kept * u
    return p * (1 - lr * o.weight_decay) - s.m - lr * (o.beta - lr) / kept * u


@paper
def srsgd(o, s, p, g, t, lr):
    """The authors' code, whose last plain step is kept by the way from it: no package of the tests has it."""
    k, last = 1 + (t - 1) % (o.restarting_iter - 1), p - s.ahead
    plain = p - lr * (g + o.weight_decay * p)
    s.ahead = (k - 1) / (k + 2) * (plain - last)
    return plain + s.ahead


@paper
def fsgdm(o, s, p, g, t, lr):
    """The authors' code: no package of the tests has it."""
    start = t // (o.sigma // o.n_stages) * (o.sigma // o.n_stages)
    g = g + o.weight_decay * p
    s.m = start / (start + o.c_scaling * o.sigma) * s.m + o.v_coefficient * g if t > 1 else g
    return p - lr * s.m


# -- rules that reduce


def adafactor(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    return torch_optim("Adafactor")({}, hypers)


def adafactor_paper(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """pytorch_optimizer's, whose relative step is 1e-2 at most."""
    (eps1, eps2), betas = hypers["eps"], (hypers["beta1"] or None, 0.9999)
    own = {k: hypers[k] for k in ("clip_threshold", "decay_rate", "weight_decay")} | flags | {"relative_step": False}
    inner = peer("AdaFactor", betas=betas, eps1=eps1, eps2=eps2, momentum_dtype=torch.float64)({}, own)
    return lambda p, g, t, lr: inner(p, g, t, min(lr, t**-0.5) if flags["relative_step"] else lr)


@paper
def lamb(o, s, p, g, t, lr):
    """Algorithm 2: pytorch_optimizer's has no bias correction, decays outside of the ratio and clamps |p| to 10."""
    u = adam_update(o, s, g, t) / (1 if o.grad_averaging else 1 - o.betas[0]) + o.weight_decay * p
    phi = min(max(float(torch.linalg.vector_norm(p)), o.min_norm), o.max_norm)
    length = float(torch.linalg.vector_norm(u))
    return p - lr * (phi / length if phi > 0 and length > 0 else 1.0) * u


def sm3(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """pytorch_optimizer's for each matrix of a tensor: its cover of more dimensions is another one."""
    steps: dict[int, Step] = {}

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        matrices = zip(*(x.reshape(-1, *x.shape[-2:]) for x in (p, g)), strict=True)
        made = [steps.setdefault(k, peer("SM3")({}, hypers))(*x, t, lr) for k, x in enumerate(matrices)]
        return torch.stack(made).reshape(p.shape)

    return step


@paper
def lars(o, s, p, g, t, lr):
    """Algorithm 1: pytorch_optimizer's leaves vectors without a ratio."""
    w, d = torch.linalg.vector_norm(p), torch.linalg.vector_norm(g)
    local = o.trust_coefficient * w / (d + o.weight_decay * w) if w > 0 and d > 0 else 1.0
    step = lr * local * (g + o.weight_decay * p)
    s.v = o.momentum * s.v + (1 - o.dampening) * step
    return p - (step + o.momentum * s.v if o.nesterov else s.v)


@paper
def novograd(o, s, p, g, t, lr):
    """Algorithm 1, without Adam's bias corrections, which first values replace."""
    beta1, beta2 = o.betas
    length = torch.linalg.vector_norm(g) ** 2
    s.v = length if t == 1 else beta2 * s.v + (1 - beta2) * length
    u = g / (s.v.sqrt() + o.eps) + o.weight_decay * p
    s.m = beta1 * s.m + ((1 - beta1) if o.grad_averaging else 1) * u
    return p - lr * s.m


def _cautious(u: Tensor, g: Tensor) -> Tensor:
    mask = (u * g > 0).double()
    return u * mask / mask.mean().clamp(min=1e-3)


@paper
def cautious_adamw(o, s, p, g, t, lr):
    """The paper's algorithm 2 with the scaling of its authors' code, 1 / max(mean, 1e-3)."""
    return p * (1 - lr * o.weight_decay) - lr * _cautious(adam_update(o, s, g, t), g)


@paper
def cautious_lion(o, s, p, g, t, lr):
    """Likewise, with the scale of the authors' AdamW; that of their Lion is n / (ones + 1)."""
    beta1, beta2 = o.betas
    u = (beta1 * s.m + (1 - beta1) * g).sign()
    s.m = beta2 * s.m + (1 - beta2) * g
    return p * (1 - lr * o.weight_decay) - lr * _cautious(u, g)


@paper
def mars(o, s, p, g, t, lr):
    """Algorithm 2 with the last gradient in place of the last weight's: pytorch_optimizer's eps is divided by the
    bias correction, and its last gradient is the gradient's own tensor."""
    beta1 = o.betas[0]
    c = g + o.gamma * beta1 / (1 - beta1) * (g - s.last) if t > 1 else g
    s.last = g
    length = float(torch.linalg.vector_norm(c))
    c = c / length if length > 1 else c
    return p - lr * (adam_update(o, s, c, t) + o.weight_decay * p)


def orthograd(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """The paper's projection before torch.optim.SGD."""
    inner = sgd(flags, hypers)

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        tangent = g - p * (p * g).sum() / (p * p).sum() if p.numel() > 1 else torch.zeros_like(g)
        length = torch.linalg.vector_norm(tangent)
        return inner(p, tangent * (torch.linalg.vector_norm(g) / length if length > 0 else 1.0), t, lr)

    return step


def adam_mini(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """The authors' package, which tells a block of each row from one block by a parameter's name."""

    def made(ps: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = Adam_mini([("embed" if ps[0].ndim > 1 else "vector", ps[0])], verbose=False, **hypers)
        optimizer.world_size = 1  # it would talk to one process per GPU
        return optimizer

    rows, vectors = _flat(stepping(made)), stepping(made)
    return lambda p, g, t, lr: (rows if p.ndim > 1 else vectors)(p, g, t, lr)


def _projected(o: Any, p: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, float]:
    """The paper's two tests, by channels and as a whole: (step, what the decay is multiplied by)."""
    for rows in (p.shape[0], 1) if p.ndim > 1 else ():
        w, d, s = (x.reshape(rows, -1) for x in (p, g, u))
        cos = (w * d).sum(1).abs() / (w.norm(dim=1) + o.eps) / (d.norm(dim=1) + o.eps)
        if cos.max() < o.delta / math.sqrt(w.shape[1]):
            unit = w / (w.norm(dim=1, keepdim=True) + o.eps)
            return (s - unit * (unit * s).sum(1, keepdim=True)).reshape(p.shape), o.wd_ratio
    return u, 1.0


@paper
def adamp(o, s, p, g, t, lr):
    """Algorithm 2: pytorch_optimizer's divides eps by a correction."""
    beta1, beta2 = o.betas
    m, v = moments(o, s, g)
    ahead = beta1 * m + (1 - beta1) * g if o.nesterov else m
    u, ratio = _projected(o, p, g, ahead / ((v / (1 - beta2**t)).sqrt() + o.eps))
    return p * (1 - lr * o.weight_decay * ratio) - lr / (1 - beta1**t) * u


ELEMENTWISE = table(
    acprop, adabound, adam_atan2, adamc, adamod, adams, adamw, adapnm, ademamix, adopt, agd, bcos,
    diffgrad, eadam, fsgdm, innaprop, laprop, lion_k, nosadam, padam, qhadam, sadam, sgd, sgdf,
    sgdw, signum, simplified_ademamix, srmm, srsgd, yogi,
    accsgd=peer("AccSGD"),
    adabelief=named(peer("AdaBelief"), amsgrad="ams_bound"),
    adadelta=torch_optim("Adadelta"),
    adagrad=torch_optim("Adagrad"),
    adam=torch_optim("Adam"),
    adamax=torch_optim("Adamax"),
    adamg=named(peer("AdamG"), numerator="p", exponent="q"),
    adan=named(peer("Adan"), no_prox="weight_decouple"),
    adasmooth=peer("AdaSmooth"),
    aggmo=peer("AggMo"),
    ano=peer("Ano"),
    asgd=torch_optim("ASGD"),
    dual_adam=peer("DualAdam"),
    exadam=peer("EXAdam"),
    focus=peer("FOCUS"),
    ftrl=peer("FTRL"),
    grams=peer("Grams"),
    grokfast_adamw=at_rate(
        peer("GrokFastAdamW", normalize_lr=False),
        lambda flags, hypers: 1 / (1 + hypers["grokfast_lamb"]) if flags["normalize_lr"] else 1.0, "normalize_lr",
    ),
    kate=peer("Kate"),
    lion=peer("Lion"),
    madgrad=named(peer("MADGRAD"), decouple_decay="weight_decouple"),
    msvag=peer("MSVAG"),
    nadam=torch_optim("NAdam"),
    pid=peer("PID"),
    pnm=named(peer("PNM"), decoupled="weight_decouple"),
    qhm=peer("QHM"),
    radam=torch_optim("RAdam"),
    rmsprop=torch_optim("RMSprop"),
    rprop=torch_optim("Rprop"),
    spam=peer("SPAM"),
    tiger=peer("Tiger"),
    vsgd=peer("VSGD"),
)  # fmt: skip


def _adamw_beside(hypers: dict[str, Any], eps: str) -> Step:
    """AdamW as rules of matrices run it for other parameters: it has a learning rate of its own."""
    inner = torch_optim("AdamW")({}, {
        "lr": hypers["adamw_lr"], "betas": hypers["adamw_betas"], "eps": hypers[eps],
        "weight_decay": hypers["weight_decay"],
    })  # fmt: skip
    return lambda p, g, t, lr: inner(p, g, t, hypers["adamw_lr"])


def _adamw_of_same_rate(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    return torch_optim("AdamW")({}, {k: hypers[k] for k in ("betas", "eps", "weight_decay")})


def _flat(inner: Step) -> Step:
    """Convolutions are matrices of their output channels."""

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        rows = p.shape[0]
        return inner(p.reshape(rows, -1), g.reshape(rows, -1), t, lr).reshape(p.shape)

    return step


def _by_shape(matrices: Step, others: Step, only_others: bool) -> Step:
    return lambda p, g, t, lr: (others if only_others or p.ndim < 2 else _flat(matrices))(p, g, t, lr)


def of_matrices(others: Oracle) -> Callable[[Callable[..., Tensor]], Oracle]:
    """The oracle of a step of one matrix that is written out, beside another for what is no matrix."""

    def around(rule: Callable[..., Tensor]) -> Oracle:
        def make(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
            return _by_shape(paper(rule)(flags, hypers), others(flags, hypers), flags["adamw"])

        make.__name__ = rule.__name__
        return make

    return around


def beside_adamw(eps: str) -> Callable[[Callable[..., Tensor]], Oracle]:
    """`of_matrices` beside AdamW with a rate of its own, and the hyper-parameter of that name as eps."""
    return of_matrices(lambda flags, hypers: _adamw_beside(hypers, eps))


def orthogonal(o: Any, x: Tensor, eps: float = 1e-7) -> Tensor:
    """torch's Newton-Schulz."""
    return _zeropower_via_newtonschulz(x, o.ns_coefficients, o.ns_steps, eps).to(x.dtype)


@of_matrices(_adamw_of_same_rate)
def sinkgd(o, s, p, g, t, lr):
    """Algorithm 4: rows, then columns, five times divided by their norms, times the root of their length."""
    rows, columns = g.shape
    for _ in range(5):
        g = math.sqrt(columns) * g / g.norm(dim=1, keepdim=True).clamp(min=1e-12 * math.sqrt(columns))
        g = math.sqrt(rows) * g / g.norm(dim=0, keepdim=True).clamp(min=1e-12 * math.sqrt(rows))
    return p * (1 - lr * o.weight_decay) - lr * o.scale * g


@paper
def stable_spam(o, s, p, g, t, lr):
    """The authors' code, but that the averages of norms, which never begin anew, keep their bias corrections."""
    (beta1, beta2), p = o.betas, p * (1 - lr * o.weight_decay)
    angle, end = math.pi / (o.total_T + 1), o.eta_min
    fallen = end + (1 - end) * (1 + math.cos((t + 1) * angle)) / (1 + math.cos(angle)) if t < o.total_T else end
    scale = fallen if o.total_T else 1.0
    beta1, gamma1 = beta1 * scale, o.gamma1 * scale
    top = g.abs().max()
    s.top = o.gamma3 * s.top + (1 - o.gamma3) * top
    limit = s.top / (1 - o.gamma3**t)
    g = torch.where(g.abs() > limit, g / top * limit, g)
    s.norm = gamma1 * s.norm + (1 - gamma1) * g.norm()
    s.square = o.gamma2 * s.square + (1 - o.gamma2) * g.norm() ** 2
    g = g / g.norm() * (s.norm / (1 - gamma1**t)) / ((s.square / (1 - o.gamma2**t)).sqrt() + o.eps)
    if t % o.update_proj_gap == 0:
        s.m = s.v = torch.zeros(())
    since = t if t < o.update_proj_gap else t % o.update_proj_gap + 1
    s.m, s.v = beta1 * s.m + (1 - beta1) * g, beta2 * s.v + (1 - beta2) * g * g
    return p - lr / (1 - beta1**since) * s.m / (s.v.sqrt() / math.sqrt(1 - beta2**since) + o.eps)


@paper
def adanorm(o, s, p, g, t, lr):
    """The authors' rule in Adam's form: pytorch_optimizer divides eps by the correction too, and adds 1e-15."""
    (beta1, beta2), g = o.betas, g + o.weight_decay * p
    s.norm = o.r * s.norm + (1 - o.r) * g.norm()
    m, v = s.m, s.v
    s.m = beta1 * m + (1 - beta1) * g * max(1.0, float(s.norm / g.norm()))
    s.v = beta2 * v + (1 - beta2) * g * g
    return p - lr * s.m / (1 - beta1**t) / ((s.v / (1 - beta2**t)).sqrt() + o.eps)


def _torque(o, s, m, g):
    """The paper's d: pytorch_optimizer has the products of elements in place of the cosine."""
    flat = m.expand_as(g).reshape(1, -1), g.reshape(1, -1)
    cos = torch.nn.functional.cosine_similarity(*flat, eps=1e-300).sum()
    s.s = o.decay_rate * s.s + (1 - o.decay_rate) * cos
    return ((1 + s.s) / 2 + o.eps) * g


@paper
def tam(o, s, p, g, t, lr):
    """The paper's equations: pytorch_optimizer's momentum begins as the gradient."""
    s.m = o.momentum * s.m + _torque(o, s, s.m, g)
    return p * (1 - lr * o.weight_decay) - lr * s.m


@paper
def adatam(o, s, p, g, t, lr):
    """The paper's equations, with pytorch_optimizer's Adam without corrections."""
    s.m, s.v = o.betas[0] * s.m + _torque(o, s, s.m, g), o.betas[1] * s.v + (1 - o.betas[1]) * g * g
    return p * (1 - lr * o.weight_decay) - lr * s.m / (s.v.sqrt() + o.eps)


@paper
def kourkoutas_beta(o, s, p, g, t, lr):
    """The paper's algorithm with a tensor for a layer: the authors' code is for MLX."""
    s.ema = o.alpha * s.ema + (1 - o.alpha) * g.norm()
    sun = 1 / (1 + (s.ema + o.tiny_spike) / g.norm()) if t > o.warmup_steps else 0.5
    beta2 = o.beta2_max - (o.beta2_max - o.beta2_min) * sun
    s.m, s.v = o.beta1 * s.m + (1 - o.beta1) * g, beta2 * s.v + (1 - beta2) * g * g
    s.top, s.product = torch.maximum(o.decay * s.top, s.v), beta2 * (s.product if t > 1 else 1.0)
    b1, b2 = (o.beta1**t, s.product if o.exact else o.beta2_max**t) if o.bias_correction or o.exact else (0, 0)
    u = s.m / (1 - b1) / (((s.top if o.amsgrad else s.v) / (1 - b2)).sqrt() + o.eps)
    return p * (1 - lr * o.weight_decay) - lr * u.clamp(-o.max_ratio, o.max_ratio)


def amos(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """pytorch_optimizer's, whose scale follows from the shape."""

    class Amos(pytorch_optimizer.Amos):
        get_scale = staticmethod(lambda p: hypers["scale"])

    return package(Amos)({}, {k: v for k, v in hypers.items() if k != "scale"})


@paper
def lans(o, s, p, g, t, lr):
    """The paper's algorithm 2: no package of the tests has it."""
    m, v = moments(o, s, g / g.norm())
    root, beta1 = (v / (1 - o.betas[1] ** t)).sqrt() + o.eps, o.betas[0]
    slow, fast = (x / root + o.weight_decay * p for x in (m / (1 - beta1**t), g / g.norm()))
    return p - lr * p.norm() * (beta1 * slow / slow.norm() + (1 - beta1) * fast / fast.norm())


@paper
def aida(o, s, p, g, t, lr):
    """The paper's algorithm 1 with two projections: pytorch_optimizer adds 1e-15 under the root."""
    (beta1, beta2), g = o.betas, g + o.weight_decay * p
    s.m = beta1 * s.m + (1 - beta1) * g
    a, b = g, s.m
    for _ in range(2):
        a, b = (a * b).sum() / ((a * a).sum() + o.xi) * a, (a * b).sum() / ((b * b).sum() + o.xi) * b
    s.v = beta2 * s.v + (1 - beta2) * (b - a) ** 2 + o.eps
    return p - lr * s.m / (1 - beta1**t) / ((s.v / (1 - beta2**t)).sqrt() + o.eps)


def adashift(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """pytorch_optimizer's, where a function takes the largest square."""
    return peer("AdaShift", reduce_func=torch.max if flags["reduce_max"] else None)({}, hypers)


@paper
def a2grad(o, s, p, g, t, lr):
    """The paper's algorithms at lr times their rate: pytorch_optimizer's takes no rate."""
    last = s.alpha if t > 1 else 1.0
    s.x, s.mean, s.alpha = s.x if t > 1 else p, s.mean + (g - s.mean) / t, 2 / (t + 3)
    noise, kept = (g - s.mean).square().sum(), s.v * ((t / (t + 1)) ** 2 if o.incremental else 1)
    s.vv = o.rho * s.vv + (1 - o.rho) * noise
    s.v = torch.maximum(kept, s.vv) if o.exponential else kept + noise
    h = s.v.sqrt() * (math.sqrt(t + 1) if o.incremental or o.exponential else 1)
    moved = lr / (2 * o.lips / (t + 1) + o.beta * h) * g
    s.x = s.x - moved
    return (1 - s.alpha) * (p - last * moved) + s.alpha * s.x


REDUCING = table(
    a2grad, adafactor, adafactor_paper, adam_mini, adamp, adanorm, adashift, adatam, aida, amos, cautious_adamw,
    cautious_lion, kourkoutas_beta, lamb, lans, lars, mars, novograd, orthograd, sinkgd, sm3, stable_spam,
    tam,
    came=package(came_pytorch.CAME),
    fadam=named(peer("FAdam", momentum_dtype=torch.float64, fim_dtype=torch.float64), eps2="eps_2"),
    fromage=peer("Fromage"),
    nero=peer("Nero"),
    racs=peer("RACS"),
    sgdp=peer("SGDP"),
    stable_adamw=peer("StableAdamW"),
)  # fmt: skip


# -- rules that sum over the model (here of one parameter), change weights for evaluation, begin with a step of another
# kind, or multiply matrices; and Apollo, whose own steps decide on the next ones beyond what intervals follow


def schedule_free(cls: Any) -> Oracle:
    def make(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
        def opened(ps: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            options = {k: v for k, v in flags.items() if k != "compact"} | hypers  # packages have z in one form
            optimizer = cls(ps, foreach=False, **options)
            optimizer.train()
            return optimizer

        return stepping(opened)

    return make


def clipped_adamw(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """torch's clip_grad_norm_ before AdamW."""
    inner = adamw(flags, {k: v for k, v in hypers.items() if k != "max_norm"})
    return lambda p, g, t, lr: inner(p, clipped(g, torch.nn.utils.clip_grad_norm_, hypers["max_norm"]), t, lr)


def clipped(g: Tensor, function: Callable[..., Any], most: float) -> Tensor:
    """A gradient after one of torch's functions on parameters."""
    held = torch.nn.Parameter(torch.zeros_like(g))
    held.grad = g.clone()
    function([held], most)
    return held.grad


def lookahead_adamw(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """The paper's algorithm 1 around AdamW."""
    inner, s = adamw(flags, {k: v for k, v in hypers.items() if k not in ("lookahead_k", "alpha")}), States()

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        s.slow = s.slow if t > 1 else p
        p = inner(p, g, t, lr)
        if t % hypers["lookahead_k"] == 0:
            s.slow = p = s.slow + hypers["alpha"] * (p - s.slow)
        return p

    return step


@beside_adamw("adamw_eps")
def adago(o, s, p, g, t, lr):
    """Algorithm 1, with torch's Newton-Schulz: pytorch_optimizer divides by the sum of squares, not its root."""
    s.m, size = torch.lerp(s.m.expand_as(g), g, 1 - o.momentum), min(float(g.norm()), o.gamma)
    s.total = (s.total if t > 1 else o.v0) + size**2
    return p * (1 - lr * o.weight_decay) - max(lr * size / math.sqrt(s.total), o.eps) * orthogonal(o, s.m)


def muon(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """torch.optim.Muon, which takes matrices only."""
    own = ("weight_decay", "momentum", "ns_coefficients", "eps", "ns_steps")
    options = {name: hypers[name] for name in own} | {"nesterov": flags["nesterov"]}
    options["adjust_lr_fn"] = "match_rms_adamw" if flags["match_rms_adamw"] else "original"
    matrices = stepping(lambda ps: torch.optim.Muon(ps, lr=hypers["lr"], **options))
    return _by_shape(matrices, _adamw_beside(hypers, "adamw_eps"), flags["adamw"])


@beside_adamw("eps")
def normuon(o, s, p, g, t, lr):
    """Algorithm 1, with torch's Newton-Schulz."""
    beta1, beta2 = o.betas
    o.ns_coefficients = (3.4445, -4.7750, 2.0315)
    s.m = beta1 * s.m + (1 - beta1) * g
    u = orthogonal(o, s.m)
    s.v = beta2 * s.v + (1 - beta2) * u.square().mean(1, keepdim=True)
    u = u / (s.v.sqrt() + o.eps)
    size = 0.2 * lr * math.sqrt(u.numel()) / max(float(torch.linalg.matrix_norm(u)), o.eps)
    return p - lr * o.weight_decay * p - size * u


@beside_adamw("eps")
def adamuon(o, s, p, g, t, lr):
    """Algorithm 1, with the authors' Nesterov momentum and torch's Newton-Schulz."""
    s.m = torch.lerp(s.m.expand_as(g), g, 1 - o.momentum)
    u = orthogonal(o, (torch.lerp(g, s.m, o.momentum) if o.nesterov else s.m).sign())
    s.v = o.momentum * s.v + (1 - o.momentum) * u.square()
    u = u / (s.v.sqrt() + o.eps)
    u = u * (0.2 * math.sqrt(u.numel()) / (torch.linalg.matrix_norm(u) + o.eps))
    return p * (1 - lr * o.weight_decay) - lr * u


@beside_adamw("adamw_eps")
def polargrad(o, s, p, g, t, lr):
    """The authors' step, with torch's Newton-Schulz: lr times <m, u> u, where u is m made orthogonal."""
    s.m = torch.lerp(s.m.expand_as(g), g, 1 - o.momentum)
    u = orthogonal(o, s.m)
    return p * (1 - lr * o.weight_decay) - lr * torch.sum(s.m * u) * u


@paper
def scion(o, s, p, g, t, lr):
    """The authors' norms: Spectral, Sign and RowNorm of matrices, BiasRMS of vectors; torch's Newton-Schulz."""
    s.m = (1 - o.momentum) * s.m + o.momentum * g
    x = s.m if p.ndim < 2 else s.m.reshape(len(p), -1)
    d_out, d_in = len(x) if x.ndim else 1, x.shape[1] if x.ndim == 2 and o.normalized else 1
    if x.ndim < 2:
        u = x / (x.square().mean().sqrt() + o.eps)
    elif o.sign_norm:
        u = x.sign() / d_in
    elif o.row_norm:
        mean = x.square().mean(1, keepdim=True).sqrt()  # of the normalized kind, which ColNorm of an embedding is
        u = x / (d_in * mean + o.eps)
    else:
        u = orthogonal(o, x) * math.sqrt(d_out / d_in)
    return (p if o.unconstrained else p * (1 - lr)) - lr * o.scale * u.reshape(p.shape)


@of_matrices(_adamw_of_same_rate)
def dion2(o, s, p, g, t, lr):
    """The authors' step of a matrix on one device, with torch's Newton-Schulz."""
    s.m, tall = s.m + g, len(g) > g.shape[1]
    rows, u = (x.mT if tall else x for x in (s.m, torch.zeros_like(g)))
    taken = rows.abs().sum(1).topk(max(1, math.ceil(o.fraction * len(rows)))).indices.sort().values
    u[taken] = orthogonal(o, rows[taken], o.eps)
    rows[taken] *= o.ef_decay
    return p * (1 - lr * o.weight_decay) - lr * math.sqrt(len(g) / g.shape[1]) * (u.mT if tall else u)


def _each_matrix(matrices: Oracle, others: Oracle, reach: Callable[..., int] = max) -> Oracle:
    """A rule of one matrix for each of a stack, and for convolutions; another for what is no matrix, or one with a side
    (reach=max) or sides (min) of more than max_precond_dim, and in groups with adamw=True."""

    def make(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
        steps: dict[int, Step] = {}

        def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
            p3, g3 = (x if x.ndim == 3 else x.reshape(1, *x.shape[:1], -1) for x in (p, g))
            few = p.ndim < 2 or (flags | hypers).get("adamw")
            if few or reach(p3.shape[1:]) > hypers.get("max_precond_dim", math.inf):
                return steps.setdefault(0, others(flags, hypers))(p.flatten(), g.flatten(), t, lr).view_as(p)
            made = (steps.setdefault(k, matrices(flags, hypers | {"matrix": k})) for k in range(len(p3)))
            return torch.stack([f(*x, t, lr) for f, *x in zip(made, p3, g3, strict=True)]).reshape(p.shape)

        return step

    return make


@paper
def _soap(o, s, p, g, t, lr):
    """Algorithm 3 with the authors' momentum and factors in the parameter's space; the first step makes bases only."""
    sides = [k for k in (0, 1) if g.shape[k] <= o.max_precond_dim]
    grams = [g @ g.mT if k == 0 else g.mT @ g for k in sides]

    def turned(x: Tensor, bases: list[Tensor]) -> Tensor:
        for k, q in zip(sides, bases, strict=True):
            x = q.mT @ x if k == 0 else x @ q
        return x

    if t == 1:
        s.factors = [(1 - o.shampoo_beta) * x for x in grams]
        s.bases = [torch.linalg.eigh(x).eigenvectors.flip(1) for x in s.factors]
        return p
    (beta1, beta2), inside = o.betas, turned(g, s.bases)
    s.m, s.v = beta1 * s.m + (1 - beta1) * g, beta2 * s.v + (1 - beta2) * inside.square()
    u = turned(turned(s.m, s.bases) / (s.v.sqrt() + o.eps), [q.mT for q in s.bases])
    p = p - lr * math.sqrt(1 - beta2 ** (t - 1)) / (1 - beta1 ** (t - 1)) * u
    s.factors = [o.shampoo_beta * x + (1 - o.shampoo_beta) * y for x, y in zip(s.factors, grams, strict=True)]
    if (t - 1) % o.precondition_frequency == 0:
        for i, k in enumerate(sides):
            order = (s.bases[i].mT @ s.factors[i] @ s.bases[i]).diagonal().argsort(descending=True)
            s.v = s.v.index_select(k, order)
            s.bases[i] = torch.linalg.qr(s.factors[i] @ s.bases[i][:, order]).Q
    return p - lr * o.weight_decay * p


@paper
def _shampoo(o, s, p, g, t, lr):
    """Algorithm 2 with exponential averages and Adam's norm."""

    def power(x: Tensor) -> Tensor:
        u, values, _ = torch.linalg.svd(x)
        return u @ ((values + o.matrix_eps * values[0]) ** (-1 / o.root_order)).diag() @ u.mT

    update = adam = adam_update(o, s, g, t)
    s.left = o.shampoo_beta * s.left + (1 - o.shampoo_beta) * g @ g.mT
    s.right = o.shampoo_beta * s.right + (1 - o.shampoo_beta) * g.mT @ g
    if t % o.precondition_frequency == 0:
        s.roots = [power(s.left), power(s.right)]
    if t >= o.precondition_frequency:
        update = s.roots[0] @ s.m @ s.roots[1]
        update = update * (torch.linalg.matrix_norm(adam) / torch.linalg.matrix_norm(update))
    return p * (1 - lr * o.weight_decay) - lr * update


@paper
def _kl_shampoo(o, s, p, g, t, lr):
    """The authors' algorithm, with momentum and factors in the parameter's own space and one bound of roots."""
    (beta1, beta2), sides = o.betas, (g, g.mT)
    if t == 1:
        s.factors = [(1 - beta2) / x.shape[1] * x @ x.mT for x in sides]
        s.bases = [torch.linalg.eigh(x).eigenvectors.flip(1) for x in s.factors]
        s.values = [torch.full(x.shape[:1], o.init_factor, dtype=x.dtype) for x in sides]
        return p
    s.m = beta1 * s.m + (1 - beta1) * g
    left, right = s.bases
    bounded = [x.clamp(min=o.max_clamp_value**-2) for x in s.values]
    u = left.mT @ s.m @ right / (torch.outer(*bounded).sqrt() + o.eps)
    p = p - lr * left @ u @ right.mT
    for k, (x, q, of) in enumerate(zip(sides, s.bases[::-1], bounded[::-1], strict=True)):
        new = x @ q @ (1 / of).diag() @ q.mT @ x.mT / x.shape[1]
        s.factors[k] = beta2 * s.factors[k] + (1 - beta2) * new
        s.values[k] = beta2 * s.values[k] + (1 - beta2) * (s.bases[k].mT @ new @ s.bases[k]).diagonal()
    if (t - 1) % o.precondition_frequency == 0:
        s.bases = [torch.linalg.qr(x @ q).Q for x, q in zip(s.factors, s.bases, strict=True)]
    return p - lr * o.weight_decay * p


@paper
def _soap_muon(o, s, p, g, t, lr):
    """The record's step of a matrix inside EMA-Nesterov, with Newton-Schulz in bf16, like torch.optim.Muon's."""
    before, grams = s.plain if t > 1 else p, [g @ g.mT, g.mT @ g]
    s.m = o.momentum * s.m + (1 - o.momentum) * g
    u = o.momentum * s.m + (1 - o.momentum) * g
    if t > 1:
        inside = s.bases[0].mT @ u @ s.bases[1]
        s.v = o.shampoo_beta * s.v + (1 - o.shampoo_beta) * inside.square()
        u = s.bases[0] @ (inside / s.v.sqrt().clamp(min=o.eps)) @ s.bases[1].mT
    u, tall = (u / torch.linalg.matrix_norm(u @ u.mT).sqrt()).bfloat16(), len(u) > u.shape[1]
    u, (a, b, c) = u.mT if tall else u, o.ns_coefficients
    for _ in range(o.ns_steps):
        square = u @ u.mT
        u = torch.addmm(u, torch.addmm(square, square, square, beta=b, alpha=c), u, beta=a)
    u = (u.mT if tall else u).to(g.dtype)
    u = u * max(1, len(u) / u.shape[1]) ** 0.5
    along = (u * p).sum() / p.norm()
    u = u - (1 - o.outward) * along.clamp(max=0) * p / p.norm()
    u = u * (o.row_floor * p.norm(dim=1) / u.norm(dim=1)).clamp(min=1)[:, None]
    new, size = p - lr * u, p.norm() - lr * (u * p).sum() / p.norm()
    new = new * size / new.norm() * (1 - lr * o.weight_decay * (u * p > 0).to(p.dtype))
    if t == 1:
        s.factors = [(1 - o.shampoo_beta) * x for x in grams]
        s.bases = [torch.linalg.eigh(x).eigenvectors.flip(1) for x in s.factors]
    else:
        s.factors = [o.shampoo_beta * x + (1 - o.shampoo_beta) * y for x, y in zip(s.factors, grams, strict=True)]
        for k, (x, q) in enumerate(zip(s.factors, s.bases, strict=True)):
            order = (q.mT @ x @ q).diagonal().argsort(descending=True)
            s.v, s.bases[k] = s.v.index_select(k, order), torch.linalg.qr(x @ q[:, order]).Q
    s.ahead = o.lookahead_beta * s.ahead + (1 - o.lookahead_beta) * (new - before)
    s.plain = new
    return new + o.lookahead * s.ahead


def _adamw_ahead(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """AdamW inside EMA-Nesterov."""
    inner, beta, s = _adamw_beside(hypers, "eps"), hypers["lookahead_beta"], States()

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        new, before = inner(p, g, t, lr), s.plain if t > 1 else p
        s.ahead, s.plain = beta * s.ahead + (1 - beta) * (new - before), new
        return new + hypers["lookahead"] * s.ahead

    return step


BASES: dict[str, Oracle] = {
    "kl_shampoo": _each_matrix(_kl_shampoo, _adamw_of_same_rate),
    "shampoo": _each_matrix(_shampoo, _adamw_of_same_rate),
    "soap": _each_matrix(_soap, _adamw_of_same_rate, min),
    "soap_muon": _each_matrix(_soap_muon, _adamw_ahead),
}
"""Rules of eigenvectors, which are arbitrary where eigenvalues are equal: held at gradients that tell them apart."""


@paper
def _splus(o, s, p, g, t, lr):
    """The authors' step and average, with momentum and factors in the parameter's own space."""
    beta1, beta2 = o.betas
    s.m, rate = beta1 * s.m + (1 - beta1) * g, lr * o.nonstandard_constant
    inside, sides = s.m, []
    if g.ndim == 2:
        s.left, s.right = (beta2 * f + (1 - beta2) * x @ x.mT for f, x in ((s.left, g), (s.right, g.mT)))
        (left, right), sides, rate = o.bases(o.matrix), [s.left, s.right], lr * 2 / sum(g.shape)
        inside = left.mT @ s.m @ right
    p = p - rate * (left @ inside.sign() @ right.mT if sides else inside.sign())
    s.ema = o.ema_rate * s.ema + (1 - o.ema_rate) * p
    o.seen[o.matrix] = SimpleNamespace(inside=inside, rate=rate, sides=sides, ema=s.ema / (1 - o.ema_rate**t))
    return p * (1 - rate * o.weight_decay)


@paper
def _conda(o, s, p, g, t, lr):
    """The authors' step of one matrix, with the momentum in the parameter's own space."""
    (beta1, beta2), wide = o.betas, (lambda x: x.mT) if g.shape[0] >= g.shape[1] else (lambda x: x)
    s.m = beta1 * s.m + (1 - beta1) * g
    (basis,) = o.bases(o.matrix)
    s.v = beta2 * s.v + (1 - beta2) * (basis.mT @ wide(g)).square()
    u = wide(basis @ (basis.mT @ wide(s.m) / (s.v.sqrt() + o.eps)))
    o.seen[o.matrix] = SimpleNamespace(sides=[wide(s.m) @ wide(s.m).mT])
    p = p - lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) * o.scale * u
    return p - lr * o.weight_decay * p


@paper
def _adam_beside(o, s, p, g, t, lr):
    """Adam with eps before the corrections and the decay last, as transformers' AdamW had it."""
    (beta1, beta2), (m, v) = o.betas, moments(o, s, g)
    p = p - lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) * m / (v.sqrt() + o.eps)
    return p - lr * o.weight_decay * p


IN_BASES: dict[str, Oracle] = {
    "conda": _each_matrix(_conda, _adam_beside),
    "splus": _each_matrix(_splus, _splus),
}
"""Rules in bases that are arbitrary, and which have a say in the step: `bases(k)` gives those of matrix k for a step,
and `seen[k]` tells what they have to diagonalize."""


@paper
def sngm(o, s, p, g, t, lr):
    """The paper's algorithm: no package of the tests has it."""
    g = g + o.weight_decay * p
    s.u = o.momentum * s.u + g / g.norm()
    return p - lr * s.u


@paper
def swats(o, s, p, g, t, lr):
    """The paper's algorithm 1: pytorch_optimizer compares within torch.allclose's bounds, and adds 1e-15."""
    g = g + o.weight_decay * p
    if s.rate > 0:
        s.buffer = o.betas[0] * s.buffer + g
        return p - (1 - o.betas[0]) * s.rate * s.buffer
    m, v = moments(o, s, g)
    u = lr * math.sqrt(1 - o.betas[1] ** t) / (1 - o.betas[0] ** t) * m / (v.sqrt() + o.eps)
    gamma = (u * u).sum() / (u * g).sum()
    s.l = o.betas[1] * s.l + (1 - o.betas[1]) * gamma
    mean = s.l / (1 - o.betas[1] ** t)
    s.rate = mean if t > 1 and mean > 0 and abs(mean - gamma) < o.eps else s.rate
    return p - u


@paper
def dog(o, s, p, g, t, lr):
    """The paper's equation, with the authors' first distance and eps: no package of the tests has it."""
    g = g + o.weight_decay * p
    s.p0 = p if t == 1 else s.p0
    s.r = max(float(s.r), float((p - s.p0).norm())) if t > 1 else o.reps_rel * (1 + float(p.norm()))
    s.g2 = s.g2 + (g * g).sum() + (o.eps if t == 1 else 0)
    return p - lr * s.r / s.g2.sqrt() * g


@paper
def dowg(o, s, p, g, t, lr):
    """The paper's algorithm 1, with an eps: no package of the tests has it."""
    g = g + o.weight_decay * p
    s.p0 = p if t == 1 else s.p0
    s.r = max(float(s.r), o.reps, float((p - s.p0).norm()))
    s.v = s.v + s.r**2 * (g * g).sum()
    return p - lr * s.r**2 / (s.v.sqrt() + o.eps) * g


def apollo_qn(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """pytorch_optimizer's, by its names of the two flags."""
    kind = "stable" if flags["stable"] else "decoupled" if flags["decoupled"] else "l2"
    fixed = {"rebound": "belief" if flags["belief"] else "constant", "weight_decay_type": kind}
    return peer("ApolloDQN", warmup_steps=0, **fixed)({}, hypers)


def adai(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """pytorch_optimizer's, whose dampening is 1 without the flag."""
    given = hypers | ({} if flags["dampened"] else {"dampening": 1.0})
    return peer("Adai")({"weight_decouple": flags["decoupled"]}, given)


@paper
def vradam(o, s, p, g, t, lr):
    """The paper's algorithm 1, and the authors' `normgrad`: no package of the tests has it."""
    u = adam_update(o, s, g, t)
    rate = lr / (1 + min(o.beta3 * float((g if o.normgrad else s.m).square().sum()), o.lr_cutoff))
    return p * (1 - rate * o.weight_decay) - rate * u


def sophia(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """pytorch_optimizer's, whose p is gamma, and whose rate is lr / gamma."""
    gamma = hypers["gamma"]
    own = {"p": gamma, "eps": hypers["eps"] / gamma, "weight_decay": hypers["weight_decay"] * gamma}
    step = peer("SophiaH", update_period=10**9, betas=hypers["betas"])({}, own)
    return lambda p, g, t, lr, **fed: step(p, g, t, lr / gamma, **fed)


FED: dict[str, Oracle] = {
    "adahessian": peer("AdaHessian", adam_debias=False, update_period=10**9),
    "sophia": sophia,
}
"""Rules with inputs, which their steps take by name."""

WHOLE = table(
    adago, adai, adamuon, apollo_qn, clipped_adamw, dion2, dog, dowg, lookahead_adamw, muon, normuon,
    polargrad, scion, sngm, swats, vradam,
    adalite=peer("Adalite"),
    adam_swd=named(peer("AdamS"), amsgrad="ams_bound"),
    avagrad=peer("AvaGrad"),
    dadapt_adagrad=package(dadaptation.DAdaptAdaGrad),
    dadapt_adam=package(dadaptation.DAdaptAdam),
    dadapt_adan=package(dadaptation.DAdaptAdan),
    dadapt_lion=package(dadaptation.DAdaptLion),
    dadapt_sgd=package(dadaptation.DAdaptSGD),
    low_rank_muon=lambda flags, hypers: muon(flags | {"nesterov": True, "match_rms_adamw": False}, hypers),
    prodigy=package(prodigyopt.Prodigy),
    radam_schedule_free=schedule_free(schedulefree.RAdamScheduleFree),
    schedule_free_adamw=schedule_free(schedulefree.AdamWScheduleFree),
    schedule_free_sgd=schedule_free(schedulefree.SGDScheduleFree),
    sgd_sai=peer("SGDSaI"),
)  # fmt: skip


# -- states of low rank; `drawn(shape, matrix, key)` gives the random numbers of a parameter


def signed_svd(x: Tensor, full_matrices: bool = True, svd: Any = torch.linalg.svd) -> tuple[Tensor, Tensor, Tensor]:
    """torch's in fp64, whose vectors of the shorter side have their largest entry above 0; packages leave that open."""
    u, s, vh = svd(x.double(), full_matrices=False)
    short = u if x.shape[0] < x.shape[1] else vh.mT
    sign = short.gather(0, short.abs().argmax(0, keepdim=True)).sign()
    return u * sign, s, vh * sign.mT


def of_low_rank(module: str, cls: str, **fixed: Any) -> Oracle:
    """A package's optimizer with each matrix in a group of low rank, and its AdamW for others."""

    def made(groups: Any, hypers: dict[str, Any]) -> torch.optim.Optimizer:
        return getattr(optional(module), cls)(groups, **{k: hypers[k] for k in ("betas", "eps", "weight_decay")})

    def matrices(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
        own = {"scale": hypers.get("alpha"), **{k: hypers[k] for k in ("rank", "update_proj_gap")}, **fixed}
        own |= {k: hypers[k] for k in ("scale",) if k in hypers}
        own |= {"scale_type": "tensor" if hypers["per_tensor"] else "channel"} if module == "apollo_torch" else {}
        inner = stepping(lambda ps: made([{"params": ps, **own}], hypers))

        def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
            def numbers(of: tuple[int, int], **_: Any) -> Tensor:
                wide, key = p.shape[0] < p.shape[1], (t - 1) // hypers["update_proj_gap"]
                x = torch.from_numpy(hypers["drawn"](of if wide else of[::-1], hypers["matrix"], key))
                return x if wide else x.mT

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.linalg, "svd", signed_svd)
                if module == "apollo_torch":
                    patch.setattr(optional("apollo_torch.random_projector"), "stable_randn", numbers)
                return inner(p, g, t, lr)

        return step

    return _each_matrix(matrices, lambda flags, hypers: stepping(lambda ps: made(ps, hypers)))


@paper
def _dion(o, s, p, g, t, lr):
    """Algorithm 1 of one matrix, as dion_simple has it."""
    (m, n), of = p.shape, s.m + g
    shape = min(o.rank, m, n), n
    q = torch.from_numpy(o.drawn(shape, o.matrix, 0)).to(p.dtype).mT if t == 1 else s.q
    left = torch.linalg.qr(of @ q).Q
    right = of.mT @ left
    s.m, s.q = of - (1 - o.mu) * left @ right.mT, right / (right.norm(dim=0) + o.eps)
    return p * (1 - lr * o.weight_decay) - lr * math.sqrt(m / n) * left @ s.q.mT


LOW_RANK: dict[str, Oracle] = {
    "apollo": of_low_rank("apollo_torch", "APOLLOAdamW", proj="random", proj_type="std"),
    "dion": _each_matrix(_dion, _adamw_of_same_rate),
    "fira": of_low_rank("pytorch_optimizer", "Fira", projection_type="std"),
    "galore": of_low_rank("galore_torch", "GaLoreAdamW", proj_type="std"),
}
"""Rules of low rank, whose spaces are held at gradients that tell singular vectors apart."""


KRON: dict[str, Callable[..., Any]] = {
    "psgd_kron": partial(
        pytorch_optimizer.Kron, pre_conditioner_update_probability=1.0, precondition_dtype=torch.float64
    ),
}
"""Optimizers whose factors a test reads."""

TABLES = (ELEMENTWISE, REDUCING, WHOLE, FED, BASES, IN_BASES, LOW_RANK, KRON)
