"""`optgen.diagnose`: seeded faults, shares against what a step really moved, other packages' states, predictions."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import optgen
from optgen.convert import packages, stored
from optgen.driver import cli, diagnose
from optgen.driver.diagnose import CHUNK, Row
from optgen.driver.load import find_spec
from optgen.verify.stall import predict
from tests.harness import imported
from tests.oracles import optional

BF16, STEPS = torch.bfloat16, 30
EXAMPLE = Path(__file__).resolve().parent.parent / "examples/frozen_run.py"


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64)).to(dtype)


def trained(make: Any, dtype: torch.dtype = BF16, scale: float = 1.0, steps: int = STEPS, **options: Any) -> Any:
    """Return an optimizer after some steps, the weights before the last one, and the weights."""
    model = model_of(dtype)
    opt = make(list(model.named_parameters() if make is torch.optim.AdamW else model.parameters()), **options)
    before: list[Tensor] = []
    for _ in range(steps):
        before = [p.detach().clone() for p in model.parameters()]
        opt.zero_grad()
        (scale * model(torch.randn(64, 128).to(dtype)).float().square().mean()).backward()
        opt.step()
    return opt, before, list(model.parameters())


def rows(found: Any, name: str) -> list[Row]:
    return [row for row in found.rows if row.name == name]


def kinds(found: Any) -> set[str]:
    return {f.row.name for f in found.findings}


def mend(opt: Any, found: Any) -> Any:
    """Return the optimizer that the line of the first finding makes, after a step."""
    names = {"opt": opt, "optgen": optgen}
    exec(found.findings[0].mend, names)
    (made := names["opt"]).step()
    assert [g["lr"] for g in made.param_groups] == [g["lr"] for g in opt.param_groups]
    return made


@pytest.mark.parametrize(("make", "options"), [
    (torch.optim.AdamW, {"lr": 1e-5}), (torch.optim.AdamW, {"lr": 1e-9, "dtype": torch.float32}),
    (torch.optim.AdamW, {"lr": 3e-4, "foreach": True, "betas": (0.8, 0.99)}),
    (torch.optim.AdamW, {"lr": 1e-3, "fused": True, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 1e-4, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}), (pytorch_optimizer.Lion, {"lr": 1e-5}),
])  # fmt: skip
def test_the_share_is_what_the_last_step_left(make: Any, options: dict[str, Any]) -> None:
    """It is measured afterwards, where a weight that moved has another update than it had."""
    opt, before, after = trained(make, **options)
    left = sum(float((old == new).sum()) for old, new in zip(before, after, strict=True))
    (row,) = rows(optgen.diagnose(opt), "weights")
    assert row.stays == pytest.approx(left / sum(p.numel() for p in after), abs=0.01)


@pytest.mark.parametrize(("dtype", "options", "expected"), [
    (BF16, {"lr": 1e-5}, {"weights", "exp_avg_sq"}),
    (BF16, {"lr": 0.1, "betas": (0.9, 0.95)}, set()),
    (BF16, {"lr": 0.1, "betas": (0.9, 0.997)}, {"exp_avg_sq"}),
    (torch.float32, {"lr": 1e-5}, set()),
])  # fmt: skip
def test_seeded_faults_of_floats(dtype: torch.dtype, options: dict[str, Any], expected: set[str]) -> None:
    opt = trained(torch.optim.AdamW, dtype, **options)[0]
    found = optgen.diagnose(opt)
    assert kinds(found) == expected
    assert found.bytes_per_parameter == (12 if dtype is torch.float32 else 6,)
    if options == {"lr": 1e-5} and expected:
        assert "0.weight 9" in str(found)
        mended = mend(opt, found)
        assert {*mended.plans().values()} == {"int8_split24"} and kinds(optgen.diagnose(mended)) == set()


@pytest.mark.parametrize(("cls", "lr"), [(torch.optim.AdamW, 1e-6), (torch.optim.SGD, 1e-3)])
def test_rare_rows_of_a_healthy_run_are_no_finding(cls: Any, lr: float) -> None:
    """Without gradients moments end among the last numbers of fp32, or weights decay by less than half of a place."""
    table, x = nn.Embedding(100, 8), torch.randint(100, (32,), generator=torch.Generator().manual_seed(0))
    opt = cls(table.parameters(), lr=lr, weight_decay=1e-5)
    for step in range(1200):
        assert step != 250 or not optgen.diagnose(opt).findings
        opt.zero_grad()
        table(x if step < 9 else x[:4]).square().sum().backward()
        opt.step()
    assert not optgen.diagnose(opt).findings and not any(row.stays for row in optgen.diagnose(opt).rows)


def test_seeded_fault_of_the_adamw_of_muon() -> None:
    opt = trained(optgen.optim.Muon, lr=1.0, adamw=True, adamw_betas=(0.9, 0.999), plan="bf16")[0]
    assert kinds(optgen.diagnose(opt)) == {"exp_avg_sq"}


def test_seeded_fault_of_eps_in_fp16() -> None:
    opt = trained(torch.optim.Adam, torch.float16, 1e-2, 1, lr=1e-5, foreach=False)[0]
    reasons = " ".join(f.reason for f in optgen.diagnose(opt).findings)
    assert "eps 1e-08 is below half of the smallest number of float16, 6e-08" in reasons
    assert "reads as 0 where exp_avg does not" in reasons


@pytest.mark.parametrize("linear", [False, True])
def test_seeded_fault_of_a_linear_map(linear: bool) -> None:
    """bitsandbytes' own map has a smaller relative cell at the small end: no second moment is 0 there."""
    import bitsandbytes

    opt = trained(bitsandbytes.optim.AdamW8bit, torch.float32, steps=1, lr=1e-3)[0]
    for entry in opt.state.values() if linear else ():
        for i, signed in ((1, True), (2, False)):
            if f"qmap{i}" in entry:
                entry[f"qmap{i}"] = bitsandbytes.functional.create_linear_map(signed)
    for p in (p for group in opt.param_groups for p in group["params"]):
        p.grad = torch.randn_like(p)
    opt.step()
    found = optgen.diagnose(opt)
    (row,) = (row for row in rows(found, "exp_avg_sq") if row.form == "8-bit table")
    assert (row.stays, row.bare > 0.005) == (1.0, linear)
    assert kinds(found) == {"exp_avg_sq"}
    assert any("eps alone" in f.reason for f in found.findings) == linear


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_cells_of_floats_are_those_of_the_conversion(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.cat([torch.randn(4000, generator=draw) * 10.0 ** torch.randint(-7, 4, (4000,), generator=draw),
                   2.0 ** torch.arange(-24, 10), -(2.0 ** torch.arange(-24, 10))]).to(dtype)  # fmt: skip
    read: Any = stored.floats(x)
    cells = read(0, x.numel())
    for factor in (1 - 2**-13, 1 - 2**-10, 1 - 2**-9.3, 1 - 2**-8.2, 1 + 2**-8.5, 1 + 2**-11.5, 1 + 2**-7.1):
        new = x.double() * factor
        assert torch.equal(cells.keep(new.float()), new.float().to(dtype) == x)


class Flash:
    """A state as flashoptim's optimizers hold it."""

    def __init__(self, name: str, saved: dict[str, Tensor]) -> None:
        self._quantized, self._scales = saved[f"{name}::quantized"], saved[f"{name}::scales"]

    def numel(self) -> int:
        return self._quantized.numel()


def flash(x: Tensor, root: bool) -> dict[str, Tensor]:
    """Return a state as flashoptim's state dict has it."""
    scale = (x.sqrt() if root else x).view(-1, 32).abs().amax(1)
    unit = (x.sqrt() if root else x).view(-1, 32) / scale[:, None]
    codes = unit * 255 if root else 2 * unit / (1 + unit.abs()) * 127
    name = "exp_avg_sq" if root else "exp_avg"
    dtype = torch.uint8 if root else torch.int8
    return {f"{name}::quantized": codes.round().to(dtype).view(x.shape), f"{name}::scales": scale.half()}


@pytest.mark.parametrize("kind", ["OptimState8bit", "OptimState4bit", "flashoptim"])
def test_states_of_packages_read_as_their_own_code_reads_them(kind: str) -> None:
    draw = torch.Generator().manual_seed(2)
    p = nn.Parameter(torch.zeros(32, 256))
    first, second = torch.randn(2, 32, 256, generator=draw)
    values = {"exp_avg": first, "exp_avg_sq": second.square()}
    entry: dict[str, Any] = {"step": torch.tensor(5.0)}
    opt = type("AdamW8bit", (torch.optim.AdamW,), {})([p])
    saved: dict[str, Any] = entry
    if kind == "flashoptim":
        saved = flash(values["exp_avg"], False) | flash(values["exp_avg_sq"], True)
        entry |= {name: Flash(name, saved) for name in values}
    else:
        made = getattr(optional("torchao.optim.subclass_" + kind[10:]), kind)
        for name, x in values.items():
            entry[name] = made.zeros(x.shape, name == "exp_avg", block_size=256).copy_(x)
    opt.state[p] = entry
    exact = packages.dense(saved, (), tuple(p.shape))
    for name, one in stored.states(opt, p).items():
        assert one.read is not None
        torch.testing.assert_close(one.read(0, p.numel()).value, exact[name].flatten(), rtol=1e-6, atol=0)
        some, whole = one.read(512, 768), one.read(0, p.numel())
        assert torch.equal(some.value, whole.value[512:768])
        assert bool(some.keep(some.value).all())
    p.grad = torch.zeros_like(p)
    (row,) = rows(optgen.diagnose(opt), "exp_avg_sq")
    assert row.stays == 1


def test_nothing_is_changed_or_copied_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(torch.randn(5 * CHUNK + 7, dtype=BF16))
    opt = torch.optim.AdamW([("big", p)], lr=1e-5)
    p.grad = torch.randn_like(p)
    opt.step()
    before = copy.deepcopy(opt.state_dict()["state"])

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.untyped_storage().nbytes() != p.untyped_storage().nbytes():
                self.most = max(self.most, out.untyped_storage().nbytes())
            return out

    with Largest() as mode:
        some = optgen.diagnose(opt)
        monkeypatch.setattr(diagnose, "SAMPLE", 6 * CHUNK)
        whole = optgen.diagnose(opt)
    assert mode.most <= 8 * CHUNK
    assert rows(whole, "weights")[0].stays == pytest.approx(rows(some, "weights")[0].stays, abs=0.005)
    torch.testing.assert_close(opt.state_dict()["state"], before, rtol=0, atol=0)


@pytest.mark.parametrize("first", ["0", lambda name, p: name.startswith("0")], ids=["pattern", "function"])
def test_groups_rules_and_what_is_not_known(first: Any) -> None:
    model = model_of(BF16)
    opt = optgen.make({first: "lion", "*": {"rule": "adamw", "plan": "bnb8"}}, model, lr=1e-5)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    found = optgen.diagnose(opt, model)
    assert [row.group for row in rows(found, "weights")] == [0, 1]
    assert kinds(found) == {"weights", "exp_avg_sq", "exp_avg"}
    assert kinds(optgen.diagnose(mend(opt, found), model)) < kinds(found)
    assert rows(optgen.diagnose(torch.optim.Adadelta(model.parameters())), "weights")[0].stays is None
    assert optgen.diagnose(torch.optim.Adam(model_of(BF16).parameters())).notes
    none: Any = []
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, got \[\]"):
        optgen.diagnose(none)


def formula(lr: float, std: float, beta1: float = 0.9) -> float:
    """Return the share of docs/frozen.md, of weights in bf16."""
    spread, share = math.sqrt((1 - beta1) / (1 + beta1)), 0.0
    for e in range(-40, 5):
        binade = math.erf(2.0 ** (e + 1) / std / 2**0.5) - math.erf(2.0**e / std / 2**0.5)
        share += binade * math.erf(2.0 ** (e - 8) / lr / spread / 2**0.5)
    return share


@pytest.mark.parametrize(("lr", "std", "beta2", "stuck"), [
    (1e-5, 0.02, 0.999, 1), (1e-4, 0.02, 0.9981, 1), (1e-4, 0.1, 0.996, 0),
])  # fmt: skip
def test_predictions_are_those_of_the_formulas(lr: float, std: float, beta2: float, stuck: float) -> None:
    """Second moments are stuck from beta2 = 1 - 2^-9 on, and none is below 1 - 2^-8."""
    found = predict(find_spec("adamw"), BF16, {"lr": lr, "betas": (0.9, beta2)}, weight_std=std, steps=150)
    assert found["weights"] == pytest.approx(formula(lr, std), rel=0.05)
    assert found["exp_avg_sq"] == stuck


def test_the_command_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["diagnose", "--rule", "adamw", "--lr", "1e-5", "--betas", "0.9", "0.999", "--steps", "60", "--json"]
    assert cli.main(words) == 1
    found = json.loads(capsys.readouterr().out)["stays"]
    assert found["weights"] > 0.95
    assert found["exp_avg_sq"] == 1
    assert cli.main(["diagnose", "--rule", "adamw", "--lr", "1e-3", "--steps", "1"]) in (0, 1)
    said = capsys.readouterr()
    assert "weights" in said.out and "rates above 0.0003 are beyond those compared" in said.out + said.err
    assert cli.main(["diagnose", "--rule", "lion", "--dtype", "fp32", "--steps", "20"]) == 0
    assert cli.main(["diagnose", "--rule", "adamw", "--betas", "0.9", "2"]) == 2
    assert cli.main(["diagnose", "--rule", "sgd", "--betas", "0.9"]) == 2
    assert "one of the options of sgd" in capsys.readouterr().err


def test_the_example_mends_its_run() -> None:
    imported(EXAMPLE, "example_frozen_run", known=True)
