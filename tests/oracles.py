"""Optimizers that somebody else wrote, and papers' rules written out in plain torch: what specs are held against.

An oracle is made from flags and hyper-parameters by constructor name, and steps one parameter of any shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import dadaptation
import numpy as np
import prodigyopt
import pytorch_optimizer
import schedulefree
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

Step = Callable[[Tensor, Tensor, int, float], Tensor]  # (p, g, t, lr) -> new p
Oracle = Callable[[dict[str, bool], dict[str, Any]], Step]


def stepping(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> Step:
    """A torch.optim.Optimizer as a function; the parameter that it owns takes p at every step."""
    held: list[tuple[torch.nn.Parameter, torch.optim.Optimizer]] = []

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        if not held:
            parameter = torch.nn.Parameter(p.clone())
            held.append((parameter, make([parameter])))
        parameter, optimizer = held[0]
        parameter.data.copy_(p)
        parameter.grad = g.clone()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        return parameter.data.clone()

    return step


def torch_optim(cls: str, **fixed: Any) -> Oracle:
    return lambda flags, hypers: stepping(
        lambda ps: getattr(torch.optim, cls)(ps, foreach=False, **flags, **hypers, **fixed)
    )


def peer(cls: str, **fixed: Any) -> Oracle:
    def make(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
        return stepping(lambda ps: getattr(pytorch_optimizer, cls)(ps, **flags, **hypers, **fixed))

    return make


def sgd(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """torch.optim.SGD refuses nesterov without momentum, where it has no effect, and with dampening."""
    if flags["nesterov"] and hypers["momentum"] == 0:
        flags = {"nesterov": False}
    if flags["nesterov"] and hypers["dampening"] != 0:
        return damped_nesterov(hypers)
    return torch_optim("SGD")(flags, hypers)


def damped_nesterov(hypers: dict[str, Any]) -> Step:
    """torch's rule written out, for the one combination that its constructor refuses."""
    buf: list[Tensor] = []

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        g = g + hypers["weight_decay"] * p
        if t == 1:
            buf.append(g.clone())
        else:
            buf[0] = hypers["momentum"] * buf[0] + (1 - hypers["dampening"]) * g
        return p - lr * (g + hypers["momentum"] * buf[0])

    return step


# -- rules that reduce


def adafactor(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    return torch_optim("Adafactor")({}, hypers)


def _clipped(u: Tensor, threshold: float) -> Tensor:
    return u / max(1.0, float(u.square().mean().sqrt()) / threshold)


def _rank_one(r: Tensor, c: Tensor) -> Tensor:
    """r c' / mean(r) for row means (..., rows) and column means (..., columns)."""
    return torch.einsum("...i,...j->...ij", r, c) / r.mean(-1)[..., None, None]


def adafactor_paper(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """Algorithms 4 and 5: pytorch_optimizer's AdaFactor divides by the smaller of 1 and RMS / d, not by the larger."""
    r = c = v = m = torch.zeros(())
    eps1, eps2 = hypers["eps"]

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        nonlocal r, c, v, m
        decay = 1 - t ** hypers["decay_rate"]
        rho = min(lr, 1 / math.sqrt(t)) if flags["relative_step"] else lr
        alpha = max(eps2, float(p.square().mean().sqrt())) * rho if flags["scale_parameter"] else rho
        sq = g**2 + eps1
        if p.ndim >= 2:
            r, c = decay * r + (1 - decay) * sq.mean(-1), decay * c + (1 - decay) * sq.mean(-2)
            second = _rank_one(r, c)
        else:
            second = v = decay * v + (1 - decay) * sq
        u = alpha * _clipped(g / second.sqrt(), hypers["clip_threshold"])
        if hypers["beta1"]:
            u = m = hypers["beta1"] * m + (1 - hypers["beta1"]) * u
        return p - alpha * hypers["weight_decay"] * p - u

    return step


def came(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """Algorithm 2: pytorch_optimizer multiplies the momentum of one-dimensional parameters by lr at every step."""
    r = c = v = m = rr = cc = torch.zeros(())
    beta1, beta2, beta3 = hypers["betas"]
    eps1, eps2 = hypers["eps"]

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        nonlocal r, c, v, m, rr, cc
        sq = g**2 + eps1
        if p.ndim >= 2:
            r, c = beta2 * r + (1 - beta2) * sq.mean(-1), beta2 * c + (1 - beta2) * sq.mean(-2)
            u = g / _rank_one(r, c).sqrt()
        else:
            v = beta2 * v + (1 - beta2) * sq
            u = g / v.sqrt()
        u = _clipped(u, hypers["clip_threshold"])
        m = beta1 * m + (1 - beta1) * u
        update = m
        if p.ndim >= 2:
            res = (u - m) ** 2 + eps2
            rr, cc = beta3 * rr + (1 - beta3) * res.mean(-1), beta3 * cc + (1 - beta3) * res.mean(-2)
            update = m / _rank_one(rr, cc).sqrt()
        return p - lr * hypers["weight_decay"] * p - lr * update

    return step


def lamb(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """Algorithm 2: pytorch_optimizer's has no bias correction, decays outside of the ratio and clamps |p| to 10."""
    m = v = torch.zeros(())
    beta1, beta2 = hypers["betas"]

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        nonlocal m, v
        m, v = m + (1 - beta1) * (g - m), beta2 * v + (1 - beta2) * g.square()
        u = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + hypers["eps"]) + hypers["weight_decay"] * p
        phi = min(max(float(torch.linalg.vector_norm(p)), hypers["min_norm"]), hypers["max_norm"])
        length = float(torch.linalg.vector_norm(u))
        return p - lr * (phi / length if phi > 0 and length > 0 else 1.0) * u

    return step


def sm3(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """SM3-II over the cover of a tensor by the rows and columns of its matrices, one set after the other.

    pytorch_optimizer's cover of tensors with more dimensions is another one: a set for each index of each dimension.
    """
    mu: list[Tensor] = []
    m = torch.zeros(())

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        nonlocal m
        dims = (-1, -2) if p.ndim >= 2 else ()
        if t == 1:
            mu.extend(torch.zeros_like(g.amax(d, keepdim=True)) for d in dims)
            if not dims:
                mu.append(torch.zeros_like(g))
        nu = torch.stack([x.expand(p.shape) for x in mu]).amin(0) + g * g
        mu[:] = [nu.amax(d, keepdim=True) for d in dims] or [nu]
        update = torch.where(g == 0, 0.0, g / nu.clamp(min=1e-300).sqrt())
        if hypers["momentum"]:
            update = m = hypers["momentum"] * m + (1 - hypers["momentum"]) * update
        return p - lr * update

    return step


def lars(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """Algorithm 1: pytorch_optimizer's leaves the decay out of the ratio, and vectors without one."""
    v = torch.zeros(())

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        nonlocal v
        w, d = torch.linalg.vector_norm(p), torch.linalg.vector_norm(g)
        local = hypers["trust_coefficient"] * w / (d + hypers["weight_decay"] * w) if w > 0 and d > 0 else 1.0
        v = hypers["momentum"] * v + lr * local * (g + hypers["weight_decay"] * p)
        return p - v

    return step


def novograd(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """Algorithm 1: pytorch_optimizer's adds Adam's bias corrections, which the paper replaces by the first values."""
    m = v = torch.zeros(())
    beta1, beta2 = hypers["betas"]

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        nonlocal m, v
        length = torch.linalg.vector_norm(g) ** 2
        v = length if t == 1 else beta2 * v + (1 - beta2) * length
        u = g / (v.sqrt() + hypers["eps"]) + hypers["weight_decay"] * p
        m = beta1 * m + ((1 - beta1) if flags["grad_averaging"] else 1) * u
        return p - lr * m

    return step


def cautious_adamw(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """The paper's algorithm 2 with the scaling of its authors' code, 1 / max(mean, 1e-3)."""
    m = v = torch.zeros(())
    beta1, beta2 = hypers["betas"]

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        nonlocal m, v
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        u = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + hypers["eps"])
        mask = (u * g > 0).double()
        return p * (1 - lr * hypers["weight_decay"]) - lr * u * mask / mask.mean().clamp(min=1e-3)

    return step


def cautious_lion(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """Likewise, with the scale of the authors' AdamW; that of their Lion is n / (ones + 1)."""
    m = torch.zeros(())
    beta1, beta2 = hypers["betas"]

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        nonlocal m
        u = (beta1 * m + (1 - beta1) * g).sign()
        mask = (u * g > 0).double()
        m = beta2 * m + (1 - beta2) * g
        return p * (1 - lr * hypers["weight_decay"]) - lr * u * mask / mask.mean().clamp(min=1e-3)

    return step


def mars(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """Algorithm 2 with the last gradient in place of the last weight's: pytorch_optimizer's eps is divided by the
    bias correction, and its last gradient is the gradient's own tensor."""
    m = v = torch.zeros(())
    last: list[Tensor] = []
    beta1, beta2 = hypers["betas"]

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        nonlocal m, v
        c = g + hypers["gamma"] * beta1 / (1 - beta1) * (g - last[0]) if last else g
        last[:] = [g]
        length = float(torch.linalg.vector_norm(c))
        c = c / length if length > 1 else c
        m, v = beta1 * m + (1 - beta1) * c, beta2 * v + (1 - beta2) * c * c
        u = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + hypers["eps"])
        return p - lr * (u + hypers["weight_decay"] * p)

    return step


def orthograd(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """The paper's projection before torch.optim.SGD: pytorch_optimizer's casts the gradient to fp32."""
    inner = sgd(flags, hypers)

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        w, flat = p.reshape(-1), g.reshape(-1)
        tangent = flat - w * (w @ flat) / (w @ w) if p.numel() > 1 else torch.zeros_like(flat)
        length = torch.linalg.vector_norm(tangent)
        if length > 0:
            tangent = tangent * torch.linalg.vector_norm(g) / length
        return inner(p, tangent.reshape(g.shape), t, lr)

    return step


def adam_mini(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """One average of mean squares per block: the authors' optimizer wants a model whose parameters' names it knows."""
    m = v = torch.zeros(())
    beta1, beta2 = hypers["betas"]

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        nonlocal m, v
        dims = tuple(range(1 if g.ndim >= 2 else 0, g.ndim))
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * (g**2).mean(dims, keepdim=True)
        u = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + hypers["eps"])
        return p * (1 - lr * hypers["weight_decay"]) - lr * u

    return step


def _projected(p: Tensor, g: Tensor, u: Tensor, hypers: dict[str, Any]) -> tuple[Tensor, float]:
    """The paper's two tests, by channels and as a whole: (step, what the decay is multiplied by)."""
    for rows in (p.shape[0], 1) if p.ndim > 1 else ():
        w, d, s = (x.reshape(rows, -1) for x in (p, g, u))
        eps = hypers["eps"]
        cos = (w * d).sum(1).abs() / (w.norm(dim=1) + eps) / (d.norm(dim=1) + eps)
        if cos.max() < hypers["delta"] / math.sqrt(w.shape[1]):
            unit = w / (w.norm(dim=1, keepdim=True) + eps)
            return (s - unit * (unit * s).sum(1, keepdim=True)).reshape(p.shape), hypers["wd_ratio"]
    return u, 1.0


def adamp(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """Algorithm 2: pytorch_optimizer's adds eps to the inverse of the root, and makes NaN where no gradient was yet."""
    m = v = torch.zeros(())
    beta1, beta2 = hypers["betas"]

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        nonlocal m, v
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        ahead = beta1 * m + (1 - beta1) * g if flags["nesterov"] else m
        u = ahead / ((v / (1 - beta2**t)).sqrt() + hypers["eps"])
        u, ratio = _projected(p, g, u, hypers)
        return p * (1 - lr * hypers["weight_decay"] * ratio) - lr / (1 - beta1**t) * u

    return step


REDUCING: dict[str, Oracle] = {
    "adafactor": adafactor,
    "adafactor_paper": adafactor_paper,
    "adam_mini": adam_mini,
    "adamp": adamp,
    "came": came,
    "cautious_adamw": cautious_adamw,
    "cautious_lion": cautious_lion,
    "fromage": peer("Fromage"),
    "lamb": lamb,
    "lars": lars,
    "mars": mars,
    "novograd": novograd,
    "orthograd": orthograd,
    "sgdp": peer("SGDP"),
    "sm3": sm3,
    "stable_adamw": peer("StableAdamW"),
}


# -- rules that sum over the model (here of one parameter), change weights for evaluation, or multiply matrices


def _of(cls: Any, **fixed: Any) -> Oracle:
    """Another package's optimizer with our names of options."""
    return lambda flags, hypers: stepping(lambda ps: cls(ps, **flags, **hypers, **fixed))


def schedule_free(cls: Any) -> Oracle:
    def make(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
        def opened(ps: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = cls(ps, foreach=False, **hypers)
            optimizer.train()
            return optimizer

        return stepping(opened)

    return make


def clipped_adamw(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """torch's clip_grad_norm_ before AdamW."""
    inner = adamw(flags, {k: v for k, v in hypers.items() if k != "max_norm"})

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        held = torch.nn.Parameter(torch.zeros_like(p))
        held.grad = g.clone()
        torch.nn.utils.clip_grad_norm_([held], hypers["max_norm"])
        return inner(p, held.grad, t, lr)

    return step


def lookahead_adamw(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """The paper's algorithm 1 around AdamW."""
    inner = adamw(flags, {k: v for k, v in hypers.items() if k not in ("lookahead_k", "alpha")})
    slow: list[Tensor] = []

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        slow.extend([p] if not slow else [])
        p = inner(p, g, t, lr)
        if t % hypers["lookahead_k"] == 0:
            slow[0] = p = slow[0] + hypers["alpha"] * (p - slow[0])
        return p

    return step


def adamw(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """torch.optim.AdamW; torch has no decouple_lr, so there the decay is applied outside."""
    if not flags["decouple_lr"]:
        return torch_optim("AdamW")({"amsgrad": flags["amsgrad"]}, hypers)
    inner = torch_optim("AdamW")({"amsgrad": flags["amsgrad"]}, hypers | {"weight_decay": 0.0})
    peak = 0.0

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        nonlocal peak
        peak = max(peak, lr)
        return inner(p * (1 - hypers["weight_decay"] * lr / peak), g, t, lr)

    return step


def _adamw_beside(hypers: dict[str, Any], eps: str) -> Step:
    """What rules of matrices do with other parameters: AdamW, which has a learning rate of its own."""
    inner = torch_optim("AdamW")({}, {
        "lr": hypers["adamw_lr"], "betas": hypers["adamw_betas"], "eps": hypers[eps],
        "weight_decay": hypers["weight_decay"],
    })  # fmt: skip
    return lambda p, g, t, lr: inner(p, g, t, hypers["adamw_lr"])


def _flat(inner: Step) -> Step:
    """Convolutions are matrices of their output channels."""

    def step(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        rows = p.shape[0]
        return inner(p.reshape(rows, -1), g.reshape(rows, -1), t, lr).reshape(p.shape)

    return step


def _by_shape(matrices: Step, others: Step, only_others: bool) -> Step:
    return lambda p, g, t, lr: (others if only_others or p.ndim < 2 else matrices)(p, g, t, lr)


def muon(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """torch.optim.Muon, which takes matrices only."""
    own = ("weight_decay", "momentum", "ns_coefficients", "eps", "ns_steps")
    options = {name: hypers[name] for name in own} | {"nesterov": flags["nesterov"]}
    options["adjust_lr_fn"] = "match_rms_adamw" if flags["match_rms_adamw"] else "original"
    matrices = _flat(stepping(lambda ps: torch.optim.Muon(ps, lr=hypers["lr"], **options)))
    return _by_shape(matrices, _adamw_beside(hypers, "adamw_eps"), flags["adamw"])


def normuon(flags: dict[str, bool], hypers: dict[str, Any]) -> Step:
    """Algorithm 1, with torch's Newton-Schulz."""
    m = v = torch.zeros(())
    beta1, beta2 = hypers["betas"]
    coefficients, eps = (3.4445, -4.7750, 2.0315), hypers["eps"]

    def matrices(p: Tensor, g: Tensor, t: int, lr: float) -> Tensor:
        nonlocal m, v
        m = beta1 * m + (1 - beta1) * g
        o = _zeropower_via_newtonschulz(m, coefficients, hypers["ns_steps"], 1e-7).to(p.dtype)
        v = beta2 * v + (1 - beta2) * o.square().mean(1, keepdim=True)
        o = o / (v.sqrt() + eps)
        size = 0.2 * lr * math.sqrt(o.numel()) / max(float(torch.linalg.matrix_norm(o)), eps)
        return p - lr * hypers["weight_decay"] * p - size * o

    return _by_shape(_flat(matrices), _adamw_beside(hypers, "eps"), flags["adamw"])


WHOLE: dict[str, Oracle] = {
    "clipped_adamw": clipped_adamw,
    "dadapt_adam": _of(dadaptation.DAdaptAdam, decouple=True),
    "lookahead_adamw": lookahead_adamw,
    "muon": muon,
    "normuon": normuon,
    "prodigy": _of(prodigyopt.Prodigy),
    "schedule_free_adamw": schedule_free(schedulefree.AdamWScheduleFree),
    "schedule_free_sgd": schedule_free(schedulefree.SGDScheduleFree),
}


# -- the 4-bit paper's storage (Li et al. 2023, arXiv:2309.01507), from its formulas in NumPy

SIGNED_MAP = np.array([-0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055, 0.0,
                       0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0])  # fmt: skip
UNSIGNED_MAP = np.arange(1, 17) / 16


def nearest_entry(n: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(code of each number, how far it is from where the next code begins); a tie goes to the lower code."""
    middles = (table[1:] + table[:-1]) / 2
    return np.searchsorted(middles, n, side="left"), np.abs(n[..., None] - middles).min(-1)


def rank1_scale(x: np.ndarray) -> np.ndarray:
    """The smallest of the maxima of |x| over all but one dimension, for each element."""
    return np.minimum.reduce(
        np.broadcast_arrays(
            *(np.abs(x).max(axis=tuple(k for k in range(x.ndim) if k != d), keepdims=True) for d in range(x.ndim))
        )
    )


def group_scale(x: np.ndarray, size: int = 128) -> np.ndarray:
    """The largest |x| of each `size` elements of the flattened tensor, for each element."""
    groups = np.abs(x).reshape(-1, size)
    return np.broadcast_to(groups.max(1, keepdims=True), groups.shape).reshape(x.shape)


def factored_estimate(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """row mean x column mean / mean of all."""
    return rows[:, None] * columns[None, :] / rows.mean()
