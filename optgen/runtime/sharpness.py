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
from optgen.runtime.layout import sharding
from optgen.runtime.optimizer import Optimizer
from optgen.runtime.records import fed_name

EPS = 1e-12
UNSCALED = "SAM: unscale_() may be called between first_step(scaler) and second_step(scaler), and nowhere else"


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
    one of the gradients too.  RuntimeError for steps out of order or in evaluation, for a state dict in between, and
    with released gradients, which are gone before the weights can move.
    """

    _scaler: Any = None
    _second: float | None = None  # the scale of the gradients within the second step

    def __init__(
        self, optimizer: Any, rho: float = 0.05, *, adaptive: bool = False, alpha: float = 0.0,
        ascent: torch.optim.Optimizer | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(optimizer, torch.optim.Optimizer):
            got = type(optimizer).__name__
            raise TypeError(f"SAM: expected an optimizer, got {got}: write SAM(AdamW(model.parameters()), rho=0.05)")
        if hasattr(optimizer, "first_step"):
            raise TypeError(f"SAM: {type(optimizer).__name__} has first_step() and second_step() itself: call these")
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

    def _is_unscaled(self, scaler: Any) -> bool:
        states = getattr(scaler, "_per_optimizer_states", {})
        return id(self.optimizer) in states and states[id(self.optimizer)]["stage"] is OptState.UNSCALED

    @torch.no_grad()
    def first_step(self, scaler: Any = None) -> None:
        """Keep the weights, move them uphill along their gradients, and clear these.

        scaler   a GradScaler whose `unscale_` is to be called before `second_step`, as for clipping
        """
        self._refuse_moved()
        for part in getattr(self.optimizer, "_members", ()):
            part._refuse_in_evaluation("first_step()")
        if self._is_unscaled(scaler):
            raise RuntimeError(UNSCALED)
        self._scaler = scaler
        self._prepare()
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
        for part in getattr(self.optimizer, "_members", ()):  # which then refuse what needs the weights that are kept
            part._uphill = True
        self.optimizer.zero_grad()

    def _prepare(self) -> None:
        """Make the ascent of a rule that has its own."""

    @torch.no_grad()
    def _restore(self) -> list[tuple[Tensor, Tensor]]:
        """Put the weights back; return the first gradients that are kept, each with the second one."""
        if self._kept is None:
            raise RuntimeError("SAM: second_step() follows first_step() and a backward")
        for p, weight, _ in self._kept:
            p.copy_(weight)
        pairs = [(old, p.grad) for p, _, old in self._kept if old is not None and p.grad is not None]
        self._kept = None
        for part in getattr(self.optimizer, "_members", ()):
            part._uphill = False
        return pairs

    @torch.no_grad()
    def second_step(self, scaler: Any = None) -> None:
        """Restore the weights, and make the optimizer's step with the gradients that are there now.

        scaler   a GradScaler, which makes the step; both losses have its scale, and its `update` comes afterwards
        A parameter that has none now is not stepped.  Gradients stay, as after any step.
        """
        pairs, unscaled = self._restore(), self._is_unscaled(scaler)
        if unscaled and scaler is not self._scaler:
            raise RuntimeError(UNSCALED)
        if pairs:
            along = _total([(old.double() * new.double()).sum() for old, new in pairs])
            ratio = along / (_norm([new for _, new in pairs]) ** 2 + EPS)
            for old, new in pairs:
                new.sub_((old - ratio * new) / (scaler.get_scale() if unscaled else 1.0), alpha=self.alpha)
        self._second = 1.0 if scaler is None else scaler.get_scale()
        try:
            self.optimizer.step() if scaler is None else scaler.step(self.optimizer)
        finally:
            self._second = None

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
    adaptive, alpha, ascent, _kept = False, 0.0, None, None

    def _prepare(self) -> None:
        """Make the ascent with the options of now, and feed the gradients to an input `first_grad`."""
        own = ("params", "param_names", "streams", "maximize", "backend")
        keys = dict(zip(own, own, strict=True), **self.ASCENDS)
        groups = [{x: g[y] for x, y in keys.items() if y in g} | {"seed": g["seed"] + 1} for g in self.param_groups]
        self.ascent = self.ASCENT(groups)
        signs = {p: -1.0 if g["maximize"] else 1.0 for g in groups for p in g["params"]}
        counts = {p: {"step": int(self.state[p]["step"])} for p in signs if "step" in self.state.get(p, ())}
        self.ascent.state.update(counts)  # random bits of a run that goes on are those that it would have had
        given: Any = lambda p: torch.zeros_like(p) if p.grad is None else signs[p] * p.grad  # noqa: E731
        self.feed(**{y: given for x, y in self.ASCENDS.items() if x == "first_grad"})

    def step(self, closure: Callable[[], Any] | None = None, scaler: Any = None) -> Any:
        """Make both steps, as `SAM.step`; RuntimeError without a closure, which would leave the first one out."""
        if closure is not None:
            return SAM.step(self, closure, scaler)
        if self._second is None and not inputs.begins(self._owner()):
            raise RuntimeError(f"{type(self).__name__}.step() takes a closure; or call first_step(), second_step()")
        first = self.ASCENDS.get("first_grad", "")
        for entry in self.state.values() if self._second != 1 else ():  # a scaler divides gradients alone
            if entry.get(fed_name(first)):
                sharding.local(entry[first]).div_(self._second)
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
