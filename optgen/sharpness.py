"""Sharpness-aware steps around any optimizer: the gradient is taken at weights that have been moved uphill.

sam = SAM(opt, rho=0.05)
loss_of(model).backward()
sam.first_step()             # moves the weights, clears the gradients
loss_of(model).backward()
sam.second_step()            # restores the weights, bit for bit, and makes the optimizer's step
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
        self, optimizer: torch.optim.Optimizer, rho: float = 0.05, *, adaptive: bool = False, alpha: float = 0.0,
        ascent: torch.optim.Optimizer | None = None,
    ) -> None:  # fmt: skip
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


def _total(numbers: list[Any]) -> float:
    """Return the sum of tensors of one number; of DTensors over all ranks."""
    found = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in numbers]
    return float(sum(x.to(found[0].device) for x in found)) if found else 0.0


def _norm(tensors: list[Tensor]) -> float:
    """Return the Euclidean norm over all tensors."""
    return math.sqrt(_total([torch.linalg.vector_norm(x.double()).square() for x in tensors]))


__all__ = ["SAM"]
