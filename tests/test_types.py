"""The types of optgen/, as `make lint` checks them, and of what users write: one process, for mypy keeps a core."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optgen.driver.build import Request, build
from tests.test_pages import BLOCK
from tools import write_types

ROOT = Path(__file__).parents[1]

GIVEN = """
from collections.abc import Callable

import torch
from torch import Tensor, nn

import optgen
from optgen.optim import AdamW
from optgen.runtime import Optimizer

loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor]
batches: list[tuple[Tensor, Tensor]]


def script(model: nn.Module, opt: Optimizer) -> None:
"""
"""What README takes for granted."""

ANY = "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n"
LIGHTNING = f"from torch import nn\n{ANY}class LightningModule(nn.Module): ...\n"
FRAMEWORKS = {"lightning.pyi": LIGHTNING} | dict.fromkeys(
    ("accelerate.pyi", "datasets.pyi", "transformers.pyi", "trl.pyi", "timm/__init__.pyi", "timm/optim.pyi",
     "timm/scheduler.pyi", "timm/models/__init__.pyi", "timm/models/vision_transformer.pyi"), ANY,
)  # fmt: skip
"""Stubs in the place of packages that take minutes, or that are not here."""

LOOSE = "# mypy: allow-untyped-calls, allow-subclassing-any, no-warn-return-any\n"
"""What strict scripts need: torch's `backward` is untyped, and of the stubs above all is Any."""
UNTYPED = "# mypy: allow-untyped-defs\n# pyright: basic\n"
"""What specs need, the text of a language."""
FOREIGN = re.compile(r"^(import|from) (accelerate|lightning|timm|transformers|optgen\.integrations)", re.MULTILINE)
STRICT: dict[str, Any] = {
    "typeCheckingMode": "strict", "reportUnknownMemberType": False, "reportUnusedImport": False,
    "reportUnusedVariable": False,
}  # fmt: skip
"""Members of torch are known in part, and README's blocks are beginnings; of frameworks pyright knows too little."""

SPECS = {
    "signed_momentum.py": (ROOT / "examples/signed_momentum.py").read_text(encoding="utf-8"),
    "twice.py": "from optgen.lang import sam\nfrom specs.sgd import sgd\n\nsam_sgd = sam(sgd)\n",
}

SCRIPT = """
import torch
from torch import Tensor, nn

import optgen
from made import SGD, SamSGD, SignedMomentum
from optgen.accumulate import accumulator
from optgen.optim import AdamW, Lion, Muon

model = nn.Linear(4, 4)
several = optgen.make({"weight": {"rule": "muon", "lr": 0.02}, "*": "adamw"}, model)
one = optgen.make("adamw", optgen.cast_model(model, torch.bfloat16), plan="int8_split24", lr=1e-3)
lone = optgen.make(AdamW, model.named_parameters())
parts: list[AdamW] = [lone]
print(one.memory(), several.parts, several.matched, parts, optgen.list("adam*"), optgen.list_rules())
print(optgen.__version__)
optgen.save_checkpoint("run.pt", several, model)
optgen.load_checkpoint("run.pt", one, model)
sam = optgen.SAM(lone, rho=0.05)
sam.first_step()
sam.second_step()
compiled = optgen.compile("specs/my_rule.py", plan="int8_split24")(model.parameters(), lr=1e-3)
optgen.keep_states_fp32(optgen.StableEmbedding(3, 4))
handle = one.release_gradients(model, accumulate=2, accumulator=accumulator("int8"))
handle.remove()
other: type[AdamW] = optgen.optim.AdamW

mine = SignedMomentum(model.parameters(), lr=1e-3, beta=0.9, plan="fp32", overrides={"*bias": "fp32"}, seed=3)
twice = SamSGD([{"params": model.parameters(), "lr": 0.1}], lr=torch.tensor(0.1), rho=0.1)
twice.first_step()
twice.second_step()
full: dict[str, object] = SGD(model.named_parameters(), lr=0.1).master_state_dict(model)
torch.optim.lr_scheduler.OneCycleLR(several, max_lr=[1e-3, 1e-2], total_steps=3)
schedules = [torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1 / (k + 1)) for opt in (one, lone, mine, twice)]


def closure() -> float:
    loss: Tensor = model(torch.ones(4)).sum()
    loss.backward()
    return loss.item()


loss: float | None = mine.step(closure)

AdamW(model.parameters(), weight_decy=0.1)  # wrong
Lion(model.parameters(), betas=0.9)  # wrong
SignedMomentum(model.parameters(), bet=0.9)  # wrong
SamSGD(model.parameters(), rho="0.1")  # wrong
SGD(model.parameters(), plan=8)  # wrong
optgen.make("adamw", 3)  # wrong
optgen.cast_model(model, 16)  # wrong
optgen.no_such_thing  # wrong
mine.first_step()  # wrong
"""


def scripts(folder: Path) -> dict[str, str]:
    """Write the scripts, and build rules to `made` beside them. Returns file name -> text."""
    write_types.write()
    (folder / "specs").mkdir()
    for name, text in SPECS.items():
        (folder / "specs" / name).write_text(text, encoding="utf-8")
    rules = ("signed_momentum", "sam_sgd", "sgd")
    build(Request(rules, ("fp32",), out=str(folder / "made"), project=folder))
    made = {"script.py": SCRIPT, **FRAMEWORKS}
    for k, text in enumerate(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))):
        if "@optimizer" not in text:  # the spec of the example
            body = re.sub(r"^(?=.)", "    ", re.sub("from (mine|generated)", "from made", text), flags=re.MULTILINE)
            made[f"readme_{k}.py"] = GIVEN + body
    for path in (ROOT / "examples").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        head = UNTYPED if "@optimizer" in text else "# pyright: standard\n" if FOREIGN.search(text) else ""
        made[f"example_{path.name}"] = head + text
    made |= {name: LOOSE + text for name, text in made.items() if name.endswith(".py")}
    for name, text in made.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text, encoding="utf-8")
    return {name: text for name, text in made.items() if name.endswith(".py")}


def wrong(texts: dict[str, str], output: str) -> None:
    """Assert that the errors of a checker are in the lines that are wrong."""
    marked = {(n, k) for n, text in texts.items() for k, line in enumerate(text.split("\n"), 1) if "# wrong" in line}
    errors = [line for line in output.splitlines() if re.search(r":\d+(:\d+)?:? (- )?error", line)]
    found = {(place[1], int(place[2])) for x in errors if (place := re.search(r"([\w.]+\.pyi?):(\d+)", x))}
    assert found == marked, output


@pytest.mark.long
def test_the_types_of_the_package_and_of_what_users_write_are_right(tmp_path: Path) -> None:
    texts = scripts(tmp_path)
    files = ["optgen", *(str(tmp_path / name) for name in texts)]
    env = os.environ | {"MYPYPATH": str(tmp_path)}
    command = [sys.executable, "-m", "mypy", *files]
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    wrong(texts, found.stdout + found.stderr)


def test_pyright_finds_the_same(tmp_path: Path) -> None:
    command = shutil.which("basedpyright") or shutil.which("pyright")
    if not command:
        pytest.skip("pyright is not on the PATH")
    texts = scripts(tmp_path)
    settings = {**STRICT, "extraPaths": [str(ROOT)], "include": [*texts]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    given = [command, "--pythonpath", sys.executable, "--project", str(tmp_path)]
    found = subprocess.run(given, cwd=tmp_path, capture_output=True, text=True, check=False)
    wrong(texts, found.stdout)
