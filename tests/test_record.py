"""Recorded steps: made again bit for bit on every backend; a bit that differs is found."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optgen
from optgen.driver import cli
from optgen.driver import replay as replaying
from optgen.optim import AdamW, Muon, Prodigy
from optgen.runtime.checkpoint import container
from optgen.runtime.modes import record
from tests.harness import unoptimized

SHAPES = {"matrix": (96, 72), "conv": (8, 5, 3, 3), "scalar": (), "twin": (96, 72)}


@pytest.fixture(autouse=True, scope="module")
def quickly_compiled() -> Iterator[None]:
    with unoptimized():
        yield


@pytest.fixture(scope="module")
def strict() -> Any:
    return optgen.compile("adamw", plan="int8_split24", maths="strict")


def recorded(path: Path, cls: Any, steps: int = 3, params: Any = None, names: bool = True, **options: Any) -> Any:
    """Train, and record the last step."""
    torch.manual_seed(1)
    shapes = {k: s for k, s in SHAPES.items() if s or cls is not Muon}
    model = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    model["conv"].data = model["conv"].data.to(memory_format=torch.channels_last)
    holder = optgen.cast_model(nn.ParameterDict(model), torch.bfloat16)
    model = {name: holder[name] for name in shapes}
    given = {"lr": 1e-2, "plan": "int8_split24", "backend": "cpp", **options}
    opt = cls(model.items() if names else model.values(), **given)
    for k in range(steps):
        for p in model.values():
            p.grad_dtype = None
            p.grad = torch.randn(p.shape, dtype=torch.float32 if p.ndim == 4 else p.dtype)
        if opt.defaults.get("fused"):
            opt.grad_scale, opt.found_inf = torch.tensor([4.0]), torch.tensor([0.0])
        if k == steps - 1:
            opt.record(path, params)
        opt.step()
    return opt


@pytest.mark.parametrize("options", [{}, {"steps": 1}, {"names": False, "params": [1, 3]},
    {"fused": True, "maximize": True, "seed": 3, "lr": torch.tensor(1e-2), "overrides": {"twin": "fp32"}}])  # fmt: skip
def test_strict_steps_have_the_bits_of_every_backend(tmp_path: Path, strict: Any, options: dict[str, Any]) -> None:
    """Also a first step, which takes low bits of the cast; positions, of which random bits are; scaled gradients."""
    opt = recorded(tmp_path / "step.pt", strict, **options)
    content = record.read(tmp_path / "step.pt")
    assert len(content["parameters"]) == (2 if "params" in options else 4)
    assert (content["scale"] == 4.0) == ("fused" in options)
    for backend in ("cpp", "reference", "triton"):
        rows = record.replay(content, strict, backend)
        assert [row["differences"] for row in rows] == [[]] * len(rows), backend
        assert all(row["values"] >= 4 for row in rows)
    for one, after in zip(content["parameters"], content["after"], strict=True):
        p = next(e.p for e in opt._entries() if e.name == one["name"])
        assert torch.equal(after["weight"], p.detach()) and not torch.equal(one["weight"], p.detach())
        assert all(torch.equal(after["state"][k], x) for k, x in opt.state[p].items() if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("cls", [AdamW, Muon, Prodigy])
def test_the_command_makes_a_step_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], cls: Any) -> None:
    """Fast maths: the backend of the record has its bits."""
    path = str(tmp_path / "step.pt")
    recorded(Path(path), cls)
    assert cli.main(["replay", path, "-q"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [f"step 3 of {cls.__name__}, recorded by cpp, made again by cpp: all bits of {4 - (cls is Muon)} "
                    f"parameters are as recorded"]  # fmt: skip


def test_a_bit_that_differs_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "step.pt"
    recorded(path, AdamW)
    content = record.read(path)
    codes = content["after"][0]["state"]["exp_avg_codes"].view(-1)
    was = int(codes[5 * 72 + 3])
    codes[5 * 72 + 3] ^= 1
    content["after"][2]["state"]["exp_avg_sq"].view(torch.int32).bitwise_xor_(1)
    content["after"][3]["state"]["step"] = 7
    container.write(path, content)
    assert cli.main(["replay", str(path), "--json"]) == 1
    rows = {row["name"]: row["differences"] for row in json.loads(capsys.readouterr().out)["parameters"]}
    place = [5, 3] if content["after"][0]["state"]["exp_avg_codes"].ndim == 2 else [5 * 72 + 3]
    one = {"differing": 1, "elements": 96 * 72, "place": place, "recorded": was ^ 1, "made": was}
    assert rows["matrix"] == [{"value": "exp_avg_codes", **one}]
    assert [x["value"] for x in rows["scalar"]] == ["exp_avg_sq"] and rows["conv"] == []
    assert [(x["value"], x["recorded"], x["made"]) for x in rows["twin"]] == [("step", 7.0, 3.0)]
    assert cli.main(["replay", str(path)]) == 1
    out, err = capsys.readouterr()
    assert f"exp_avg_codes: 1 of 6912 differ, first {place}: {was ^ 1} recorded, {was} made" in out
    assert "3 of 4 parameters differ" in err


def test_damaged_records_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = tmp_path / "step.pt", nn.Linear(4, 4)
    recorded(path, AdamW, params="matrix")
    whole, content = path.read_bytes(), record.read(path)

    def refused(text: str) -> None:
        assert cli.main(["replay", str(path)]) == 2
        assert f"error[E420]: {path} cannot be replayed: {text}" in capsys.readouterr().err

    for damaged in (whole[:-1], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]):
        path.write_bytes(damaged)
        refused("it is damaged: its checksum is")
    optgen.save_checkpoint(path, AdamW(model.parameters()), model)
    refused("it is a checkpoint, for `optgen verify-checkpoint`, and holds no recorded step")
    container.write(path, content)
    assert cli.main(["verify-checkpoint", str(path)]) == 1
    assert "is a step of opt.record(), for `optgen replay`, and no optgen checkpoint" in capsys.readouterr().err
    groups = [{**content["groups"][0], "plan": "fp32"}]
    for changed, text in (
        ({"format": 4}, "it is a record of version 1"), ({"groups": 3}, "'int' object"),
        ({"after": []}, "it does not hold the same parameters"),
        ({"groups": groups}, "the optimizer state of parameter 'matrix'"),
    ):  # fmt: skip
        container.write(path, {**content, **changed})
        refused(text)


def test_what_is_recorded_and_what_is_refused(tmp_path: Path) -> None:
    path, p = tmp_path / "step.pt", nn.Parameter(torch.ones(3, 4))
    opt = AdamW([("a", p), ("b", nn.Parameter(torch.ones(5)))], backend="reference", fused=True)
    with pytest.raises(ValueError, match=r"no trainable parameter is called 'c'.  The first are a, b"):
        opt.record(path, ["a", "c"])
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        opt.record(tmp_path / "none" / "step.pt")
    opt.param_groups[0]["capturable"] = True
    with pytest.raises(ValueError, match="has capturable=True"):
        opt.record(path)
    opt.param_groups[0]["capturable"] = False
    with opt.release_gradients(), pytest.raises(RuntimeError, match="gradients are released"):
        opt.record(path)
    prodigy = Prodigy([("a", p), ("b", nn.Parameter(torch.ones(5)))])
    with pytest.raises(ValueError, match=r"sums over the whole model, so the step of parameter 'a' "):
        prodigy.record(path, "a")
    with pytest.raises(ValueError, match="params is empty"):
        opt.record(path, [])
    with pytest.raises(IsADirectoryError, match="is a folder: name a file in it"):
        opt.record(tmp_path)
    with pytest.raises(NotImplementedError, match=r"\.parts\[\.\.\.\]\.record"):
        optgen.make({".*": "adamw"}, nn.Linear(2, 2)).record(path)
    opt.record(tmp_path / "other.pt")
    with pytest.warns(UserWarning, match="no step was recorded in .*other.pt: "):
        opt.record(path, "a")
    with pytest.raises(RuntimeError, match="waits for a step"):
        opt.release_gradients()
    opt.step()  # no gradient
    p.grad = torch.ones(3, 4)
    opt.grad_scale, opt.found_inf = torch.tensor([4.0]), torch.tensor([1.0])
    opt.step()  # skipped
    assert not path.exists() and not opt.state
    del opt.grad_scale, opt.found_inf
    opt.step()
    content = record.read(path)
    assert [x["name"] for x in content["parameters"]] == ["a"] and not content["about"]["batched"]
    assert replaying.replay(str(path), None, None, None)["step"] == 1
    path.unlink()
    opt.step()
    assert not path.exists()
    opt.record(path)
    path.mkdir()
    watch, before = opt.watch(1, to=lambda step, numbers: None), p.detach().clone()
    with pytest.warns(UserWarning, match="the step was made, and its record was not written"):
        opt.step()
    assert watch.step == 3 and not torch.equal(p, before)
