"""States that leave the device between steps, and come back: for a model that generates in turns with its training.

All that an optimizer keeps of its parameters moves, bit for bit: the fields of states, the weights of training of an
optimizer in evaluation, bits that a cast left beside a weight, and sums of released gradients.  It stands where it
always does, in `opt.state`, so that state dicts, copies and files have it; what needs it on the device is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from optgen.runtime.work import counting


@torch.no_grad()
def offload_states(self: Any, pin: bool = True, non_blocking: bool = True, *, recapture: bool = False) -> None:
    """Move all that is kept of the parameters to host memory, and free it on the device, until `reload_states()`.

    pin           take pinned memory, which copies to and from run beside other work; it stays torch's for the next time
    non_blocking  return while copies run; methods of the optimizer that read the states wait for them
    recapture     let CUDA graphs that captured a step go, which hold addresses; else RuntimeError where there are any

    Weights and gradients stay where they are, and may move on their own (`model.to`).  State dicts, checkpoints, full
    weights, copies, `memory()`, `load_state_dict`, `add_param_group` and `train()` work as ever; steps, `eval()` and
    changes of weights are RuntimeErrors.  States that are on the host already stay there.
    """
    self._refuse_midway("offload_states()")
    what = f"{type(self).__name__}.offload_states"
    held = any(stepper.launcher.captured for one in self._members for stepper in _steppers(one))
    if counting.capturing() or (held and not recapture):
        raise RuntimeError(
            f"{what}: a CUDA graph has captured step(), and replays it at the addresses of these states, where others' "
            f"tensors will lie: drop the graph and call offload_states(recapture=True); after reload_states() make a "
            f"step, and capture again"
        )
    for one in self._members:
        one._offload.away = True
        _bring(one, pin)
        one._offload.forget_tables()
        for stepper in _steppers(one):
            stepper.graphs.clear()  # they are numbered anew
            stepper.forget_tables()
        if not non_blocking:
            one._offload.arrive()


@torch.no_grad()
def reload_states(self: Any) -> None:
    """Bring back all that `offload_states()` moved, to new memory on the devices of the parameters as they are now.

    Work on the devices that comes later waits for the copies; the host does not.  After an error (no memory) call it
    again: a part may be there already.
    """
    self._refuse_midway("reload_states()")
    for one in self._members:
        one._offload.away = False
        try:
            _bring(one)
        except BaseException:
            one._offload.away = True
            one._offload.settle(one.param_groups)
            raise


def _bring(one: Any, pin: bool = True) -> None:
    one._offload.settle(one.param_groups)
    sums = {id(x.p): x.sums.entry for x in _released(one) if x.sums is not None and x.sums.entry is not None}
    one._offload.bring(one._owner(), pin, sums)


def _released(one: Any) -> list[Any]:
    return [] if one._release is None else list(one._release._released.values())


def _steppers(one: Any) -> list[Any]:
    """Return what makes the steps of an optimizer on its devices."""
    return [one._stepper, *(x.stepper for x in _released(one))]
