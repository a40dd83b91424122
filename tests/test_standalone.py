"""`optgen build --standalone`: one file with the bits of the package, which needs torch alone."""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import optgen.optim
from optgen.base.errors import UserError
from optgen.driver import cli, load, standalone
from optgen.formats import Plan, bf16
from tests import harness

SHAPES = ((33, 130), (33, 128), (33,), (5000,), (), (3, 5, 4, 7), (0, 4))
PAIRS = (
    "adamw/int8_split24", "adamw/fp32_master", "lion/int8_split24", "muon/int8_split24", "lamb/int8_split24",
    "sgd/bf16_sr", "adagrad/torchao4", "came/int8_split24", "adafactor/int4_split24", "adopt/flashoptim",
)  # fmt: skip
KERNELS = (
    "adamw/int8_split24", "lion/int8_split24", "sgd/bf16_sr", "adan/bf16_sr", "adamw/split32", "adamw/fp32_master",
    "adopt/flashoptim",
)  # fmt: skip


@cache
def text(pair: str) -> str:
    spec, plan = pair.split("/")
    return standalone.text(load.find_spec(spec), load.find_plan(plan))


def optimizer(pair: str, folder: Path, *, kernels: bool = False) -> Any:
    made = harness.module(folder, "one_file", text(pair), known=True)  # dataclasses look their module up
    cls = getattr(made, load.find_spec(pair.split("/")[0]).class_name)
    cls.ON_CPU = kernels  # by Triton's interpreter, where the file has kernels
    return cls


def params(seed: int = 0, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.nn.Parameter]:
    make = torch.Generator().manual_seed(seed)
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    return [torch.nn.Parameter(torch.randn(s, generator=make).to(d)) for s in shapes for d in dtypes]


def gradients(ps: list[torch.nn.Parameter], k: int) -> None:
    make = torch.Generator().manual_seed(100 + k)
    for p in ps:
        p.grad = (torch.randn(p.shape, generator=make) * 10.0 ** (k - 2)).to(p.dtype)


def bits(x: Any) -> Any:
    return x.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if isinstance(x, Tensor) else x


@pytest.mark.parametrize("pair", PAIRS)
def test_bits_of_the_package(pair: str, tmp_path: Path) -> None:
    """Weights and states of every dtype, size class and shape are those of the eager reference."""
    check(pair, optimizer(pair, tmp_path), "reference", SHAPES, 4)


@pytest.mark.parametrize("pair", KERNELS)
def test_kernels_have_the_bits_of_the_package(pair: str, tmp_path: Path) -> None:
    """Also where rows end within a block; in Triton's interpreter."""
    cls = optimizer(pair, tmp_path, kernels=True)
    assert "\nKERNELS = " in text(pair)
    check(pair, cls, "triton", ((5, 70), (64, 80), (300,), ()), 2)


def test_a_file_is_short_enough_to_be_read() -> None:
    """Kernels, codecs and the eager part of AdamW, and that of rules of several sweeps; without blank lines."""
    for pair, most in {"adamw/int8_split24": 1810, "lamb/int8_split24": 1300, "muon/int8_split24": 1600}.items():
        assert sum(bool(line.strip()) for line in text(pair).splitlines()) <= most, pair


def check(pair: str, cls: Any, backend: str, shapes: Sequence[tuple[int, ...]], steps: int, **options: Any) -> None:
    ours, theirs = params(0, shapes), params(0, shapes)
    name = load.find_spec(pair.split("/")[0]).class_name
    alone = cls(ours, seed=7, **options)
    whole = getattr(optgen.optim, name)(theirs, plan=pair.split("/")[1], backend=backend, seed=7, **options)
    for k in range(steps):
        gradients(ours, k)
        gradients(theirs, k)
        alone.step()
        whole.step()
    for p, q in zip(ours, theirs, strict=True):
        assert bits(p) == bits(q), (p.shape, p.dtype)
        assert {k: bits(v) for k, v in alone.state[p].items()} == {k: bits(v) for k, v in whole.state[q].items()}


def test_a_state_dict_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Two groups under a scheduler, saved after two of four steps and loaded by another optimizer."""

    def made() -> tuple[list[torch.nn.Parameter], Any, Any]:
        ps = params(3)
        groups = [{"params": ps[::2]}, {"params": ps[1::2], "lr": 0.1, "weight_decay": 0.0}]
        opt = cls(groups, lr=0.01)
        return ps, opt, torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)

    def steps(ps: list[torch.nn.Parameter], opt: Any, scheduler: Any, first: int) -> None:
        for k in range(first, first + 2):
            gradients(ps, k)
            opt.step()
            scheduler.step()

    cls = optimizer("adamw/int8_split24", tmp_path)
    ps, opt, scheduler = made()
    steps(ps, opt, scheduler, 0)
    saved = copy.deepcopy((opt.state_dict(), scheduler.state_dict()))
    torch.save(saved, tmp_path / "saved.pt")
    weights = [p.detach().clone() for p in ps]
    steps(ps, opt, scheduler, 2)
    again, other, its = made()
    for p, w in zip(again, weights, strict=True):
        p.data.copy_(w)
    own, of_scheduler = torch.load(tmp_path / "saved.pt")
    other.load_state_dict(own)
    its.load_state_dict(of_scheduler)
    steps(again, other, its, 2)
    assert [bits(p) for p in again] == [bits(p) for p in ps]
    assert opt.param_groups[1]["lr"] == other.param_groups[1]["lr"] == 0.1 / 16


def test_wrong_numbers_and_gradients_are_refused(tmp_path: Path) -> None:
    cls = optimizer("adamw/int8_split24", tmp_path)
    for wrong in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)}, {"eps": float("nan")}):
        with pytest.raises(ValueError, match=f"AdamW: {next(iter(wrong))} must be"):
            cls(params(), **wrong)
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    p.grad = torch.zeros_like(p)
    with pytest.raises(TypeError, match="parameters of dtype float64"):
        cls([p]).step()
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="the gradient of parameter 0 is not dense"):
        cls(table.parameters()).step()
    q = torch.nn.Parameter(torch.zeros(3))
    q.grad = torch.ones_like(q)
    opt = cls([q])
    opt.load_state_dict({"state": {0: {"step": 3}}, "param_groups": opt.state_dict()["param_groups"]})
    with pytest.raises(RuntimeError, match="parameter 0 has no state exp_avg, exp_avg_sq"):
        opt.step()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("prodigy", "sums over all parameters"),
        ("schedule_free_adamw", "other weights for evaluation"),
        ("lookahead_adamw", "some of its steps"),
        ("adam_mini", "blocks of rows"),
    ],
)
def test_rules_that_one_file_does_not_serve(name: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as error:
        text(f"{name}/int8_split24")
    assert error.value.code == "E419" and error.value.locs


def test_the_lint_refuses_a_plan_here_too() -> None:
    plan = Plan("Rounded to nearest.", nonneg=bf16, name="nearest")
    with pytest.raises(UserError, match="freezes"):
        standalone.text(load.find_spec("adamw"), plan)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The file goes to --out, never over a file of somebody else's; without --out to stdout."""
    monkeypatch.chdir(tmp_path)

    def built(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["build", "--standalone", "lion", *arguments])
        return code, *capsys.readouterr()

    wanted = text("lion/fp32")
    assert built("--plan", "fp32", "--out", "mine.py")[:2] == (0, f"mine.py: {len(wanted.splitlines())} lines\n")
    assert Path("mine.py").read_text() == wanted
    code, again, _ = built("--plan", "fp32", "--out", "mine.py", "--json")
    assert code == 0 and json.loads(again)["file"] == "mine.py"
    Path("theirs.py").write_text("x = 1\n")
    code, _, error = built("--plan", "fp32", "--out", "theirs.py")
    assert code == 2 and "E406" in error
    assert Path("theirs.py").read_text() == "x = 1\n"
    assert built("--plan", "fp32")[1] == wanted
    assert "E411" in built("--plan", "fp32", "--check")[2]
    assert "E411" in built()[2]


def test_where_triton_is_missing_a_file_steps_in_torch_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (cli, standalone):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert cli.main(["build", "--standalone", "lion", "--plan", "int8_split24", "--out", "mine.py"]) == 0
    assert "no GPU kernels, as Triton is not installed" in capsys.readouterr().err
    made = Path("mine.py").read_text()
    assert "import triton" not in made
    cls = harness.module(tmp_path, "mine", made, known=True).Lion
    check("lion/int8_split24", cls, "reference", SHAPES, 2)


TRAIN = """
import sys, torch
from one_file import AdamW
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).bfloat16()
opt = AdamW(model.named_parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60)
torch.manual_seed(0)
x = torch.randn(512, 32)
y = x[:, :4].prod(1, keepdim=True)
losses = []
for _ in range(60):
    opt.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x.bfloat16()).float(), y)
    loss.backward()
    opt.step()
    schedule.step()
    losses.append(loss.item())
assert {str(v.dtype) for s in opt.state.values() for v in s.values() if torch.is_tensor(v)} >= {"torch.uint8"}
missing = {"optgen", "sympy", "triton", "jinja2"} & set(sys.modules) - {"sympy", "jinja2"}
assert not missing, missing
print(losses[0], losses[-1])
"""


def test_it_trains_where_torch_is_all_there_is(tmp_path: Path) -> None:
    """A folder of links to torch and to what torch requires is the whole path; ruff finds nothing in the file."""
    wanted, done = ["torch"], {"triton"}
    links = tmp_path / "links"
    links.mkdir()
    while wanted:
        name = wanted.pop()
        if name in done:
            continue
        done.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        needs = [r for r in found.requires or () if "extra ==" not in r]
        wanted += [re.split(r"[^\w.-]", r, maxsplit=1)[0] for r in needs]
        for top in {f.parts[0] for f in found.files or () if f.parts[0] not in ("..", "__pycache__")}:
            if not (links / top).exists():
                (links / top).symlink_to(Path(str(found.locate_file(top))).resolve())
    assert not (links / "optgen").exists() and (links / "torch").exists()
    (links / "one_file.py").write_text(text("adamw/int8_split24"))
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(links)}
    command = [sys.executable, "-S", "-c", TRAIN]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    first, last = map(float, run.stdout.split())
    assert last < 0.8 * first
    lint = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E4,E7,E9,F", str(links / "one_file.py")]
    assert subprocess.run(lint, capture_output=True, check=False).returncode == 0
