"""The whole path once, in seconds: an example is built, imported, compared with its fp64 oracle, and trained with."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from optgen.driver import load
from optgen.driver.build import Request, build
from optgen.lang import Spec

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "signed_momentum.py"
NAME = "tiny_generated"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The example, built in a project of its own and imported under a name of its own."""
    project = tmp_path_factory.mktemp("project")
    (project / "specs").mkdir()
    (project / "specs" / EXAMPLE.name).write_bytes(EXAMPLE.read_bytes())
    outcome = build(Request(plans=("fp32", "int8_split24"), project=project))
    assert "signed_momentum/triton.py" in outcome.written
    again = build(Request(plans=("fp32", "int8_split24"), project=project, check=True))
    assert again.clean, again.diff
    folder = project / "generated"
    made = importlib.util.spec_from_file_location(
        NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    sys.modules[NAME] = module
    made.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def spec() -> Spec:
    return load.find_spec(EXAMPLE)


def test_int8_trains_and_resumes_bit_by_bit(generated: ModuleType) -> None:
    target = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    weight = torch.nn.Parameter(torch.zeros(64, 128, dtype=torch.bfloat16))
    optimizer = generated.SignedMomentum([weight], lr=0.02, weight_decay=0.0, plan="int8_split24")

    def train(w: torch.nn.Parameter, opt: torch.optim.Optimizer, steps: int) -> float:
        for _ in range(steps):
            w.grad = (w.detach().float() - target).to(w.dtype)
            opt.step()
        return float((w.detach().float() - target).square().mean())

    before = float(target.square().mean())
    train(weight, optimizer, 50)
    other = torch.nn.Parameter(weight.detach().clone())
    resumed = generated.SignedMomentum([other], lr=0.02, weight_decay=0.0, plan="int8_split24")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    after = train(weight, optimizer, 50)
    train(other, resumed, 50)
    assert torch.equal(weight, other)
    # 100 steps of at most 0.02 reach every target below 2; what is left is far less than a tenth.
    assert after < 0.1 * before
    state = optimizer.state[weight]
    kept = sum(x.numel() * x.element_size() for x in state.values() if isinstance(x, torch.Tensor) and x.ndim > 0)
    # One byte of weight, two of codes, and per block of 64 two 16-bit numbers.
    assert kept == weight.numel() * 3 + weight.numel() // 64 * 4
