"""Steps that never find a gradient, as those of a model that has other parameters by now: one warning."""

import warnings

import pytest
import torch
from torch import nn

from optgen.optim import AdamW
from optgen.runtime import Optimizer
from tests.harness import python

BACKENDS = ["reference", "cpp"]


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))


def stepped(model: nn.Module, opt: Optimizer, steps: int = 3) -> list[str]:
    """Return the warnings of some steps."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(steps):
            model(torch.ones(2, 6)).square().sum().backward()
            opt.step()
            opt.zero_grad()
    return [str(w.message) for w in said]


def assigned(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_with_other_parameters_is_noticed(backend: str, released: bool) -> None:
    model = built()
    opt = AdamW(model.named_parameters(), plan="fp32", backend=backend)
    if released:
        opt.release_gradients()
    assigned(model)
    (message,) = stepped(model, opt)
    assert "2 steps, and none of its 6 parameters has had a gradient yet: these steps changed nothing" in message
    assert "one that was sharded or rebuilt after the optimizer was made" in message


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_that_are_frozen_or_left_out_are_none_of_it(backend: str, released: bool) -> None:
    model = built()
    opt = AdamW(model.parameters(), backend=backend)
    if released:
        opt.release_gradients()
    model[0].requires_grad_(False)
    assert stepped(model, opt, 2) == []
    model[0].requires_grad_(True)
    assert stepped(model, opt, 1) == []
    assert stepped(nn.Sequential(nn.Flatten(), model[0], nn.Tanh()), opt, 2) == []  # the rest of it is not used
    for _ in range(3):
        opt.step()  # no gradients at all, after some
    assert stepped(model, opt, 1) == []


def test_one_step_before_the_first_gradient_is_a_habit_of_schedulers() -> None:
    model = built()
    opt = AdamW(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    assert stepped(model, opt, 3) == []


def test_fully_shard_after_the_optimizer_is_noticed() -> None:
    python("""
        import torch, warnings, torch.distributed as dist
        from torch import nn
        from torch.distributed.fsdp import fully_shard
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from optgen.optim import AdamW
        dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=2)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        opt = AdamW(model.named_parameters())
        for layer in model: fully_shard(layer)
        fully_shard(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            for _ in range(3):
                model(torch.ones(2, 6)).sum().backward()
                opt.step()
        said = [str(w.message) for w in said if 'AdamW' in str(w.message)]
        assert len(said) == 1, said
        assert 'none of its 4 parameters has had a gradient yet' in said[0], said
    """)
