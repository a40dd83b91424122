"""Checkpoints of other plans and other packages: read, converted, and gone on with."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from optgen import cast_model, load_checkpoint, save_checkpoint
from optgen.base.errors import UserError
from optgen.driver import cli
from optgen.driver.checkpoints import convert, verify
from optgen.optim import AdamW
from tests.harness import python
from tests.training import bits, states, train

SHAPES = {"w": (70, 64), "b": (7,)}


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.w = nn.Parameter(torch.randn(SHAPES["w"]))
        self.b = nn.Parameter(torch.randn(SHAPES["b"]))
        self.register_buffer("count", torch.tensor(3))


# -- from plan to plan -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("first", "second", "dtype"),
    [
        ("fp32_master", "int8_split24", torch.bfloat16),
        ("int8_split24", "fp32_master", torch.bfloat16),
        ("split32", "flashoptim", torch.bfloat16),
        ("fp32", "int8", torch.float32),
        ("int8", "split32", torch.float32),
        ("int8_split24", "int8_split24", torch.float16),
        ("int8_split24", "int4_split24", torch.bfloat16),
    ],
)
def test_from_plan_to_plan(tmp_path: Path, first: str, second: str, dtype: torch.dtype) -> None:
    """The same states as by way of torch's form in memory, the same full weights, the same options."""
    model = cast_model(Net(), dtype)
    opt = AdamW(model.named_parameters(), lr=0.03, betas=(0.8, 0.9), plan=first, seed=11)
    train(opt, range(3))
    a, b = str(tmp_path / "a.pt"), str(tmp_path / "b.safetensors")
    save_checkpoint(a, opt, model, {"step": 3})
    convert(a, b, to=second)

    want_model = cast_model(Net(1), dtype)
    want = AdamW(want_model.named_parameters(), plan=second)
    want.load_master_state_dict(want_model, opt.master_state_dict(model))
    want.load_state_dict(opt.dense_state_dict())

    got_model = cast_model(Net(2), dtype)
    got = AdamW(got_model.named_parameters(), plan=first)
    assert load_checkpoint(b, got, got_model) == {"step": 3}
    group = got.param_groups[0]
    assert (group["plan"], group["lr"], group["betas"], group["seed"]) == (second, 0.03, (0.8, 0.9), 11)
    assert states(got) == states(want)
    assert bits(got_model.state_dict()) == bits(want_model.state_dict())
    train(got, range(3, 4))
    assert verify(b)["findings"] == []


@pytest.mark.parametrize("to", ["fp32_master", "torch"])
def test_low_bits_that_no_step_has_taken(tmp_path: Path, to: str) -> None:
    full = Net().state_dict()
    model = cast_model(Net(), torch.bfloat16)
    a, b = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    save_checkpoint(a, AdamW(model.named_parameters(), plan="int8_split24"), model)
    convert(a, b, to=to)
    if to == "torch":
        found = torch.load(b, weights_only=True)["model"]
    else:
        other = Net(1).bfloat16()
        again = AdamW(other.named_parameters(), plan=to)
        load_checkpoint(b, again, other)
        found = again.master_state_dict(other)
    assert all(torch.equal(found[name], full[name]) for name in SHAPES)


def test_groups_and_a_file_without_a_model(tmp_path: Path) -> None:
    """Each group's options go over, its own plan is replaced; weights come from another file, under their names."""
    model = cast_model(Net(), torch.bfloat16)
    named = list(model.named_parameters())
    groups = [{"params": named[:1], "lr": 0.3}, {"params": named[1:], "plan": "split32", "seed": 4, "amsgrad": True}]
    opt = AdamW(groups, plan="int8_split24")
    train(opt, range(2))
    a, b, w = (str(tmp_path / f"{x}.pt") for x in "abw")
    save_checkpoint(a, opt)
    torch.save(model.state_dict(), w)
    with pytest.raises(UserError, match="it has no model's weights"):
        convert(a, b, to="fp32_master")
    torch.save({k: v.float() for k, v in model.state_dict().items()}, tmp_path / "wide.pt")
    with pytest.raises(UserError, match=r"float32 \[70, 64\]\), plan int8_split24: weight_low: not expected"):
        convert(a, b, to="fp32_master", weights=str(tmp_path / "wide.pt"))
    convert(a, b, to="fp32_master", weights=w)
    other = Net(1).bfloat16()
    others = list(other.named_parameters())
    again = AdamW([{"params": others[:1]}, {"params": others[1:]}])
    load_checkpoint(b, again, other)
    assert [(g["lr"], g["seed"], g["amsgrad"], g["plan"]) for g in again.param_groups] == [
        (0.3, 0, False, "fp32_master"), (1e-3, 4, True, "fp32_master"),
    ]  # fmt: skip
    assert bits(again.full_weights()) == bits(opt.full_weights())
    assert bits(again.dense_state_dict()["state"]) == bits(opt.dense_state_dict()["state"])
    torch.save(opt.state_dict(), a)  # bare, as torch.save users write it
    convert(a, b, to="torch", spec="adamw", weights=w)
    assert bits(torch.load(b, weights_only=True)["state"]) == bits(opt.dense_state_dict()["state"])


# -- torch.optim -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("named", [False, True])
def test_from_torch_and_back(tmp_path: Path, named: bool) -> None:
    theirs = Net()
    oracle = torch.optim.AdamW(theirs.named_parameters() if named else theirs.parameters(), lr=0.02, foreach=False)
    train(oracle, range(3))
    torch.save({"optimizer": oracle.state_dict(), "model": theirs.state_dict(), "epoch": 1}, tmp_path / "t.pt")
    convert(str(tmp_path / "t.pt"), str(tmp_path / "o.pt"), to="fp32", spec="adamw")
    ours = copy.deepcopy(theirs)
    opt = AdamW(ours.named_parameters() if named else ours.parameters())
    load_checkpoint(tmp_path / "o.pt", opt)
    assert bits(opt.dense_state_dict()["state"]) == bits(dict(oracle.state_dict()["state"]))
    train(opt, range(3, 5))
    save_checkpoint(tmp_path / "o.pt", opt, ours)
    convert(str(tmp_path / "o.pt"), str(tmp_path / "t.pt"), to="torch")
    saved = torch.load(tmp_path / "t.pt", weights_only=True)
    back = torch.optim.AdamW(theirs.named_parameters() if named else theirs.parameters(), foreach=False)
    back.load_state_dict(saved)
    assert bits(back.state_dict()["state"]) == bits(opt.dense_state_dict()["state"])
    assert back.param_groups[0]["lr"] == 0.02
    assert bits(saved["model"]) == bits(ours.state_dict())


def test_from_fp32_torch_to_a_16_bit_model(tmp_path: Path) -> None:
    """The weights lose nothing that the plan can hold: half a code of its last bit, 2^7 fp32 patterns.

    They come from another file, or stand beside the optimizer, as training scripts save them.
    """
    theirs = Net()
    oracle = torch.optim.AdamW(theirs.parameters(), lr=0.02, foreach=False)
    train(oracle, range(3))
    torch.save(oracle.state_dict(), tmp_path / "t.pt")
    torch.save({"model": theirs.state_dict()}, tmp_path / "w.pt")
    arguments: dict[str, Any] = {"to": "int8_split24", "spec": "adamw", "param": "bfloat16"}
    with pytest.raises(UserError, match="it has no model's weights"):
        convert(str(tmp_path / "t.pt"), str(tmp_path / "o.pt"), **arguments)
    assert not (tmp_path / "o.pt").exists()
    torch.save({**theirs.state_dict(), "more": torch.ones(2)}, tmp_path / "v.pt")
    with pytest.raises(UserError, match="are not the weights' 3 tensors in order"):
        convert(str(tmp_path / "t.pt"), str(tmp_path / "o.pt"), **arguments, weights=str(tmp_path / "v.pt"))
    convert(str(tmp_path / "t.pt"), str(tmp_path / "o.pt"), **arguments, weights=str(tmp_path / "w.pt"))
    model = Net(1).bfloat16()
    opt = AdamW(model.named_parameters(), plan="int8_split24")
    load_checkpoint(tmp_path / "o.pt", opt, model)
    for exact, got in zip(theirs.parameters(), opt.full_weights(), strict=True):
        assert ((got.view(torch.int32).long() - exact.detach().view(torch.int32).long()).abs() <= 2**7).all()
    want = AdamW([nn.Parameter(p.detach().bfloat16()) for p in theirs.parameters()], plan="int8_split24")
    want.load_state_dict(oracle.state_dict())
    assert bits(opt.dense_state_dict()["state"]) == bits(want.dense_state_dict()["state"])
    for key in ("state_dict", "model_state_dict"):
        torch.save({"epoch": 3, key: theirs.state_dict(), "optimizer": oracle.state_dict()}, tmp_path / "t.pt")
        convert(str(tmp_path / "t.pt"), str(tmp_path / "o.pt"), **arguments)
        load_checkpoint(tmp_path / "o.pt", again := AdamW(model.named_parameters(), plan="int8_split24"), model)
        assert bits(again.full_weights()) == bits(opt.full_weights())


# -- other packages --------------------------------------------------------------------------------------------
def of_bitsandbytes() -> tuple[Any, Callable[[Any, Any], Tensor]]:
    """An optimizer after two steps, and (entry, state) -> what the package itself reads of it."""
    import bitsandbytes as bnb

    def read(entry: Any, name: str) -> Tensor:
        i = ("exp_avg", "exp_avg_sq").index(name) + 1
        codes = entry[f"state{i}"]
        if codes.dtype != torch.uint8:
            return codes
        quantized = bnb.functional.QuantState(absmax=entry[f"absmax{i}"], code=entry[f"qmap{i}"], blocksize=256)
        quantized.dtype = torch.float32
        return bnb.functional.dequantize_blockwise(codes, quantized)

    return bnb.optim.AdamW8bit(Net().parameters(), lr=0.02), read


def of_torchao() -> tuple[Any, Callable[[Any, Any], Tensor]]:
    """torchao's codes, decoded from its own tables in numpy."""
    from torchao.optim import AdamW8bit

    def read(entry: Any, name: str) -> Tensor:
        t = entry[name]
        if type(t) is Tensor:
            return t
        table, codes, scale = (np.asarray(x) for x in (t.qmap, t.codes, t.scale))
        return torch.from_numpy((table[codes].reshape(-1, t.block_size) * scale[:, None]).reshape(codes.shape))

    return AdamW8bit(Net().parameters(), lr=0.02), read


@pytest.mark.parametrize("package", [of_bitsandbytes, of_torchao])
def test_checkpoints_of_other_packages(tmp_path: Path, package: Callable[[], Any]) -> None:
    """In code and by `optgen convert`: the states are the numbers that the package had."""
    theirs, read = package()
    with torch.compiler.set_stance("force_eager"):  # torchao would compile its step
        train(theirs, range(2))
    saved = theirs.state_dict()
    model = Net()
    torch.save({"optimizer": saved, "model": model.state_dict()}, tmp_path / "x.pt")
    opt = AdamW(model.parameters(), plan="fp32")
    opt.load_state_dict(saved)
    convert(str(tmp_path / "x.pt"), str(tmp_path / "o.pt"), to="fp32", spec="adamw")
    other = AdamW(Net().parameters(), plan="fp32")
    load_checkpoint(tmp_path / "o.pt", other)
    assert states(other) == states(opt)
    assert other.param_groups[0]["lr"] == pytest.approx(0.02)
    for p, q in zip(model.parameters(), theirs.param_groups[0]["params"], strict=True):
        assert opt.state[p]["step"] == 2
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(opt.state[p][name], read(theirs.state[q], name)), name
    coded = AdamW(Net().parameters(), plan="int8")
    coded.load_state_dict(saved)  # and from their codes to ours
    train(coded, range(2, 3))


def test_the_command_imports_torchao_where_a_file_needs_it(tmp_path: Path) -> None:
    """In a process that has not: torch says only behind the first line of its message what the file holds."""
    theirs, _ = of_torchao()
    with torch.compiler.set_stance("force_eager"):
        train(theirs, range(1))
    torch.save({"optimizer": theirs.state_dict(), "model": Net().state_dict()}, tmp_path / "x.pt")
    code = """
        import sys
        from optgen.driver.cli import main
        assert "torchao" not in sys.modules
        sys.argv = "optgen convert x.pt o.pt --plan fp32 --spec adamw".split()
        main()
    """
    python(code, cwd=tmp_path)
    assert (tmp_path / "o.pt").is_file()


def flashoptim_entry(dtype: torch.dtype, bits: int, compressed: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """An entry as flashoptim 0.1.4 saves it for (70, 64) parameters, and in fp64 what it stands for."""
    drawn = np.random.default_rng(0)
    shape, groups = SHAPES["w"], 70 * 2
    m, v = drawn.integers(-127, 128, shape).astype(np.int8), drawn.integers(0, 256, shape).astype(np.uint8)
    scales = drawn.uniform(1e-3, 2, (2, groups)).astype(np.float16)
    by_element = scales.astype(np.float64).repeat(32, axis=1).reshape(2, *shape)
    y = m / 127.0
    weight = torch.from_numpy(drawn.normal(size=shape).astype(np.float32)).to(dtype)
    weight[0, :4] = torch.tensor([0.0, 2.0**-20, -(2.0**-24), 1.0])
    top = 127 if bits == 8 else 32767
    codes = drawn.integers(-top, top + 1, shape).astype(np.int8 if bits == 8 else np.int16)
    wide = weight.double().numpy()
    places, smallest = (7, -126) if dtype == torch.bfloat16 else (10, -14)
    _, exponent = np.frexp(np.abs(wide))
    half_ulp = np.exp2(np.maximum(exponent - 1, smallest) - places - 1.0)
    half_ulp[wide == 0] = np.exp2(smallest - places - 1.0)
    meant = {
        "exp_avg": y / (2 - np.abs(y)) * by_element[0], "exp_avg_sq": (v / 255.0 * by_element[1]) ** 2,
        "p": wide + codes / top * half_ulp,
    }  # fmt: skip
    entry: dict[str, Any] = {"step": torch.tensor(3.0)}
    for name, code, scale in (("exp_avg", m, scales[0]), ("exp_avg_sq", v, scales[1])):
        if compressed:
            kept = torch.from_numpy(scale)
            entry[f"{name}::quantized"] = torch.from_numpy(code)
            entry[f"{name}::scales"] = kept.view(torch.bfloat16) if dtype == torch.bfloat16 else kept
        else:
            entry[name] = torch.from_numpy(meant[name]).to(torch.float32)
    errors = torch.from_numpy(codes)
    entry["error_bits"] = errors.to(dtype) if bits == 8 else errors.view(dtype)
    return entry, {**meant, "weight": weight}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits_", [8, 16])
@pytest.mark.parametrize("compressed", [False, True])
def test_flashoptim(tmp_path: Path, dtype: torch.dtype, bits_: int, compressed: bool) -> None:
    """Its package asks for a GPU; the layout is what it documents, decoded in fp64 here."""
    entry, meant = flashoptim_entry(dtype, bits_, compressed)
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [0], "param_names": ["w"]}
    saved = {"state": {0: entry}, "param_groups": [{**group, "master_bytewidth": 2 + bits_ // 8, "quantize": True}]}
    torch.save(saved, tmp_path / "f.pt")
    torch.save({"w": meant["weight"]}, tmp_path / "w.pt")
    p = nn.Parameter(meant["weight"].clone())
    opt = AdamW([("w", p)], plan="fp32_master")
    opt.load_state_dict(saved)
    for name, got in (*((k, opt.state[p][k]) for k in ("exp_avg", "exp_avg_sq")), ("p", opt.full_weights()[0])):
        want = torch.from_numpy(meant[name])
        # five fp32 roundings at most on the way: quotient, curve (two), scale, square (which doubles what was before)
        assert ((got.double() - want).abs() <= 8 * 2.0**-24 * want.abs() + 2.0**-149).all(), name
    f, w, o = (str(tmp_path / f"{name}.pt") for name in "fwo")
    convert(f, o, to="fp32_master", spec="adamw", weights=w)
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(SHAPES["w"], dtype=dtype))
    again = AdamW(model.named_parameters(), plan="fp32_master")
    load_checkpoint(tmp_path / "o.pt", again, model)
    assert states(again) == states(opt)
    assert again.param_groups[0]["betas"] == (0.9, 0.99)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another rule": ({"state1": torch.zeros(70, 64)}, "got 1 of a bitsandbytes optimizer: it is a checkpoint of"),
    "no table": (
        {"state1": torch.zeros(70, 64, dtype=torch.uint8), "state2": torch.zeros(70, 64)},
        "exp_avg: expected bitsandbytes' state1, qmap1 and absmax1",
    ),
    "runs": (
        {"state2": torch.zeros(70, 64), "state1": torch.zeros(70, 64, dtype=torch.uint8), "qmap1": torch.zeros(256),
         "absmax1": torch.zeros(5)},
        "one magnitude for each 256 or 2048 elements",
    ),
    "half an entry": ({"exp_avg::scales": torch.zeros(140)}, "expected flashoptim's exp_avg::quantized [70, 64]"),
    "scales": (
        {"exp_avg::quantized": torch.zeros(70, 64, dtype=torch.int8), "exp_avg::scales": torch.zeros(3).half()},
        "one scale for each 32 elements, got 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_of_others_is_refused(case: str) -> None:
    entry, text = REFUSED[case]
    model = Net()
    opt = AdamW(model.parameters(), plan="int8")
    train(opt, range(1))
    before = states(opt)
    saved = {"state": {0: {"step": 3, **entry}}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        opt.load_state_dict(saved)
    assert text in str(caught.value)
    assert states(opt) == before


# -- the commands ----------------------------------------------------------------------------------------------
def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = cli.main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["exit"] == code
    return code, found


def test_verify_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net().bfloat16()
    opt = AdamW(model.named_parameters(), plan="int8_split24")
    train(opt, range(2))
    path = str(tmp_path / "a.pt")
    save_checkpoint(path, opt, model)
    code, found = run(capsys, "verify-checkpoint", path)
    assert (code, found["findings"]) == (0, [])
    assert found["parameters"] == 2
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:5000] + bytes([whole[5000] ^ 4]) + whole[5001:])
    code, found = run(capsys, "verify-checkpoint", path)
    assert code == 1
    assert "is damaged: its checksum is" in found["findings"][0]
    Path(path).write_bytes(whole[:-1000])
    assert run(capsys, "verify-checkpoint", path)[0] == 1
    code, found = run(capsys, "verify-checkpoint", str(tmp_path / "none.pt"))
    assert (code, found["error"]["code"]) == (2, "E417")


def test_convert_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = Net()
    oracle = torch.optim.AdamW(theirs.named_parameters())
    train(oracle, range(1))
    torch.save(oracle.state_dict(), tmp_path / "t.pt")
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    t, o, w = (str(tmp_path / f"{name}.pt") for name in "tow")
    code, found = run(capsys, "convert", t, o, "--plan", "int8_split24")
    assert (code, found["error"]["code"]) == (2, "E418")
    arguments = ["convert", t, o, "--plan", "int8_split24", "--spec", "adamw", "--weights", w, "--param", "bfloat16"]
    code, found = run(capsys, *arguments)
    assert (code, found["parameters"], found["elements"]) == (0, 2, 70 * 64 + 7)
    assert verify(o)["findings"] == []
    assert run(capsys, "convert", t, o, "--plan", "int9", "--spec", "adamw")[1]["error"]["code"] == "E404"
    assert run(capsys, "convert", t, o, "--plan", "fp32", "--param", "int8")[1]["error"]["code"] == "E411"
    assert run(capsys, "convert", t, str(tmp_path / "no/o.pt"), *arguments[3:])[1]["error"]["code"] == "E413"
    assert run(capsys, "convert", w, o, "--plan", "fp32", "--spec", "adamw")[1]["error"]["code"] == "E418"
