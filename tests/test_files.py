"""Checkpoint files: whole or not at all, refused when damaged, and back bit for bit."""

import dataclasses
import functools
import itertools
import os
import pickle
import random
import re
import signal
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from optgen import cast_model, load_checkpoint, save_checkpoint
from optgen.optim import AdamW, Lion
from optgen.runtime import files
from optgen.runtime.checkpoint import checkpoint, container
from optgen.runtime.files import CheckpointError
from optgen.runtime.layout import plans
from optgen.runtime.reference import tile
from tests.training import everything, train


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(52, 79)
        self.norm = nn.BatchNorm1d(79)
        self.head = nn.Linear(79, 52)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))


def ready(seed: int = 0, steps: int = 2, plan: str = "int8_split24", cls: Any = AdamW) -> tuple[Net, Any]:
    model = cast_model(Net(seed), torch.bfloat16)
    opt = cls(model.named_parameters(), lr=0.01, plan=plan, seed=seed)
    train(opt, range(steps))
    return model, opt


@pytest.mark.parametrize(("name", "steps"), [("run.pt", 0), ("run.safetensors", 2), ("run", 2)])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, name: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was saved before its first step: the low bits of its cast are in the file. safetensors is not
    needed.
    """
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    extra = {"step": 7, "rng": torch.get_rng_state(), "list": [1.5, None, True, ("a", float("inf"))], 3: {}}
    model, opt = ready(steps=steps)
    save_checkpoint(tmp_path / name, opt, model, extra)
    other, again = ready(seed=1, steps=1)
    if steps == 0:
        again.state.clear()
    back = load_checkpoint(str(tmp_path / name), again, other)
    assert torch.equal(back.pop("rng"), extra.pop("rng"))
    assert back == extra
    train(opt, range(2, 5))
    train(again, range(2, 5))
    assert everything(again, other) == everything(opt, model)
    assert other.head.weight is other.embed.weight
    assert [f.name for f in tmp_path.iterdir()] == [name]


def test_five_bytes_per_parameter(tmp_path: Path) -> None:
    """Weights, low halves, two moments and their scales: 5.0625 bytes, and less than 16 KiB around them."""
    model = nn.Linear(1024, 1024, bias=False).bfloat16()
    opt = AdamW(model.parameters(), plan="int8_split24")
    train(opt, range(1))
    save_checkpoint(tmp_path / "run.pt", opt, model)
    size = (tmp_path / "run.pt").stat().st_size
    assert opt.memory().total == 5.0625 * 2**20
    assert 5.0625 * 2**20 < size < 5.0625 * 2**20 + 16 * 2**10


def test_the_file_is_one_that_safetensors_reads(tmp_path: Path) -> None:
    model, opt = ready()
    save_checkpoint(tmp_path / "run.pt", opt, model)
    with safetensors.safe_open(tmp_path / "run.pt", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    assert torch.equal(found["model.embed.weight"], model.embed.weight)
    assert torch.equal(found["optimizer.state.0.exp_avg_codes"], opt.state[model.embed.weight]["exp_avg_codes"])
    assert files.read(tmp_path / "run.pt")["about"]["parameters"][0] == {
        "key": "embed.weight", "shape": [52, 79], "dtype": "bfloat16",
    }  # fmt: skip


def damaged(path: Path, count: int) -> Iterator[None]:
    """Write a file again and again, each time with one bit flipped: in all of it, in its headers, and in each of its
    last 200 bytes; then cut short."""
    whole, drawn = path.read_bytes(), random.Random(0)
    for place in [*drawn.choices(range(len(whole)), k=count), *range(0, 2000, 9), *range(len(whole) - 200, len(whole))]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << drawn.randrange(8)]) + whole[place + 1 :])
        yield
    for length in (0, 8, 300, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        yield


# -- damage --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_flipped_bit_and_a_file_that_was_cut_short_are_found(tmp_path: Path, count: int) -> None:
    model, opt = ready()
    path = tmp_path / "run.pt"
    save_checkpoint(path, opt, model)
    before = everything(opt, model)
    for _ in damaged(path, count):
        with pytest.raises(CheckpointError):
            load_checkpoint(path, opt, model)
    assert everything(opt, model) == before


class Sub(torch.Tensor):
    pass


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


def saved_elsewhere(value: object) -> Callable[[Path], object]:
    return lambda path: torch.save(value, path)


def written(value: Any) -> Callable[[Path], None]:
    return lambda path: container.write(path, value)


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.touch(), "does not begin like a file of torch.save"),
    "text": (lambda p: p.write_text("PK? no"), "does not begin like a file of torch.save"),
    "pickle": (lambda p: p.write_bytes(pickle.dumps({"a": 1})), "does not begin like a file of torch.save"),
    "torch.save": (saved_elsewhere({"state": {}}), "opt.load_state_dict(torch.load('x.pt')[\"optimizer\"])"),
    "safetensors": (lambda p: safetensors.torch.save_file({"a": torch.ones(3)}, p), "is no optgen checkpoint"),
    "half a zip": (lambda p: p.write_bytes(b"PK\x03\x04" + bytes(500)), "is a file of torch.save"),
    "code": (saved_elsewhere({"optgen_checkpoint": 1, "x": Evil()}), "is a file of torch.save"),
    "content without a sum": (
        lambda p: p.write_bytes(bare_file('{"__metadata__":{"format":"pt","optgen":"{}"}}')),
        "is no optgen checkpoint: it does not begin with the checksum of one",
    ),
    "content of another kind": (written([1]), "holds a list, not a dict"),
    "other content": (written({"state": {}}), "is no optgen checkpoint"),
    "newer": (written({"optgen_checkpoint": 2}), "expected a file of version 1, got 2"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_files_are_refused(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, text = FOREIGN[case]
    make(tmp_path / "x.pt")
    model, opt = ready()
    before = everything(opt, model)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint("x.pt", opt, model)
    assert text in str(caught.value) and isinstance(caught.value, ValueError)
    assert everything(opt, model) == before
    assert not Path("evil").exists()


def bare_file(header: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + data


TENSOR = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    "header",
    [
        "{", "[]", '{"__metadata__":1}', '{"__metadata__":{"a":1}}', '{"x":1}', '{"x":{}}', "[" * 10**5,
        *(f'{{"x":{TENSOR.replace(*change)}}}' for change in (
            ("F32", "F33"), ("F32", "F64"), ("[2]", "[3]"), ("[2]", "[-1]"), ("[2]", "[-1,-2]"), ("[2]", "[2.0]"),
            ("[2]", "2"), ("[0,", "[1,"), (",8]", ",9]"), (",8]", "]"), (",8]", ',"8"]'), ("[0,8]", "[8,0]"),
            ('[2],"data_offsets":[0,8]', '[-1],"data_offsets":[0,-4]'),
        )),
        f'{{"x":{TENSOR},"y":{TENSOR}}}',
    ],
)  # fmt: skip
def test_safetensors_of_a_header_that_is_none(tmp_path: Path, header: str) -> None:
    """No tensor is made of memory that is not its own."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(bare_file(f'{{"x":{TENSOR}}}', bytes(8)))
    assert container.tensors_of(path)["x"].tolist() == [0, 0]
    path.write_bytes(bare_file(header, bytes(8)))
    with pytest.raises(CheckpointError, match=r"cannot be loaded|does not begin"):
        container.tensors_of(path)


# -- what does not fit -----------------------------------------------------------------------------------------
def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    model, opt = ready()
    path = tmp_path / "run.pt"
    save_checkpoint(path, opt, model)
    other, lion = ready(seed=1, cls=Lion)
    wide = Net(1)
    twelve = nn.Module()
    twelve.a = nn.Parameter(torch.ones(3))
    bare, bare_opt = ready(seed=1)
    bare_path = tmp_path / "bare.pt"
    save_checkpoint(bare_path, bare_opt)
    master, master_opt = ready(seed=1, plan="fp32_master")
    for at, m, o, text in (
        (path, other, lion, "expected a checkpoint of Lion, got one of AdamW"),
        (path, wide, opt, "model: embed.weight: expected float32 [52, 79], got bfloat16 [52, 79]"),
        (path, twelve, opt, "model: embed.weight: not expected"),
        (bare_path, model, opt, "it has no model: it was saved without one"),
        (path, master, AdamW([master.head.bias]), "group 0: expected 1 parameters, got 4"),
    ):
        before = everything(o, m)
        with pytest.raises(ValueError, match="nothing was loaded") as caught:
            load_checkpoint(at, o, m)
        assert text in str(caught.value)
        assert everything(o, m) == before
    load_checkpoint(path, master_opt, master)  # the plan comes with the checkpoint, as all options do
    train(master_opt, range(2, 3))
    train(opt, range(2, 3))
    assert everything(master_opt, master) == everything(opt, model)
    load_checkpoint(path, bare_opt)  # the optimizer alone
    assert not torch.equal(bare.embed.weight, model.embed.weight)


def test_a_plan_of_the_same_name_that_reads_codes_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same fields, another curve: nothing but the numbers shows it."""
    model, opt = ready()
    path = tmp_path / "run.pt"
    save_checkpoint(path, opt, model)
    variant, plan = next(
        (v, plan)
        for _, plan, v in (checkpoint.select(AdamW, opt.param_groups[0], p) for p in opt.param_groups[0]["params"])
        if v.function.endswith("bfloat16")
    )
    codecs = tile.load(f"optgen._ready.plans.{plan.name}.strict")
    present = getattr(codecs, variant.eager.codecs["exp_avg_sq"])
    decode = functools.partial(lambda f, c, *rest: f(1.01 * c, *rest), present.decode)
    monkeypatch.setattr(codecs, variant.eager.codecs["exp_avg_sq"], dataclasses.replace(present, decode=decode))
    plans.storage.cache_clear()
    before = everything(opt, model)
    with pytest.raises(ValueError, match=r"reads exp_avg_sq as other numbers .* not the plan that"):
        load_checkpoint(path, opt, model)
    assert everything(opt, model) == before
    plans.storage.cache_clear()  # it holds the other curve


@pytest.mark.parametrize("named", [False, True])
def test_states_go_to_the_weights_that_they_were_of(tmp_path: Path, named: bool) -> None:
    """Shapes alone do not say whether an optimizer has its parameters in the order of the checkpoint: names do, and
    where there are none, the keys that they have in the model.
    """

    def made(seed: int, order: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).bfloat16()
        given = list(model.named_parameters() if named else model.parameters())[::order]
        return model, AdamW(given, plan="fp32_master")

    model, opt = made(0, 1)
    train(opt, range(2))
    save_checkpoint(tmp_path / "run.pt", opt, model)
    other, turned = made(1, -1)
    if named:
        load_checkpoint(tmp_path / "run.pt", turned, other)
        assert [w.tolist() for w in turned.full_weights()][::-1] == [w.tolist() for w in opt.full_weights()]
    else:
        before = everything(turned, other)
        with pytest.raises(ValueError, match="nothing was loaded") as caught:
            load_checkpoint(tmp_path / "run.pt", turned, other)
        assert "0: expected the state of 1.weight, got that of 0.weight" in str(caught.value)
        assert everything(turned, other) == before
    same, again = made(1, 1)
    load_checkpoint(tmp_path / "run.pt", again, same)
    assert everything(again, same) == everything(opt, model)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"rng": [np.zeros(3)]}, "extra['rng'][0]: expected tensors, numbers, strings"),
        (np.float64(1), "extra: expected tensors, numbers, strings"),
        ({"path": Path("x")}, "got pathlib"),
        ([Evil()], "extra[0]:"),
        ({"t": torch.ones(3, dtype=torch.bool).as_subclass(Sub)}, "extra['t']: expected a plain tensor, got Sub"),
        ({"x": torch.eye(2).to_sparse()}, "got one of layout torch.sparse_coo"),
        ({"x": torch.ones(2) * 1j}, "expected a tensor of a dtype of safetensors, got one of torch.complex64"),
        ({"x": torch.empty(2, device="meta")}, "got one on the meta device"),
        ({"v": defaultdict(int, x=1)}, "extra['v']: expected "),  # would come back as another mapping
        ({"v": MappingProxyType({"x": 1})}, "extra['v']: expected "),
        *(({key: 1}, "extra: expected keys ") for key in (Path("x"), np.int64(1), (1, (2, 3)), torch.float32, b"x")),
    ],
)
def test_what_would_need_code_to_load_is_not_saved(tmp_path: Path, extra: object, text: str) -> None:
    model, opt = ready(steps=1)
    with pytest.raises(TypeError) as caught:
        save_checkpoint(tmp_path / "run.pt", opt, model, extra)
    assert text in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# -- whole or not at all ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["write", "fsync", "replace"])
def test_an_error_while_writing_leaves_the_old_file(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, opt = ready()
    path = tmp_path / "run.pt"
    save_checkpoint(path, opt, model, "old")
    old = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(container, "_bytes", full) if place == "write" else patch.setattr(os, place, full)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(path, opt, model, "new")
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
    save_checkpoint(path, opt, model, "new")
    assert load_checkpoint(path, opt, model) == "new"


@pytest.mark.filterwarnings("ignore:.*use of fork")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes that begin where this one is")
@pytest.mark.parametrize("place", ["half written", "written", "synced", "renamed"])
def test_who_is_killed_while_writing_leaves_the_old_file_or_the_new_one(tmp_path: Path, place: str) -> None:
    model, opt = ready(steps=1)
    path = tmp_path / "run.pt"
    save_checkpoint(path, opt, model, "old")
    child = os.fork()
    if child == 0:
        synced = itertools.count()

        def kill(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def sync(_: int) -> None:
            if next(synced) == (place == "renamed"):  # the file is synced, and then the folder
                kill()

        try:
            if place == "half written":
                container._bytes = kill
            elif place == "synced":
                os.replace = kill  # type: ignore[assignment]
            else:
                os.fsync = sync  # type: ignore[assignment]
            save_checkpoint(path, opt, model, "new")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert load_checkpoint(path, opt, model) == ("new" if place == "renamed" else "old")
    left = [f.name for f in tmp_path.iterdir() if f != path]
    assert [bool(re.fullmatch(r"\.run\.pt\..*\.tmp", name)) for name in left] == [True] * (place != "renamed")


def test_an_error_while_writing_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    """And not the one that takes its place, whose name nobody knows."""
    _, opt = ready()
    (tmp_path / "folder.pt").mkdir()
    for path, kind in ((tmp_path / "none/run.pt", FileNotFoundError), (tmp_path / "folder.pt", IsADirectoryError)):
        with pytest.raises(kind) as caught:
            save_checkpoint(path, opt)
        assert (caught.value.filename, caught.value.filename2) == (str(path), None)
        missing = f"there is no folder '{tmp_path / 'none'}'; make it first"
        assert (caught.value.strerror == missing) == (kind is FileNotFoundError)
    assert [f.name for f in tmp_path.iterdir()] == ["folder.pt"]


def test_keys_and_mappings_come_back_as_they_were(tmp_path: Path) -> None:
    """Also where places of tensors read alike.  MultiStepLR counts its milestones in a Counter."""
    model, opt = ready()
    extra = {
        "a": {"b": torch.tensor(1), 1: torch.tensor(2), "1": torch.tensor(3)}, "a.b": torch.tensor(4),
        "a.b#2": torch.tensor(5), (1, "x"): (1, 2), None: True, 2.5: [float("inf")],
        "negated": torch.tensor(1j).conj().imag,
        "order": OrderedDict([("z", torch.tensor(1)), ("a", [Counter([2, 2])])]),
    }  # fmt: skip
    save_checkpoint(tmp_path / "run.pt", opt, model, extra)
    found = load_checkpoint(tmp_path / "run.pt", opt, model)
    assert found == extra
    assert [type(found["order"]), type(found["order"]["a"][0]), type(found["a"])] == [OrderedDict, Counter, dict]
