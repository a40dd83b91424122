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
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from optgen.runtime.checkpoint import inputs
from optgen.runtime.optimizer import Optimizer

UNSCALED = "SAM: unscale_() may be called between first_step(scaler) and second_step(scaler), and nowhere else"


class SAM:
    """SAM (Foret et al. 2021, arXiv:2010.01412).

    optimizer   any torch.optim.Optimizer; schedulers, checkpoints and zero_grad stay with it
    rho         the distance that the weights move: by rho * g / |g| over all parameters

    The moved weights are rounded to the dtype of the parameters: of 16-bit ones few move where rho / |g| is small.
    They stay where they are if the norm is not finite.  Between the two steps a copy of the weights is kept.
    RuntimeError for steps out of order or in evaluation, for a state dict in between, and with released gradients,
    which are gone before the weights can move.
    """

    _kept: Mapping[Tensor, Tensor] | None = None  # the weights, between the steps
    _scaler: Any = None  # of the first step

    def __init__(self, optimizer: Any, rho: float = 0.05) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            got = type(optimizer).__name__
            raise TypeError(f"SAM: expected an optimizer, got {got}: write SAM(AdamW(model.parameters()), rho=0.05)")
        if hasattr(optimizer, "first_step"):
            raise TypeError(f"SAM: {type(optimizer).__name__} has first_step() and second_step() itself: call these")
        if not rho >= 0:
            raise ValueError(f"SAM: rho must be >= 0, got {rho!r}")
        self.optimizer, self.rho = optimizer, rho
        optimizer.register_step_pre_hook(self._refuse_moved)
        optimizer.register_state_dict_pre_hook(self._refuse_moved)

    def _refuse_moved(self, *_: Any) -> None:
        if self._kept is not None:
            raise RuntimeError("SAM: the weights are moved; second_step() restores them and makes the step")
        if getattr(self.optimizer, "_release", None) is not None:
            why = "gradients are released within backward, before the weights can move"
            raise RuntimeError(f"SAM: {why}; remove() the handle of release_gradients()")

    def _is_unscaled(self, scaler: Any) -> bool:
        states = getattr(scaler, "_per_optimizer_states", {})
        return id(self.optimizer) in states and states[id(self.optimizer)]["stage"] is OptState.UNSCALED

    def _keep(self, kept: Mapping[Tensor, Tensor] | None) -> None:
        self._kept = kept
        for part in getattr(self.optimizer, "_members", ()):  # which then refuse what needs the weights that are kept
            part._uphill = kept is not None

    @torch.no_grad()
    def first_step(self, scaler: Any = None) -> None:
        """Keep the weights, move them uphill along their gradients, and clear these.

        scaler   a GradScaler whose `unscale_` is to be called before `second_step`, as for clipping
        """
        self._refuse_moved()
        for part in getattr(self.optimizer, "_members", ()):
            part._refuse_unready("first_step()")
        if self._is_unscaled(scaler):
            raise RuntimeError(UNSCALED)
        self._scaler = scaler
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._keep({p: p.detach().clone() for p in params})
        try:
            self._ascend(params)
        except BaseException:
            self._restore()
            raise
        self.optimizer.zero_grad()

    def _ascend(self, params: list[Any]) -> None:
        """Move the weights of those with a gradient."""
        squares = [torch.linalg.vector_norm(p.grad.double()).square() for p in params]
        totals = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in squares]  # over all ranks
        norm = math.sqrt(sum(x.to(totals[0].device) for x in totals))
        for p in params if math.isfinite(norm) else ():
            p.add_(p.grad, alpha=self.rho / (norm + 1e-12))

    @torch.no_grad()
    def _restore(self) -> None:
        if self._kept is None:
            raise RuntimeError("SAM: second_step() follows first_step() and a backward")
        for p, weight in self._kept.items():
            p.copy_(weight)
        self._keep(None)

    def second_step(self, scaler: Any = None) -> None:
        """Restore the weights, and make the optimizer's step with the gradients that are there now.

        scaler   a GradScaler, which makes the step; both losses have its scale, and its `update` comes afterwards
        A parameter that has none now is not stepped.  Gradients stay, as after any step.
        """
        self._restore()
        if self._is_unscaled(scaler) and scaler is not self._scaler:
            raise RuntimeError(UNSCALED)
        self.optimizer.step() if scaler is None else scaler.step(self.optimizer)

    def step(self, closure: Callable[[], Any], scaler: Any = None) -> Any:
        """Make both steps, and return the loss at the weights themselves.

        closure   clears the gradients, computes the loss and its gradients, and returns it; it is called twice
        scaler    as in `second_step`
        The weights come back if the second call raises.
        """
        with torch.enable_grad():
            loss = closure()
        self.first_step(scaler)
        try:
            with torch.enable_grad():
                closure()
        except BaseException:
            self._restore()
            raise
        self.second_step(scaler)
        return loss


class TwoPhase(Optimizer, SAM):
    """The base of generated optimizers whose rule has a first step of its own, the ascent; as `SAM` in all else.

    ASCENT   its class, which keeps no states
    ASCENDS  its options, and as what the groups have them; and the name of the input `first_grad`, if there is one
    """

    ASCENT: ClassVar[type[Any]]
    ASCENDS: ClassVar[Mapping[str, str]]
    optimizer = property(lambda self: self)
    _scale: float | None = None  # of the gradients, within the second step
    _first: Mapping[Tensor, Tensor] = {}  # the gradients of the first step, if the rule reads them

    def _ascend(self, params: list[Any]) -> None:
        """Make the ascent with the options of now."""
        own = ("params", "param_names", "maximize", "backend")
        keys = dict(zip(own, own, strict=True), **self.ASCENDS)
        groups = [{x: g[y] for x, y in keys.items() if y in g} | {"seed": g["seed"] + 1} for g in self.param_groups]
        ascent = self.ASCENT(groups)
        for p in params:  # random bits of a run that goes on are those that it would have had
            if "step" in self.state.get(p, ()):
                ascent.state[p] = {"step": int(self.state[p]["step"])}
        if "first_grad" in self.ASCENDS:
            uphill = {p for g in groups if g["maximize"] for p in g["params"]}
            self._first = {p: -p.grad if p in uphill else p.grad.clone() for p in params}
        ascent.step()

    def second_step(self, scaler: Any = None) -> None:
        """Restore the weights and make the step, as `SAM.second_step`."""
        self._scale = 1.0 if scaler is None else scaler.get_scale()
        try:
            super().second_step(scaler)
        finally:
            self._scale, self._first = None, {}

    def step(self, closure: Callable[[], Any] | None = None, scaler: Any = None) -> Any:
        """Make both steps, as `SAM.step`; RuntimeError without a closure, which would leave the first one out."""
        if closure is not None:
            return SAM.step(self, closure, scaler)
        if self._scale is None and not inputs.begins(self._owner()):
            raise RuntimeError(f"{type(self).__name__}.step() takes a closure; or call first_step(), second_step()")
        if self._scale is not None and "first_grad" in self.ASCENDS:
            first, scale = self._first, self._scale  # a scaler divides the second gradients alone
            given: Any = lambda p: first[p].float() / scale if p in first else torch.zeros_like(p)  # noqa: E731
            self.feed(**{self.ASCENDS["first_grad"]: given})
        return super().step()

    def release_gradients(self, *_: Any, **__: Any) -> Any:
        """Refuse it: gradients would be gone before the weights can move."""
        raise RuntimeError(f"{type(self).__name__}.release_gradients: first_step() needs all gradients at once")


__all__ = ["SAM", "TwoPhase"]
