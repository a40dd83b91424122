"""State dicts: versions, and that nothing which does not fit is loaded, or changes anything."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from optgen import optim
from optgen.optim import CAME, SGD, AdamW, NAdam
from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.states.state import describe
from tests.training import bits, everything, give, train


# -- forms ---------------------------------------------------------------------------------------------------------
def named(cls: Any, plan: str, shapes: dict[str, tuple[int, ...]]) -> Any:
    draw = torch.Generator().manual_seed(0)
    params = {k: torch.nn.Parameter(torch.randn(s, generator=draw).bfloat16()) for k, s in shapes.items()}
    return cls(params.items(), lr=1e-2, plan=plan, seed=5, backend="reference")


@pytest.mark.parametrize("found", [checkpoint.FORMAT + 1, checkpoint.FORMAT - 1, -1, "5", 5.0, True, None])
def test_other_forms_are_refused(found: object) -> None:
    opt, _ = stepped(AdamW, "fp32_master")
    saved, pickled = copy.deepcopy(opt.state_dict()), copy.deepcopy(opt.__getstate__())
    for groups in (saved["param_groups"], pickled["param_groups"]):
        groups[0]["format"] = found
        if found is None:
            del groups[0]["format"]
    before = everything(opt)
    text = re.escape(f"expected a checkpoint of format {checkpoint.FORMAT}, got format {found!r}, which is not read")
    with pytest.raises(ValueError, match=f"group 0: {text}"):
        opt.load_state_dict(saved)
    assert everything(opt) == before
    with pytest.raises(ValueError, match=text):
        AdamW.__new__(AdamW).__setstate__(pickled)


def test_what_a_form_has() -> None:
    """The list of a form: where it changes after a release, FORMAT rises."""
    opt, _ = stepped(AdamW, "int8_split24")
    saved = opt.state_dict()
    shown = {key: describe(x.dtype, tuple(x.shape)) for key, x in saved["state"][0].items() if key != "step"}
    assert checkpoint.FORMAT == 5 and set(saved) == {"state", "param_groups"}
    assert shown == {
        "exp_avg_codes": "uint8 [64, 80]", "exp_avg_scale": "int16 [64, 2]",
        "exp_avg_sq_codes": "uint8 [64, 80]", "exp_avg_sq_range": "int16 [64, 2]",
    }  # fmt: skip
    assert set(saved["param_groups"][0]) == {
        "lr", "betas", "eps", "weight_decay", "maximize", "amsgrad", "decouple_lr", "seed", "backend", "plan",
        "format", "params",
    }  # fmt: skip


# -- what torch.optim must not take for its own --------------------------------------------------------------------
def stepped(cls: Any, plan: str, steps: int = 2, **options: Any) -> tuple[Any, list[torch.nn.Parameter]]:
    """An optimizer of a matrix that is kept in codes and of a vector that is not."""
    draw = torch.Generator().manual_seed(4)
    params = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((64, 80), (5,))]
    opt = cls(params, plan=plan, backend="reference", **options)
    train(opt, range(steps))
    return opt, params


@pytest.mark.filterwarnings("ignore:.*is discouraged")
@pytest.mark.parametrize(
    ("name", "state", "plan"),
    [
        *(("AdamW", "exp_avg", plan) for plan in ("int8_split24", "int4_split24", "bnb8")),
        ("RMSprop", "square_avg", "int8_split24"),
        ("Adagrad", "sum", "int8_split24"),
    ],
)
def test_torch_does_not_take_codes_for_states(name: str, state: str, plan: str) -> None:
    opt, params = stepped(getattr(optim, name), plan)
    theirs = getattr(torch.optim, name)(params)
    theirs.load_state_dict(opt.state_dict())
    before = [p.detach().clone() for p in params]
    with pytest.raises(KeyError, match=f"^'{state}'$"):
        theirs.step()
    assert all(map(torch.equal, params, before))
    theirs = getattr(torch.optim, name)(params)
    theirs.load_state_dict(opt.dense_state_dict())
    theirs.step()


@pytest.mark.parametrize("name", ["SGD", "Muon"])
def test_momentum_that_torch_lets_be_missing_begins_anew(name: str) -> None:
    """As in a new optimizer of the same options, without a word: torch does not know the names of codes."""
    p = torch.nn.Parameter(torch.randn(64, 80, generator=torch.Generator().manual_seed(4)))
    opt = getattr(optim, name)([p], lr=0.1, momentum=0.9, plan="int8_split24", backend="reference")
    train(opt, range(2))
    assert "momentum_buffer_codes" in opt.state[p]
    saved, params = opt.state_dict(), [torch.nn.Parameter(p.detach().clone()) for _ in range(2)]
    for q, states in zip(params, (saved["state"], {}), strict=True):
        theirs = getattr(torch.optim, name)([q], lr=0.1, momentum=0.9)
        theirs.load_state_dict({"state": states, "param_groups": [{**theirs.state_dict()["param_groups"][0]}]})
        give([q], 2)
        theirs.step()
    assert torch.equal(*params)
    assert not torch.equal(params[0], p)


def test_random_bits_of_names_that_a_checkpoint_has_not_are_warned_of() -> None:
    opt, params = stepped(AdamW, "int8_split24")
    saved = copy.deepcopy(opt.state_dict())
    with pytest.warns(UserWarning, match="without names: random bits follow the names of this one"):
        AdamW(list(zip("wb", params, strict=True)), plan="int8_split24").load_state_dict(saved)


def test_own_entries_are_left_out_of_state_dicts() -> None:
    opt, (p, *others) = stepped(AdamW, "int8_split24")
    wanted, model = copy.deepcopy(opt.state_dict()), torch.nn.ParameterList([p, *others])
    opt.state[p]["mine"], opt.state["n"] = torch.ones(2), 3
    with pytest.warns(UserWarning, match=r"left out 2 entries of your own in `state`, as 'n': keep them elsewhere"):
        saved = opt.state_dict()
    assert bits(saved) == bits(wanted) and "mine" in opt.state[p] and opt.state["n"] == 3
    with pytest.warns(UserWarning, match="left out 2"):
        set_optimizer_state_dict(model, opt, get_optimizer_state_dict(model, opt))
    opt.load_state_dict(saved)
    assert everything(opt) == bits([[p, *others], wanted])


# -- every single change of a checkpoint -----------------------------------------------------------------------
def other_dtype(t: Tensor) -> Tensor:
    return t.to(torch.int32) if t.dtype in (torch.uint8, torch.int16) else t.to(torch.int64)


def changes(saved: dict[str, Any]) -> Iterator[tuple[str, Callable[[dict[str, Any]], object]]]:
    """(what, how) of all changes of one entry that must be noticed."""
    for number, entry in saved["state"].items():
        yield f"{number}: extra", lambda s, n=number: s["state"][n].update(extra=torch.zeros(3))
        yield f"{number}: not a dict", lambda s, n=number: s["state"].update({n: [1]})
        yield f"{number}: a tensor", lambda s, n=number: s["state"].update({n: torch.zeros(3)})
        yield f"{number}: another number", lambda s, n=number: s["state"].update({n + 77: s["state"].pop(n)})
        for key, value in entry.items():
            where = f"{number}.{key}"
            yield f"{where}: missing", lambda s, n=number, k=key: s["state"][n].pop(k)
            yield f"{where}: None", lambda s, n=number, k=key: s["state"][n].update({k: None})
            yield f"{where}: text", lambda s, n=number, k=key: s["state"][n].update({k: "q8"})
            yield f"{where}: renamed", lambda s, n=number, k=key: s["state"][n].update({f"{k}_": s["state"][n].pop(k)})
            if not isinstance(value, Tensor):
                yield f"{where}: negative", lambda s, n=number, k=key: s["state"][n].update({k: -1})
                yield f"{where}: fraction", lambda s, n=number, k=key: s["state"][n].update({k: 1.5})
                beyond = (float("nan"), float("inf"), *((2**53, 2**63, 1e300) if key == "step" else ()))
                for x in beyond:
                    yield f"{where}: {x}", lambda s, n=number, k=key, x=x: s["state"][n].update({k: x})
                continue
            for what, change in (
                ("dtype", other_dtype),
                ("complex", lambda t: t.to(torch.complex64)),
                ("no values", lambda t: t.to("meta")),
                ("shape", lambda t: t.unsqueeze(0)),
                ("flat", lambda t: t.reshape(-1) if t.ndim != 1 else t.reshape(1, -1)),
                ("short", lambda t: t[:-1] if t.ndim else t.reshape(1)),
                ("long", lambda t: torch.cat([t, t[:1]]) if t.ndim else t.reshape(1)),
            ):
                made = change(value)
                yield f"{where}: {what}", lambda s, n=number, k=key, v=made: s["state"][n].update({k: v})
            if value.is_floating_point():
                yield f"{where}: one NaN", lambda s, n=number, k=key: poison(s, n, k, float("nan"))
                if key.startswith("exp_avg_sq") or key.endswith("_scale"):
                    yield f"{where}: a negative one", lambda s, n=number, k=key: poison(s, n, k, -1.0)
    for key in saved["param_groups"][0]:
        if key not in ("param_names", "foreach", "fused", "capturable", "differentiable", "format", "backend", "seed"):
            yield f"group {key}: text", lambda s, k=key: s["param_groups"][0].update({k: "none"})
    yield "plan: another", lambda s: s["param_groups"][0].update(plan="fp32")
    yield "plan: missing", lambda s: s["param_groups"][0].pop("plan")
    yield "plan: unknown", lambda s: s["param_groups"][0].update(plan="int9")
    yield "groups: none", lambda s: s.update(param_groups=[])
    yield "groups: twice", lambda s: s["param_groups"].append(s["param_groups"][0])
    yield "params: fewer", lambda s: s["param_groups"][0]["params"].pop()
    yield "names: one other", lambda s: s["param_groups"][0]["param_names"].__setitem__(0, "other")
    yield "names: a number", lambda s: s["param_groups"][0].update(param_names=2.5)
    yield "names: lists", lambda s: s["param_groups"][0]["param_names"].__setitem__(0, ["w"])
    yield "params: a list", lambda s: s["param_groups"][0]["params"].__setitem__(0, [0])
    yield "params: a tensor", lambda s: s["param_groups"][0]["params"].__setitem__(0, torch.zeros(2))
    yield "names: fewer", lambda s: s["param_groups"][0]["param_names"].pop()
    yield "params: swapped", lambda s: s["param_groups"][0]["params"].reverse()
    yield "state: no dict", lambda s: s.update(state=[])


def poison(saved: dict[str, Any], number: int, key: str, wrong: float) -> None:
    value = saved["state"][number][key].clone()
    value.view(-1)[-1] = wrong
    saved["state"][number][key] = value


def refusal(opt: Any, saved: dict[str, Any]) -> str:
    """Return the error of load_state_dict, or "" where it loads."""
    try:
        opt.load_state_dict(saved)
    except ValueError as error:
        return str(error)
    return ""


PLANS = {
    "int8_split24": (AdamW, {"w": (52, 79), "b": (7,)}),
    "fp32_master": (AdamW, {"w": (3, 5), "b": (7,)}),
    "came": (CAME, {"w": (52, 79), "x": (3, 5)}),
    "flashoptim": (AdamW, {"w": (3, 5), "b": (7,)}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_every_single_change_is_refused_and_changes_nothing(plan: str) -> None:
    cls, shapes = PLANS[plan]
    opt = named(cls, plan if plan != "came" else "int8_split24", shapes)
    train(opt, range(2))
    saved = copy.deepcopy(opt.state_dict())
    train(opt, range(2, 3))
    before = everything(opt)
    number = 0
    for what, change in changes(saved):
        broken = copy.deepcopy(saved)
        change(broken)
        assert "does not fit, nothing was loaded" in refusal(opt, broken), what
        assert everything(opt) == before, what
        number += 1
    assert number > 60
    opt.load_state_dict(saved)  # and as it was, it loads
    assert everything(opt) != before


def test_all_numbers_that_do_not_fit_are_listed() -> None:
    """An infinite step, a huge one, an infinite number of the rule and a lost scale, of four parameters."""
    names = ("w", "x", "y", "z")
    params = [torch.nn.Parameter(torch.ones(64, 64)) for _ in names]
    opt = NAdam(list(zip(names, params, strict=True)), plan="int8", backend="reference")
    train(opt, range(1))
    saved, before = copy.deepcopy(opt.state_dict()), everything(opt)
    saved["state"][0]["step"], saved["state"][1]["step"] = float("inf"), 2**63
    saved["state"][2]["mu_product"] = torch.tensor(float("inf"))
    del saved["state"][3]["exp_avg_scale"]
    words = refusal(opt, saved)
    for name, key in zip(names, ("step: expected a whole", "step: expected a whole", "mu_product: expected a finite",
                                 "exp_avg_scale: expected"), strict=True):  # fmt: skip
        assert any(f"'{name}'" in line and key in line for line in words.splitlines()), words
    assert everything(opt) == before


@pytest.mark.parametrize("made", [optim, torch.optim], ids=["own", "torch"])
def test_options_of_another_rule_are_refused_if_no_state_tells(made: Any) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    for cls, key in ((AdamW, "betas, eps"), (SGD, "momentum, dampening")):
        theirs = (made.SGD if cls is AdamW else made.AdamW)([p], lr=0.5)
        opt = cls([p])
        before = everything(opt)
        assert f"group 0: expected {key}, they are missing, and so are all states" in refusal(opt, theirs.state_dict())
        assert everything(opt) == before
        opt.load_state_dict(getattr(made, cls.__name__)([p], lr=0.25).state_dict())
        assert opt.param_groups[0]["lr"] == 0.25


def test_parameters_without_a_state_in_the_checkpoint_are_named() -> None:
    opt, fresh = (named(AdamW, "int8_split24", {"w": (52, 79), "b": (7,)}) for _ in range(2))
    train(opt, range(1))
    saved = copy.deepcopy(opt.state_dict())
    del saved["state"][1]
    for other in (opt, fresh):
        with pytest.warns(UserWarning, match=r"no state for 1 parameters \['b'\]: they start anew"):
            other.load_state_dict(saved)


def test_states_that_torch_loaded_are_refused_with_the_way_to_load_them() -> None:
    """Its own load_state_dict casts codes to the parameter's dtype."""
    opt, params = stepped(AdamW, "int8_split24")
    saved = copy.deepcopy(opt.state_dict())
    torch.optim.Optimizer.load_state_dict(opt, saved)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"loaded by torch\.optim\.Optimizer\.load_state_dict"):
        opt.step()
    opt.load_state_dict(saved)
    opt.step()
