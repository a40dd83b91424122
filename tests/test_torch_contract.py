"""Questions of PyTorch's tests of its own optimizers, asked of the generated ones.

The optimizers and the arguments come from PyTorch's table (torch.testing._internal.common_optimizers); the questions
are those of its generic tests, written anew.  docs/contract.md says which of them do not apply.
"""

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_optimizers

from optgen import optim
from optgen.runtime import Optimizer
from tests.training import alike, copies, give, parameters, params_of, through_file, train

ABSENT = {"LBFGS", "SparseAdam"}
"""Rules that are not among the generated ones."""

INFOS = [info for info in common_optimizers.optim_db if info.optim_cls.__name__ not in ABSENT]
NAMES = [info.optim_cls.__name__ for info in INFOS]
BOTH = [
    pytest.param(getattr(optim, name), given.kwargs, id=f"{name}-{given.desc}")
    for name, info in zip(NAMES, INFOS, strict=True)
    for given in info.optim_inputs_func(device="cpu")
]
CLASSES = [pytest.param(getattr(optim, name), id=name) for name in NAMES]
STEPS = 4


def in_turn(*values: object) -> list[Any]:
    """The arguments of every optimizer with one of these values in turn; with each of the others marked `full`."""
    marks = [[pytest.mark.full] * bool(n) for n in range(len(values))]
    return [
        pytest.param(*both.values, value, id=f"{both.id}-{value}", marks=marks[(k - n) % len(values)])
        for k, both in enumerate(BOTH)
        for n, value in enumerate(values)
    ]


def matrices(count: int = 2, seed: int = 0) -> list[nn.Parameter]:
    """Every rule takes matrices."""
    return parameters([(4 + k, 3) for k in range(count)], seed=seed)


def fresh(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an optimizer of its own: tensors among them are not shared."""
    return copy.deepcopy(kwargs)


def trained(cls: type[Optimizer], kwargs: dict[str, Any], steps: int = STEPS) -> Optimizer:
    opt = cls(matrices(), **fresh(kwargs))
    train(opt, range(steps))
    return opt


def go_on(opt: Optimizer, steps: int = 2) -> list[Tensor]:
    train(opt, range(100, 100 + steps))
    return [p.detach().clone() for p in params_of(opt)]


def test_the_table_knows_what_is_here() -> None:
    assert {info.optim_cls.__name__ for info in common_optimizers.optim_db} >= ABSENT
    assert len(BOTH) > len(CLASSES) >= 12


# -- the direction ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("cls", "kwargs", "sliced"), in_turn(False, True))
def test_the_loss_goes_down(cls: type[Optimizer], kwargs: dict[str, Any], sliced: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    shape = (10, 5, 2) if sliced else (10, 5)
    weight = nn.Parameter(torch.randn(shape, generator=draw)[..., 0] if sliced else torch.randn(shape, generator=draw))
    x, target = torch.randn(5, 1, generator=draw), torch.randn(10, 1, generator=draw)
    opt = cls([weight], **fresh(kwargs))
    sign = -1 if kwargs.get("maximize") else 1

    def closure() -> Tensor:
        opt.zero_grad()
        loss = ((weight @ x - target) ** 2).sum()
        loss.backward()
        return loss

    first = float(closure())
    for _ in range(20):
        opt.step(closure)
    assert sign * (float(closure()) - first) < 0


@pytest.mark.parametrize(("cls", "kwargs", "shape"), in_turn((), (1,), (1, 1)))
def test_a_rate_that_is_a_tensor(cls: type[Optimizer], kwargs: dict[str, Any], shape: tuple[int, ...]) -> None:
    value = torch.tensor(float(kwargs.get("lr", 0.01)))
    one = trained(cls, {**kwargs, "lr": value.reshape(shape)})
    two = trained(cls, {**kwargs, "lr": value.item()})
    assert isinstance(one.param_groups[0]["lr"], Tensor)
    assert alike(go_on(one), go_on(two))


@pytest.mark.parametrize("cls", CLASSES)
def test_groups_have_options_of_their_own(cls: type[Optimizer]) -> None:
    """A group with its options steps as an optimizer with them."""
    ours, alone, beside = matrices(), matrices(), matrices()
    decay = {"weight_decay": 0.1} if any(h.name == "weight_decay" for h in cls.HYPERS) else {}
    opt = cls([{"params": ours[:1], "lr": 0.03, **decay}, {"params": ours[1:]}], lr=0.01)
    others = [cls(alone[:1], lr=0.03, **decay), cls(beside[1:], lr=0.01)]
    for step in range(STEPS):
        for params in (ours, alone, beside):
            give(params, step)
        for one in (opt, *others):
            one.step()
    assert torch.equal(ours[0], alone[0])
    assert torch.equal(ours[1], beside[1])


# -- what a step leaves alone ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("cls", "kwargs"), BOTH)
def test_what_a_step_leaves_alone(cls: type[Optimizer], kwargs: dict[str, Any]) -> None:
    """A parameter without a gradient; any gradient; and but for weight decay one whose gradient is 0."""
    if kwargs.get("weight_decay") or cls.__name__ in ("AdamW", "Muon"):
        kwargs = {**kwargs, "weight_decay": 0.0}
    if cls.__name__ == "ASGD":
        kwargs = {**kwargs, "lambd": 0.0}
    params = matrices()
    before = [p.detach().clone() for p in params]
    opt = cls(params, **fresh(kwargs))
    opt.step()
    assert not opt.state
    kept = [torch.zeros_like(p) for p in params]
    for p, g in zip(params, kept, strict=True):
        p.grad = g
    opt.step()
    assert alike(before, [p.detach() for p in params])
    assert all(opt.state[p] for p in params)
    give(params, 0)
    kept += [p.grad for p in params]
    copies = [(g.clone(), g._version) for g in kept]
    opt.step()
    assert all(p.grad is g for p, g in zip(params, kept[2:], strict=True))
    assert alike(copies, [(g, g._version) for g in kept])


# -- states ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("cls", "kwargs"), BOTH)
def test_states_and_checkpoints(cls: type[Optimizer], kwargs: dict[str, Any]) -> None:
    """Printed; the same dict twice; through a file, weights_only, and on with the same bits."""
    opt = trained(cls, kwargs)
    assert cls.__name__ in repr(opt)
    first, second = opt.state_dict(), opt.state_dict()
    assert list(first["state"]) == list(second["state"])
    assert alike(first, second)
    assert all(entry for entry in first["state"].values())
    old = copy.deepcopy(first)  # from before these were options
    for group in old["param_groups"]:
        for key in ("maximize", "amsgrad", "foreach", "fused", "capturable", "differentiable"):
            group.pop(key, None)
    others = []
    for saved in (through_file(first), old):
        other = cls(copies(opt), **fresh(kwargs))
        other.load_state_dict(saved)
        others.append(other)
    assert alike(others[0].state_dict(), first)
    wanted = go_on(opt)
    assert all(alike(go_on(other), wanted) for other in others)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("kind", [float, torch.tensor, lambda n: torch.tensor(float(n)), lambda n: torch.tensor([n])])
def test_steps_of_any_kind(cls: type[Optimizer], kind: Callable[[int], Any]) -> None:
    opt = trained(cls, {})
    other = cls(copies(opt))
    saved = copy.deepcopy(opt.state_dict())
    for entry in saved["state"].values():
        entry["step"] = kind(entry["step"])
    other.load_state_dict(saved)
    assert alike(go_on(other), go_on(opt))


@pytest.mark.parametrize("cls", CLASSES)
def test_hooks(cls: type[Optimizer]) -> None:
    """Hooks of steps, of state dicts, which they may change, and of loading; global ones; removed, they are silent."""
    opt, seen = trained(cls, {}, 1), list[str]()
    note = lambda name: lambda *_: seen.append(name)  # noqa: E731
    handles = [
        opt.register_step_pre_hook(note("before")),
        opt.register_step_post_hook(note("after")),
        register_optimizer_step_pre_hook(note("all before")),
        register_optimizer_step_post_hook(note("all after")),
        opt.register_state_dict_pre_hook(note("save")),
        opt.register_state_dict_post_hook(note("saved")),
        opt.register_load_state_dict_pre_hook(note("load")),
        opt.register_load_state_dict_post_hook(note("loaded")),
    ]
    expected = ["all before", "before", "after", "all after", "save", "saved", "load", "loaded"]
    handles.append(opt.register_state_dict_post_hook(lambda _, saved: {**saved, "note": 1}))
    handles.append(
        opt.register_load_state_dict_pre_hook(lambda _, given: {k: v for k, v in given.items() if k != "note"})
    )
    for wanted in (expected, []):
        opt.step()
        saved = opt.state_dict()
        assert ("note" in saved) == bool(wanted)
        opt.load_state_dict(saved)
        assert sorted(seen) == sorted(wanted)
        assert [x for x in seen if "all" not in x] == [x for x in wanted if "all" not in x]
        seen.clear()
        for handle in handles:
            handle.remove()


# -- checkpoints of torch ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_every_argument_of_torch_is_one_here(name: str) -> None:
    """With its default; hyper-parameters and flags by position, too, the rest by name (docs/contract.md).

    Adafactor's eps[0] is a number here, torch's None means the same one for fp32; Muon's ns_steps is None, which means
    torch's 5 for its coefficients.
    """
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    ours = inspect.signature(getattr(optim, name)).parameters
    assert [x for x in theirs if x not in ours] == (["adjust_lr_fn"] if name == "Muon" else [])
    for word in theirs.keys() & ours.keys() - {{"Adafactor": "eps", "Muon": "ns_steps"}.get(name)}:
        assert theirs[word].default == ours[word].default, word
    wanted, found = (
        [p.name for p in given.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        for given in (theirs, ours)
    )
    by_name = {"capturable", "foreach", "maximize", "differentiable"}
    wanted = [key for key in wanted if key not in by_name]
    wanted = wanted[: wanted.index("nesterov")] if name == "Muon" else wanted
    assert found[: len(wanted)] == wanted and by_name.isdisjoint(found)


@pytest.mark.parametrize(("cls", "kwargs"), BOTH)
def test_a_checkpoint_with_weights_that_made_no_step(cls: type[Optimizer], kwargs: dict[str, Any]) -> None:
    """Adagrad of torch keeps a state for them, too: before its first step a sum is what the option says."""
    given = {**fresh(kwargs), **({"initial_accumulator_value": 0.3} if cls.__name__ == "Adagrad" else {})}
    given.pop("foreach", None)
    theirs, ours = matrices(), matrices()
    other = getattr(torch.optim, cls.__name__)(theirs, **given)
    for step in range(3):
        give(theirs, step)
        theirs[1].grad = None
        other.step()
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    opt = cls(ours, plan="fp32")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the checkpoint has no state for 1 parameters")
        opt.load_state_dict(copy.deepcopy(other.state_dict()))
    for p, q in zip(go_on(opt), go_on(other), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_the_decay_of_a_checkpoint_is_the_one_that_torch_goes_on_with(
    name: str, decoupled: bool, weight_decay: float
) -> None:
    """An Adam takes it over, an AdamW has its own, whatever was loaded: as torch's."""
    saved = torch.optim.Adam(matrices(), lr=0.1, weight_decay=weight_decay, decoupled_weight_decay=decoupled)
    give(saved.param_groups[0]["params"], 5)
    saved.step()
    other, opt = getattr(torch.optim, name)(matrices()), getattr(optim, name)(matrices(), plan="fp32")
    for one in (other, opt):
        one.load_state_dict(copy.deepcopy(saved.state_dict()))
    for p, q in zip(go_on(opt), go_on(other), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# -- errors ----------------------------------------------------------------------------------------------------------
OTHER_WORDS = {
    "a param group cannot have duplicate parameters": (ValueError, "contains a parameter twice"),
    "Tensor lr must be 1-element": (TypeError, "lr must be a number"),
    "does not support complex parameters": (TypeError, "complex64"),
    "only support `original` and `match_rms_adamw`": (TypeError, "adjust_lr_fn"),
}
"""Errors that are others than torch's: what torch only warns of is an error here, and Muon has no such argument."""

ALLOWED = ("foreach", "capturable", "Tensor", "only support 2D parameters", "0 < eta1")
"""Errors of torch's own implementations, which are not here: such arguments are accepted.  Muon gives AdamW to what is
no matrix; the two factors of Rprop have one range."""


@pytest.mark.parametrize(
    ("cls", "case"),
    [
        pytest.param(getattr(optim, info.optim_cls.__name__), case, id=f"{info.optim_cls.__name__}-{i}")
        for info in INFOS
        for i, case in enumerate(info.optim_error_inputs_func(device="cpu", dtype=torch.float32))
    ],
)
def test_arguments_that_torch_refuses(cls: type[Optimizer], case: Any) -> None:
    given = case.optimizer_error_input
    params = matrices() if given.params is None else given.params
    if any(word in given.desc for word in ALLOWED) and given.desc not in OTHER_WORDS:
        return
    kind, text = OTHER_WORDS.get(given.desc, (case.error_type, "" if given.params is None else case.error_regex))
    with pytest.raises((kind, TypeError) if given.params is None else kind, match=text):
        cls(params, **fresh(given.kwargs)).step()


def test_a_factor_of_rprop_may_be_any_positive_number() -> None:
    """torch has a range for each."""
    opt = trained(optim.Rprop, {"etas": (1.5, 0.5)})
    assert all(p.isfinite().all() for p in params_of(opt))
    with pytest.raises(ValueError, match="Invalid eta"):
        torch.optim.Rprop(matrices(), etas=(1.5, 0.5))
    for etas in ((0.5, 0.0), (-0.5, 1.2)):
        with pytest.raises(ValueError, match=r"etas\[[01]\] must be > 0"):
            optim.Rprop(matrices(), etas=etas)


# -- a momentum that begins or ends -----------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["reference", "triton", "cpp"])
@pytest.mark.parametrize(("first", "then"), [(0.0, 0.5), (0.5, 0.0)])
def test_a_momentum_that_begins_or_ends_after_a_step_is_refused(first: float, then: float, backend: str) -> None:
    """Before anything changes; set back, the run goes on."""
    params = matrices()
    opt = optim.SGD(params, lr=0.25, plan="fp32", backend=backend)
    opt.param_groups[0]["momentum"] = first
    train(opt, range(2))
    before = copy.deepcopy((opt.state_dict()["state"], [p.detach() for p in params]))
    opt.param_groups[0]["momentum"] = then
    words = "without momentum_buffer, which it has" if then else "with momentum_buffer, which it does not have"
    with pytest.raises(ValueError, match=rf"has made steps {words} under .*momentum={then}: set that back"):
        train(opt, [2])
    assert alike((opt.state_dict()["state"], [p.detach() for p in params]), before)
    opt.param_groups[0]["momentum"] = first
    train(opt, [2])
    assert opt.state[params[0]]["step"] == 3
