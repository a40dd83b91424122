"""The short way through steps of C++ kernels: taken where nothing is new, and the same bits."""

import copy
import ctypes
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import optgen.optim
from optgen.runtime.cpu import cpu, native
from optgen.runtime.step import fast_path
from tests import training
from tests.test_native import SHAPES, everything, first, gradient_half, is_short, trained
from tests.training import give, nadam, params_of

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler on this machine")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)  # as tests/conftest.py has it


def entry(opt: Any) -> dict[str, Any]:
    state: dict[str, Any] = opt.state[first(opt)]
    return state


def given(seed: int, shapes: Any) -> list[nn.Parameter]:
    """Make new parameters that have gradients."""
    new = training.parameters(shapes, seed=seed)
    give(new, seed)
    return new


def by_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def fill_lr(opt: Any) -> None:
    value = opt.param_groups[0]["lr"]
    if isinstance(value, Tensor):
        value.fill_(0.9)
    else:
        opt.param_groups[0]["lr"] = torch.tensor(0.9)


def gradient_negated(opt: Any) -> None:
    """Give a number that is stored with the other sign and says so."""
    p = first(opt, 0)
    p.grad = torch.tensor(complex(0, 1.5)).conj().imag
    assert p.grad.is_neg() and p.grad.is_contiguous()


def another_parameter(opt: Any) -> None:
    old, params = first(opt), opt.param_groups[0]["params"]
    del opt.state[old]
    params[[p is old for p in params].index(True)] = given(5, [(3, 5)])[0]


def load(opt: Any) -> None:
    saved = copy.deepcopy(opt.state_dict())
    for kept in saved["state"].values():
        kept["exp_avg"] *= 2
        kept.pop("note", None)  # of `extra_key`; loading refuses it
    opt.load_state_dict(saved)


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda opt: None,
    "lr": lambda opt: opt.param_groups[0].update(lr=0.7),
    "fill_lr": fill_lr,
    "set_data": lambda opt: setattr(first(opt), "data", first(opt).data * 2),
    "set_data_by_columns": lambda opt: setattr(first(opt), "data", by_columns(first(opt).data)),
    "no_gradient": lambda opt: setattr(first(opt), "grad", None),
    "columns": lambda opt: setattr(first(opt), "grad", by_columns(first(opt).grad)),
    "gradient_data": lambda opt: setattr(first(opt).grad, "data", first(opt).grad.data * 3),
    "gradient_half": gradient_half,
    "gradient_negated": gradient_negated,
    "reorder": lambda opt: opt.param_groups[0]["params"].reverse(),
    "another_parameter": another_parameter,
    "longer_list": lambda opt: opt.param_groups[0]["params"].extend(given(5, [(3, 5)])),
    "add_group": lambda opt: opt.add_param_group({"params": given(7, [(3, 4), (6,)]), "lr": 0.3}),
    "load": load,
    "clear_state": lambda opt: opt.state.clear(),
    "drop_one": lambda opt: opt.state.pop(first(opt)),
    "new_entry": lambda opt: opt.state.update({first(opt): copy.deepcopy(entry(opt))}),
    "new_field": lambda opt: entry(opt).update(exp_avg=entry(opt)["exp_avg"] * 2),
    "new_field_data": lambda opt: setattr(entry(opt)["exp_avg"], "data", entry(opt)["exp_avg"].data * 2),
    "share_field": lambda opt: [kept["exp_avg"].share_memory_() for kept in opt.state.values()],  # moves their memory
    "set_step": lambda opt: entry(opt).update(step=40),
    "set_host_state": lambda opt: entry(opt).update(mu_product=0.35),
    "extra_key": lambda opt: entry(opt).update(note="mine"),
    "flag": lambda opt: opt.param_groups[0].update(decoupled_weight_decay=True),
    "maximize": lambda opt: opt.param_groups[0].update(maximize=True),
    "extra_option": lambda opt: opt.param_groups[0].update(comment=1),
}
SHORT = {"nothing", "lr", "fill_lr", "gradient_data", "maximize", "load", "extra_key"}
"""Changes after which a step goes the short way at once; `load` starts with a long step, unasked."""


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_between_steps_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as eager torch; and where nothing is new to the kernels, the short way."""
    value = torch.tensor(0.1) if change == "fill_lr" else 0.1
    made = [trained(lr=copy.copy(value)), trained("reference", lr=copy.copy(value))]
    taken: list[bool] = []
    again = fast_path.CachedStep.run
    monkeypatch.setattr(fast_path.CachedStep, "run", lambda *args: taken.append(again(*args)) or taken[-1])
    assert is_short(made[0])
    for opt in made:
        CHANGES[change](opt)
        for step in range(6):
            opt.step()
            if change == "gradient_negated":
                gradient_negated(opt)
            elif step > 0:
                give(params_of(opt), step)
    assert everything(made[0]) == everything(made[1])
    assert taken[0] == (change in SHORT)
    if change not in ("set_data_by_columns", "gradient_negated"):  # what needs the long way at every step
        assert taken[-1]
        assert is_short(made[0])


@hypothesis.settings(max_examples=40)
@hypothesis.given(changes=st.lists(st.sampled_from(sorted(CHANGES)), max_size=8))
def test_changes_one_after_the_other(changes: list[str]) -> None:
    made = [trained(), trained("reference")]
    for opt in made:
        for step, change in enumerate(changes):
            CHANGES[change](opt)
            opt.step()
            if step % 3 < 2:
                opt.step()
            give(params_of(opt), step)
        opt.step()
    assert everything(made[0]) == everything(made[1])


def test_what_is_refused_changes_nothing() -> None:
    """A shape that the state does not fit, in the same memory; a hyper-parameter out of range."""
    opt = trained()
    before = everything(opt)
    for _ in range(2):
        opt.param_groups[0]["lr"] = -1.0
        with pytest.raises(ValueError, match=r"lr must be >= 0, got -1.0"):
            opt.step()
        opt.param_groups[0]["lr"] = 0.1
        assert everything(opt) == before
    opt.step()
    assert is_short(opt)
    before = everything(opt)[1]
    p = opt.param_groups[0]["params"][4]
    p.data, p.grad = p.data.view(8, 8), p.grad.view(8, 8)
    with pytest.raises(RuntimeError, match=r"exp_avg: expected float32 \[8, 8\], got float32 \[64\]"):
        opt.step()
    assert everything(opt)[1] == before


def test_alternating_gradients_do_not_make_a_new_cached_step_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    cached = fast_path.CachedStep
    monkeypatch.setattr(fast_path, "CachedStep", lambda *args: made.append(1) or cached(*args))
    opt = trained(steps=0)
    for step in range(100):
        give(params_of(opt), step)
        params_of(opt)[step % 2].grad = None
        opt.step()
    assert len(made) < 12
    for _ in range(fast_path.PATIENCE + 2):
        opt.step()
    assert is_short(opt)


def test_versions_hooks_and_closures() -> None:
    opt = trained()
    p = first(opt)
    calls: list[str] = []
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(2):
        assert is_short(opt)
        version, kept = p._version, p.grad
        assert opt.step(lambda: 2.5) == 2.5
        assert p._version == version + 1
        assert p.grad is kept
    assert calls == ["before", "after"] * 2
    for one in (opt, trained("reference")):
        loss = (first(one) ** 2).sum()
        one.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_steps_of_copies_and_what_is_kept_alive() -> None:
    opt = trained()
    before = everything(opt)
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert not is_short(other)
        training.train(other, [5, 6])
        assert is_short(other)
    assert everything(opt) == before
    p = first(opt)
    gradient, buffer = weakref.ref(p.grad), weakref.ref(opt.state[p]["exp_avg"])
    p.grad = None
    assert gradient() is None
    opt.state.clear()
    assert buffer() is None
    whole = weakref.ref(opt)
    del opt
    gc.collect()
    assert whole() is None


def test_numbers_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at every step; kernels run without Python's lock."""
    seen: list[int] = []
    count = cpu.threads
    monkeypatch.setattr(cpu, "threads", lambda elements: seen.append(count(elements)) or seen[-1])
    opt = nadam()(training.parameters([(70000,)]), backend="cpp")
    for threads in (1, 2, 2, 1, 3):
        torch.set_num_threads(threads)
        training.train(opt, [0])
    assert seen == [1, 2, 2, 1, 3]
    assert cpu.threads(cpu.SERIAL - 1) == 1
    assert {type(library) for library in native._known.values()} == {ctypes.CDLL}


def test_step_counts_that_users_read() -> None:
    opt = trained(steps=300)  # beyond the numbers of which Python keeps one object each
    assert is_short(opt)
    assert [type(entry["step"]) for entry in opt.state_dict()["state"].values()] == [int] * len(SHAPES)
    assert everything(opt) == everything(trained("reference", steps=300))


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_in_8_bits_the_short_way(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many steps of AdamW, small and large tensors in two groups: the bits of the long way."""
    made = []
    torch.set_num_threads(threads)
    for short in (True, False):
        params = training.parameters([(3, 5), (80, 100), (), (70, 999)], torch.bfloat16)
        groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0, "seed": 3}]
        opt = optgen.optim.AdamW(groups, lr=1e-2, backend="cpp")
        if not short:
            monkeypatch.setattr(opt._stepper.fast_path, "keep", lambda *_: None)
        for step in range(6):
            opt.param_groups[0]["lr"] = 0.01 / (step + 1)
            training.train(opt, [step])
        assert is_short(opt) == short
        made.append(everything(opt))
    assert made[0] == made[1]


def test_a_backend_that_changes_between_steps() -> None:
    pytest.importorskip("triton")
    opt = optgen.optim.AdamW(training.parameters([(3, 5)]), lr=0.1, plan="fp32")
    (p,) = params_of(opt)
    for step, backend in enumerate(["cpp", "triton", "cpp", "cpp", "reference", "triton"], 1):
        opt.param_groups[0]["backend"] = backend
        before = p.detach().clone()
        p.grad = torch.ones(3, 5)
        opt.step()
        assert bool((p < before - 0.05).all())
        assert opt.state[p]["step"] == step
        assert not (is_short(opt) and backend == "reference")
