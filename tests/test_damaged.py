"""Checkpoints damaged at random: what is loaded is what stands there, or it is refused and nothing has changed.

Daily runs draw the same damage each time, `--hypothesis-profile=full` draws new one.
"""

from __future__ import annotations

import copy
import io
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from optgen import cast_model, load_checkpoint, save_checkpoint
from optgen.base.errors import UserError
from optgen.driver import checkpoints
from optgen.optim import CAME, AdamW
from optgen.runtime import files
from optgen.runtime.checkpoint import container
from optgen.runtime.files import CheckpointError
from tests.training import bits, everything, train

SEEDS = st.integers(0, 2**32 - 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(79, 52, bias=False), nn.Linear(52, 7, bias=False)


def ready(cls: Any, plan: str, steps: int, seed: int = 0) -> tuple[nn.Module, Any]:
    """A model and its optimizer in two groups after so many steps."""
    model = cast_model(Net(), torch.bfloat16)
    named = list(model.named_parameters())
    opt = cls([{"params": named[:1]}, {"params": named[1:], "lr": 2e-3}], lr=1e-2, plan=plan, seed=seed)
    train(opt, range(steps))
    return model, opt


# -- what may happen to a value ---------------------------------------------------------------------------------


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in nested dicts and lists."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def junk(drawn: random.Random, value: Any) -> Any:
    """Something else in the place of a value."""
    tensors = [
        torch.zeros(()), torch.zeros(0), torch.full((3, 2), math.nan), torch.zeros(2, 2, device="meta"),
        torch.eye(3).to_sparse(), torch.zeros(3, dtype=torch.complex64), torch.ones(1) > 0,
    ]  # fmt: skip
    if not isinstance(value, Tensor) or value.is_sparse or value.is_meta:
        return drawn.choice([
            None, "int8_split24", -1, 0, 2**70, 1.5, math.nan, -math.inf, True, b"\0", 1j, [], {}, (0.9,), {1}, object,
            [[value]], {"a": value}, *tensors,
        ])  # fmt: skip
    value = value.detach()
    dtype = drawn.choice((torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64))
    likely = [
        value.to(dtype), value.flatten(), value[None], value.flip(0) if value.ndim else value, value * 3,
        value.t() if value.ndim == 2 else value[None], value[:-1] if value.ndim else value, value.to("meta"),
        torch.cat([value, value[:1]]) if value.ndim else value, value.clone().requires_grad_(value.is_floating_point()),
        flipped(drawn, value), torch.full_like(value, drawn.choice((0, 1, 127))),
    ]  # fmt: skip
    return drawn.choice([*tensors, *likely, *likely])


def flipped(drawn: random.Random, value: Tensor) -> Tensor:
    """One bit of it is another."""
    data = bytearray(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if data:
        data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
    return torch.frombuffer(data, dtype=value.dtype).view(value.shape) if data else value


def damage(drawn: random.Random, content: Any, other: Any) -> None:
    """One to three changes of a nested dict; `other`: what is taken from another checkpoint."""
    other = copy.deepcopy(other)
    for _ in range(drawn.randint(1, 3)):
        found = [(where, key) for where, key in places(content) if where]
        where, key = drawn.choice(found)
        kind = drawn.choice(("drop", "rename", "replace", "replace", "replace", "swap", "other"))
        if kind == "drop":
            del where[key]
        elif kind == "rename" and isinstance(where, dict):
            new = drawn.choice([f"{key}_", "exp_avg", "step", 7, None, ("a",), f"{key}.x"])
            where[new] = where.pop(key)
        elif kind == "swap":
            there, at = drawn.choice([x for x in found if x[0] is where] or [(where, key)])
            where[key], there[at] = there[at], where[key]
        elif kind == "other":
            there, at = drawn.choice(list(places(other)))
            where[key] = there[at]
        else:
            where[key] = junk(drawn, where[key])


def as_it_stands(opt: Any, saved: Any) -> None:
    """Of each parameter the optimizer holds the tensors that the checkpoint has for it, bit for bit (floats cast)."""
    for group, theirs in zip(opt.param_groups, saved["param_groups"], strict=True):
        numbers = list(theirs["params"])
        names, other = group["param_names"], theirs.get("param_names")
        if other is not None and set(other) == set(names):
            numbers = [dict(zip(other, numbers, strict=True))[name] for name in names]
        for p, number in zip(group["params"], numbers, strict=True):
            entry = {k: v for k, v in (saved["state"].get(number) or {}).items() if v is not None}
            kept = opt.state.get(p, {})
            assert bool(entry) == bool(kept)
            if kept.keys() != entry.keys():  # torch's form: encoded, or a step that it does not count
                assert kept.keys() >= {"step", "exp_avg"}
                continue
            for name, value in entry.items():
                if isinstance(value, Tensor) and isinstance(kept[name], Tensor):
                    assert kept[name].untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
                    cast = value.detach().to(kept[name].dtype)
                    assert cast.shape == kept[name].shape
                    assert torch.equal(cast, kept[name]), name
                else:
                    assert float(value) == float(kept[name]), name


def refused(load: Callable[[], object], model: nn.Module, opt: Any, before: Any) -> bool:
    """Return True if loading is refused; then nothing has changed, and the message says something."""
    said = ""
    try:
        load()
    except (ValueError, TypeError) as error:
        said = str(error)
    assert not said or (len(said) > 20 and everything(opt, model) == before)
    return bool(said)


def writable(write: Callable[[], object]) -> bool:
    """Return False for content that cannot be written: there is nothing to load."""
    try:
        write()
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError):
        return False
    return True


RUNS = [(AdamW, "int8_split24"), (AdamW, "fp32_master"), (CAME, "int8_split24")]


@pytest.mark.filterwarnings("ignore:.*no state for", "ignore:.*otherwise than the", "ignore:.*is no option")
@pytest.mark.parametrize(("cls", "plan"), RUNS, ids=[f"{c.__name__}-{p}" for c, p in RUNS])
def test_state_dicts(cls: Any, plan: str) -> None:
    source = ready(cls, plan, 2)[1].state_dict()
    others = [ready(AdamW, name, 1)[1].state_dict() for name in ("fp32", "int8_split24", "bf16_kahan")]
    fresh = ready(cls, plan, 1, seed=5)
    before = everything(fresh[1], fresh[0])
    outcomes = {"loaded": 0, "refused": 0}

    @given(SEEDS)
    def check(seed: int) -> None:
        drawn = random.Random(seed)
        broken = copy.deepcopy(source)
        damage(drawn, broken, drawn.choice(others))
        given_ = copy.deepcopy(broken)
        model, opt = copy.deepcopy(fresh)
        if refused(lambda: opt.load_state_dict(broken), model, opt, before):
            outcomes["refused"] += 1
            return
        as_it_stands(opt, given_)
        train(opt, range(1))  # what was loaded can be stepped
        opt.load_state_dict(opt.state_dict())
        outcomes["loaded"] += 1

    check()
    assert min(outcomes.values()) > 2, outcomes


def test_states_whose_memory_was_freed() -> None:
    """As sharding and offloading free it: reading there would end the process."""
    saved = ready(AdamW, "int8_split24", 1)[1].state_dict()
    model, opt = ready(AdamW, "int8_split24", 1, seed=5)
    before = everything(opt, model)
    kept = saved["state"][0]["exp_avg_codes"]
    saved["state"][0]["exp_avg_codes"] = gone = kept.clone()
    gone.untyped_storage().resize_(gone.untyped_storage().nbytes() - 1)
    with pytest.raises(ValueError, match="exp_avg_codes: expected a tensor with values, got one whose memory was"):
        opt.load_state_dict(saved)
    assert everything(opt, model) == before
    saved["state"][0]["exp_avg_codes"] = kept.t().contiguous().t()  # the same in another order
    opt.load_state_dict(saved)
    assert bits(opt.state_dict()["state"][0]["exp_avg_codes"]) == bits(kept)


# -- files ------------------------------------------------------------------------------------------------------


def torn(drawn: random.Random, whole: bytes) -> bytes:
    """The bytes of a file after some accident."""
    made = bytearray(whole)
    a, b = sorted(drawn.randrange(len(whole) + 1) for _ in range(2))
    b = min(b, a + drawn.choice((1, 16, 4096)))
    kind = drawn.choice(("flip", "flip", "cut", "lost", "zeros", "twice", "more", "swapped"))
    if kind == "flip":
        for _ in range(drawn.choice((1, 1, 8))):
            made[drawn.randrange(len(made))] ^= 1 << drawn.randrange(8)
    elif kind == "cut":
        del made[a:]
    elif kind == "lost":
        del made[a:b]
    elif kind == "zeros":
        made[a:b] = bytes(b - a)
    elif kind == "twice":
        made[b:b] = made[a:b]
    elif kind == "more":
        made += drawn.randbytes(drawn.choice((1, 100)))
    else:
        made[a:b] = made[a:b][::-1]
    return bytes(made)


def test_files(tmp_path: Path) -> None:
    """Of save_checkpoint: no accident goes unseen, neither when it is loaded nor when it is converted."""
    source = ready(AdamW, "int8_split24", 2)
    model, opt = ready(AdamW, "int8_split24", 1, seed=5)
    path, target = tmp_path / "run.pt", tmp_path / "other.pt"
    save_checkpoint(path, source[1], source[0])
    whole, before = path.read_bytes(), everything(opt, model)

    @given(SEEDS)
    def check(seed: int) -> None:
        broken = torn(random.Random(seed), whole)
        if broken == whole:
            return
        path.write_bytes(broken)
        with pytest.raises(CheckpointError):
            load_checkpoint(path, opt, model)
        assert everything(opt, model) == before
        with pytest.raises(UserError):
            checkpoints.convert(str(path), str(target), to="fp32")
        assert path.read_bytes() == broken
        assert not target.exists()
        assert checkpoints.verify(str(path)).findings

    check()


@pytest.mark.filterwarnings("ignore:.*no state for", "ignore:.*otherwise than the")
def test_files_with_a_true_checksum(tmp_path: Path) -> None:
    """Their content was wrong when they were written: loaded as it stands, or refused."""
    source, other = ready(AdamW, "int8_split24", 2), ready(CAME, "bf16", 1)
    model, opt = ready(AdamW, "int8_split24", 1, seed=5)
    path = tmp_path / "run.pt"
    save_checkpoint(path, *reversed(source), {"step": 2})
    content = copy.deepcopy(files.read(path))
    save_checkpoint(path, *reversed(other))
    foreign = copy.deepcopy(files.read(path))
    fresh, before = (model, opt), everything(opt, model)
    written: list[int] = []

    @given(SEEDS)
    def check(seed: int) -> None:
        drawn = random.Random(seed)
        broken = copy.deepcopy(content)
        damage(drawn, broken, foreign)
        model, opt = copy.deepcopy(fresh)
        if not writable(lambda: container.write(path, broken)):
            return
        written.append(seed)
        if refused(lambda: load_checkpoint(path, opt, model), model, opt, before):
            return
        for name, value in model.state_dict().items():
            assert torch.equal(value, broken["model"][name].to(value.dtype))
        as_it_stands(opt, broken["optimizer"])

    check()
    assert len(written) > 10  # most can be


@pytest.mark.parametrize("package", ["ours", "torch"])
def test_files_without_a_checksum(tmp_path: Path, package: str) -> None:
    """Of torch.save, through `optgen convert`: it writes a checkpoint that can be loaded, or none, and says why."""
    model, opt = ready(AdamW, "int8_split24", 2)
    if package == "torch":
        model = Net()
        opt = torch.optim.AdamW(model.named_parameters())
        train(opt, range(2))
    path, weights, target = tmp_path / "old.pt", tmp_path / "weights.pt", tmp_path / "new.pt"
    torch.save(opt.state_dict(), path)
    torch.save(model.state_dict(), weights)
    whole = path.read_bytes()
    written: list[int] = []

    @given(SEEDS)
    def check(seed: int) -> None:
        drawn = random.Random(seed)
        if drawn.random() < 0.5:
            broken = torn(drawn, whole)
        else:
            content = copy.deepcopy(opt.state_dict())
            damage(drawn, content, content)
            file = io.BytesIO()
            if not writable(lambda: torch.save(content, file)):
                return
            written.append(seed)
            broken = file.getvalue()
        path.write_bytes(broken)
        target.unlink(missing_ok=True)
        try:
            checkpoints.convert(str(path), str(target), to="fp32", spec="adamw", weights=str(weights))
        except UserError:
            assert not target.exists()
        else:
            found = files.read(target)
            fresh = Net() if package == "torch" else cast_model(Net(), torch.bfloat16)
            groups = [list(fresh.parameters())]
            if len(found["optimizer"]["param_groups"]) == 2:
                groups = [[p] for p in fresh.parameters()]
            AdamW([{"params": group} for group in groups], plan="fp32").load_state_dict(found["optimizer"])
        checkpoints.verify(str(path))  # whatever it finds, it says it
        assert path.read_bytes() == broken

    check()
    assert len(written) > 10  # of the half that is damaged within
