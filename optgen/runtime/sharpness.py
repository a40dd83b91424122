"""Steps of two gradients, around any optimizer or of a rule: the second is taken at weights that the first has moved.

sam = SAM(opt, rho=0.05)
loss_of(model).backward()
sam.first_step()             # moves the weights, clears the gradients
loss_of(model).backward()
sam.second_step()            # restores the weights, bit for bit, and makes the optimizer's step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from optgen.runtime.layout import sharding
from optgen.runtime.optimizer import Optimizer

EPS = 1e-12


class SAM:
    """SAM (Foret et al. 2021, arXiv:2010.01412), and by its options ASAM and GSAM.

    optimizer   any torch.optim.Optimizer; schedulers, checkpoints and zero_grad stay with it
    rho         the distance that the weights move: by rho * g / |g| over all parameters
    adaptive    ASAM (Kwon et al. 2021, arXiv:2102.11600), elementwise: rho * w^2 g / |w g|
    alpha       GSAM (Zhuang et al. 2022, arXiv:2203.08065): of the first gradient alpha times its part at right angles
                to the second one is taken off that
    ascent      an optimizer without states of the same parameters, whose step moves the weights in the place of rho and
                adaptive: one of a spec of its own (examples/ascent.py)

    The moved weights are rounded to the dtype of the parameters: of 16-bit ones few move where rho / |g| is small.
    They stay where they are if the norm is not finite.  Between the two steps a copy of the weights is kept, with alpha
    one of the gradients too.  RuntimeError for steps out of order, for a state dict in between, and with released
    gradients, which are gone before the weights can move.
    """

    def __init__(
        self, optimizer: Any, rho: float = 0.05, *, adaptive: bool = False, alpha: float = 0.0,
        ascent: torch.optim.Optimizer | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(optimizer, torch.optim.Optimizer):
            got = type(optimizer).__name__
            raise TypeError(f"SAM: expected an optimizer, got {got}: write SAM(AdamW(model.parameters()), rho=0.05)")
        if not rho >= 0 or not 0 <= alpha <= 1:
            raise ValueError(f"SAM: rho must be >= 0 and alpha from 0 to 1, got {rho!r} and {alpha!r}")
        self.optimizer, self.rho, self.adaptive, self.alpha, self.ascent = optimizer, rho, adaptive, alpha, ascent
        self._kept: list[tuple[Tensor, Tensor, Tensor | None]] | None = None
        optimizer.register_step_pre_hook(self._refuse_moved)
        optimizer.register_state_dict_pre_hook(self._refuse_moved)

    def _refuse_moved(self, *_: Any) -> None:
        if self._kept is not None:
            raise RuntimeError("SAM: the weights are moved; second_step() restores them and makes the step")
        if getattr(self.optimizer, "_release", None) is not None:
            why = "gradients are released within backward, before the weights can move"
            raise RuntimeError(f"SAM: {why}; remove() the handle of release_gradients()")

    @torch.no_grad()
    def first_step(self) -> None:
        """Keep the weights, move them uphill along their gradients, and clear these."""
        self._refuse_moved()
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = _norm([p.abs() * p.grad if self.adaptive else p.grad for p in params]) if self.ascent is None else 0.0
        finite = math.isfinite(norm)
        kept = [(p, p.detach().clone(), p.grad.clone() if self.alpha and finite else None) for p in params]
        if self.ascent is not None:
            self.ascent.step()
            if any(isinstance(x, Tensor) and x.ndim for entry in self.ascent.state.values() for x in entry.values()):
                for p, weight, _ in kept:
                    p.copy_(weight)
                raise RuntimeError("SAM: the ascent keeps states; take a rule and a plan without, such as bf16_sr")
        for p in params if finite and self.ascent is None else ():
            p.add_(p.square() * p.grad if self.adaptive else p.grad, alpha=self.rho / (norm + EPS))
        self._kept = kept
        self._set_aside({p: weight for p, weight, _ in kept})
        self.optimizer.zero_grad()

    def _set_aside(self, weights: dict[Tensor, Tensor] | None) -> None:
        """Let a generated optimizer refuse what needs the weights that are kept; None: they are back."""
        for part in getattr(self.optimizer, "parts", {0: self.optimizer}).values():
            if hasattr(part, "_trained"):
                part._trained = weights

    @torch.no_grad()
    def second_step(self, scaler: Any = None) -> None:
        """Restore the weights, and make the optimizer's step with the gradients that are there now.

        scaler   a GradScaler, which makes the step; both losses have its scale, and its `update` comes afterwards
        A parameter that has none now is not stepped.  Gradients stay, as after any step.
        """
        if self._kept is None:
            raise RuntimeError("SAM: second_step() follows first_step() and a backward")
        for p, weight, _ in self._kept:
            p.copy_(weight)
        pairs = [(old, p.grad) for p, _, old in self._kept if old is not None and p.grad is not None]
        self._kept = None
        self._set_aside(None)
        if pairs:
            along = _total([(old.double() * new.double()).sum() for old, new in pairs])
            ratio = along / (_norm([new for _, new in pairs]) ** 2 + EPS)
            for old, new in pairs:
                new.sub_(old - ratio * new, alpha=self.alpha)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)

    def step(self, closure: Callable[[], Any], scaler: Any = None) -> Any:
        """Make both steps, and return the loss at the weights themselves.

        closure   clears the gradients, computes the loss and its gradients, and returns it; it is called twice
        scaler    as in `second_step`
        """
        with torch.enable_grad():
            loss = closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step(scaler)
        return loss


class TwoPhase(Optimizer, SAM):
    """The base of generated optimizers whose rule has a first step of its own, the ascent; as `SAM` in all else.

    ASCENT   its class, which keeps no states
    ASCENDS  its options, and as what the groups have them
    """

    ASCENT: ClassVar[type[Any]]
    ASCENDS: ClassVar[Mapping[str, str]]
    optimizer = property(lambda self: self)
    adaptive, alpha, ascent, _kept, _second = False, 0.0, None, None, False

    @torch.no_grad()
    def first_step(self) -> None:
        """Move the weights as the ascent does, feed their gradients to an input `first_grad`, and clear these."""
        self._refuse_moved()
        own = ("params", "param_names", "streams", "maximize", "backend")
        keys = dict(zip(own, own, strict=True), **self.ASCENDS)
        groups = [{x: g[y] for x, y in keys.items() if y in g} | {"seed": g["seed"] + 1} for g in self.param_groups]
        self.ascent = self.ASCENT(groups)
        signs = {p: -1.0 if g["maximize"] else 1.0 for g in groups for p in g["params"]}
        counts = {p: {"step": int(self.state[p]["step"])} for p in signs if "step" in self.state.get(p, ())}
        self.ascent.state.update(counts)  # random bits of a run that goes on are those that it would have had
        given: Any = lambda p: torch.zeros_like(p) if p.grad is None else signs[p] * p.grad  # noqa: E731
        self.feed(**dict.fromkeys(self._fed(), given))
        super().first_step()

    def _fed(self) -> Any:
        return [name for name in self.INPUTS if name.endswith("first_grad")]

    @torch.no_grad()
    def second_step(self, scaler: Any = None) -> None:
        """Restore the weights, and make the rule's step with the gradients that are there now."""
        for name, entry in product(self._fed(), self.state.values() if scaler is not None else ()):
            if name in entry:  # a scaler divides gradients alone
                sharding.local(entry[name]).div_(scaler.get_scale())
        self._second = True
        try:
            super().second_step(scaler)
        finally:
            self._second = False

    def step(self, closure: Callable[[], Any] | None = None, scaler: Any = None) -> Any:
        """Make both steps, as `SAM.step`; RuntimeError without a closure, which would leave the first one out."""
        if closure is not None:
            return SAM.step(self, closure, scaler)
        if not self._second:
            raise RuntimeError(f"{type(self).__name__}.step() takes a closure; or call first_step(), second_step()")
        return super().step()

    def release_gradients(self, *_: Any, **__: Any) -> Any:
        """Refuse it: gradients would be gone before the weights can move."""
        raise RuntimeError(f"{type(self).__name__}.release_gradients: first_step() needs all gradients at once")


def _total(numbers: list[Any]) -> float:
    """Return the sum of tensors of one number; of DTensors over all ranks."""
    found = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in numbers]
    return float(sum(x.to(found[0].device) for x in found)) if found else 0.0


def _norm(tensors: list[Tensor]) -> float:
    """Return the Euclidean norm over all tensors."""
    return math.sqrt(_total([torch.linalg.vector_norm(x.double()).square() for x in tensors]))


__all__ = ["SAM", "TwoPhase"]
