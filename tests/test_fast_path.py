"""The short way through steps of C++ kernels: taken where nothing is new, and the same bits."""

import copy
import ctypes
import gc
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import optgen.optim
from optgen.runtime.cpu import cache, cpu, native
from optgen.runtime.step import look, plan
from tests import training
from tests.test_native import everything, first, gradient_half, trained
from tests.training import bits, give, nadam, params_of
from tests.training import has_plan as is_short

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
    "swap_field": lambda opt: torch.utils.swap_tensors(entry(opt)["exp_avg"], entry(opt)["exp_avg"] * 2),
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
    taken = training.planned_steps(monkeypatch)
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


RULES: dict[str, Any] = {"AdamW": {}, "Muon": {}, "SOAP": {"precondition_frequency": 3}, "Prodigy": {}, "CAME": {}}
"""One sweep, a function of matrices, steps of three kinds, a sum over the model, sums of rows and columns."""

OTHERS: dict[str, Callable[[Any], object]] = {
    "add_group": lambda opt: opt.add_param_group({"params": given(7, [(3, 4)]), "lr": 0.3}),
    "move_field": lambda opt: entry(opt).update({k: x.clone() for k, x in entry(opt).items() if isinstance(x, Tensor)}),
    "load_state_dict": lambda opt: opt.load_state_dict(copy.deepcopy(opt.state_dict())),
    "another_dtype": lambda opt: setattr(first(opt), "data", first(opt).data.bfloat16()),
    "field_of_another_dtype": lambda opt: entry(opt).update(
        {k: x.view(torch.int32) for k, x in entry(opt).items() if isinstance(x, Tensor) and x.dtype is torch.float32}
    ),
}
OF_NADAM = {
    "gradient_negated", "load", "new_field", "new_field_data", "swap_field", "share_field", "set_host_state", "flag",
}  # fmt: skip
OF_ALL = sorted((CHANGES.keys() - OF_NADAM) | OTHERS.keys())


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    rule=st.sampled_from(sorted(RULES)), changes=st.lists(st.sampled_from(OF_ALL), max_size=6), by_python=st.booleans()
)
def test_plans_of_every_kind_of_step(rule: str, changes: list[str], by_python: bool) -> None:
    """Beside an optimizer that plans each step anew; what one refuses, the other does."""
    with patch.object(look, "_reader", (lambda: None) if by_python else look._reader):
        plan_beside_none(rule, changes)


def plan_beside_none(rule: str, changes: list[str]) -> None:
    cls, twins = getattr(optgen.optim, rule), []
    for kept in (True, False):
        params = training.parameters([(6, 5), (4, 6), (6, 5), (80, 64)])  # the last is large enough for codes
        groups = [{"params": params[:3]}, {"params": params[3:], "seed": 3}]
        opt = cls(groups, lr=0.1, backend="cpp", **RULES[rule])
        if not kept:
            training.keep_no_plan(opt)
        errors = []
        for step, change in enumerate(["nothing", *changes]):
            give(params_of(opt), step)
            for work in ((CHANGES | OTHERS)[change], cls.step, cls.step, cls.step):
                try:
                    work(opt)
                except (RuntimeError, TypeError, ValueError) as error:
                    errors.append(str(error))
        twins.append((errors, bits([params_of(opt), list(opt.state.values())])))
    assert twins[0] == twins[1]


def test_what_is_read_of_tensors() -> None:
    """C++ tells the same tensors apart as Python does."""
    x = torch.randn(6, 4)
    freed, dtypes = torch.randn(3), (torch.float16, torch.bfloat16, torch.int16, torch.uint16)
    freed.untyped_storage().resize_(0)
    kinds = [
        x, nn.Parameter(x), x[1:], x[:, 1:], x.t(), x.t().contiguous(), x[:1], x.t()[:1], x[:, :1], x.view(24),
        x.view(1, 24), x.view(24, 1), x[0, 0], x[0], x[:0], x.view(torch.int32), torch.zeros(0), torch.zeros(0, 4),
        freed, torch.randn(3), x.expand(2, 6, 4), torch.empty(3).as_strided((2, 2), (1, 1)), *map(x.to, dtypes),
    ]  # fmt: skip
    found = []
    for reader in (look._reader, lambda: None):
        with patch.object(look, "_reader", reader):
            seen = [look.look([], [], [one]) for one in kinds]
            for one, before in zip(kinds, seen, strict=True):
                assert look.look(["x"], [{"x": one}], [], before) == before
            found.append([[a == b for b in seen] for a in seen])
            for wrong in ({}, {"x": 1}, {"x": x.to_sparse()}, {"x": x.to("meta")}, None):
                with suppress(KeyError, TypeError, AttributeError, RuntimeError):  # as `Plans.find` does
                    assert look.look(["x"], [wrong], [], seen[0]) != seen[0]
    assert look._reader() is not None
    assert found[0] == found[1]
    assert sum(map(sum, found[0])) == len(kinds) + 4  # a parameter and its data are alike, and what has no elements


ROOTS = [Path(str(optgen.__file__)).parent, cache.folder()]


def calls(work: Callable[..., object], *given: Any) -> int:
    """Return the number of calls of Python functions of the package."""
    found: list[Path] = []
    sys.setprofile(lambda frame, event, _: found.append(Path(frame.f_code.co_filename)) if event == "call" else None)
    try:
        work(*given)
    finally:
        sys.setprofile(None)
    return sum(file.is_relative_to(root) for file in found for root in ROOTS)


@pytest.mark.parametrize(("rule", "usual"), [("AdamW", 100), ("Muon", 200)])
def test_python_calls_of_a_step(rule: str, usual: int, tmp_path: Path) -> None:
    """Count those of ten parameters: of the first step, of usual ones, and of a checkpoint that is loaded."""
    cls: Any = getattr(optgen.optim, rule)
    for shapes in ([(32, 16)] * 10, [(32, 16), (16, 32), (8, 24), (5, 40), (9, 9)] * 2):
        params = training.parameters(shapes)
        opt, model = cls(params, lr=1e-3, backend="cpp"), nn.ParameterList(params)
        for step, most in enumerate((2000, usual, usual)):
            give(params, step)
            assert calls(opt.step) <= most
        optgen.save_checkpoint(tmp_path / "saved", opt, model)
        assert calls(optgen.load_checkpoint, tmp_path / "saved", opt, model) <= 3000


@pytest.mark.parametrize("rule", ["AdamW", "CAME", "Muon"])
def test_calls_do_not_grow_with_the_number_of_parameters(rule: str) -> None:
    found = []
    for count in (10, 40):
        opt = getattr(optgen.optim, rule)(training.parameters([(32, 16)] * count), lr=1e-3, backend="cpp")
        for step in range(4):
            give(params_of(opt), step)
            made = calls(opt.step)
        found.append(made)
    assert found[1] <= found[0] + 5


def test_as_many_turns_of_parameters_as_plans_are_kept_have_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = training.planned_steps(monkeypatch)
    for turns in (2, plan.KEPT + 1):
        opt, other = trained(steps=0), trained("reference", steps=0)
        for step in range(4 * turns):
            for one in (opt, other):
                give(params_of(one), step)
                params_of(one)[step % turns].grad = None
                one.step()
        assert everything(opt) == everything(other)
        assert taken[-1] == (turns == 2)


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


def test_profilers_see_steps() -> None:
    opt = trained()
    with torch.profiler.profile() as seen:
        opt.step()
    assert "Optimizer.step#NAdam.step" in {event.key for event in seen.key_averages()}


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
