"""Settings of all tests: one thread per worker, Hypothesis profiles, and which tests are left to a GPU."""

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.interpreter import quicken

# pytest-xdist already runs one worker per core.
torch.set_num_threads(1)
gc.set_threshold(20_000, 20, 20)

# A time limit per example would only measure the machine.  The daily profile draws the same examples each time; the
# full one (`--hypothesis-profile=full`) draws new ones and prints how to repeat a failure.
_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("daily", max_examples=50, derandomize=True, **_common)
settings.register_profile("full", max_examples=500, **_common)
settings.load_profile("daily")


def pytest_collection_finish(session: pytest.Session) -> None:
    """torch.testing._internal loads a profile of its own when a module imports it, of 10 examples: ours again.

    Cycles are looked for seldom, and not among what there is: two million nodes, cases and modules live as long as a
    worker does, and to look at all of them again was 3 % of its time.
    """
    settings.load_profile(session.config.getoption("--hypothesis-profile") or "daily")
    gc.freeze()


# Triton decides when a kernel is decorated, so one process either interprets or compiles. This one interprets, but for
# tests on a device (`make gpu-check`) and those whose PTX is emulated (tests/test_ptx.py); others that compile start a
# process of their own (see `compiling`).
if capability := os.environ.get("OPTGEN_EMULATE"):
    from tests.ptx import driver, pretended

    (pretended if "OPTGEN_PRETEND" in os.environ else driver).install(int(capability))
elif os.environ.get("OPTGEN_TEST_DEVICE") != "cuda":
    os.environ["TRITON_INTERPRET"] = "1"
    quicken()

# Optimizers step in eager torch unless a test asks for more: exact, and without a compiler's run at each first step.
os.environ["OPTGEN_BACKEND"] = "reference"

# Kernels that tests compile stay beside what else pytest keeps, and out of the user's cache.
os.environ.setdefault("OPTGEN_CACHE", str(Path(__file__).parents[1] / ".pytest_cache" / "kernels"))


# What tests/test_product.py samples; workers of pytest-xdist inherit it from the process that starts them.
os.environ.setdefault("OPTGEN_SAMPLE_SEED", str(time.time_ns() // 1000 % 1_000_000))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"sample of the product: OPTGEN_SAMPLE_SEED={os.environ['OPTGEN_SAMPLE_SEED']}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with long tests, and leave those of a GPU to `make gpu-check`."""
    items.sort(key=lambda item: "long" not in item.keywords)  # stable: the rest stay in their order
    if not os.environ.get("OPTGEN_TEST_DEVICE"):
        config.hook.pytest_deselected(items=[item for item in items if "cuda" in item.keywords])
        items[:] = [item for item in items if "cuda" not in item.keywords]


@pytest.fixture(scope="session", autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """C++ kernels that tests compile in this process: without optimization, but with the full profile.  Processes that
    tests start compile as users do."""
    from tests import harness

    full = request.config.getoption("--hypothesis-profile") == "full"
    with harness.optimized() if full else harness.unoptimized():
        yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def optimized() -> Iterator[None]:
    """C++ kernels of a module are compiled as users' are."""
    from tests import harness

    with harness.optimized():
        yield


@pytest.fixture(scope="session")
def interpreter() -> dict[str, str]:
    """The environment of a process in which Triton kernels run in the interpreter, on the CPU."""
    return {**os.environ, "TRITON_INTERPRET": "1"}


@pytest.fixture(scope="session")
def compiling() -> dict[str, str]:
    """The environment of a process in which Triton compiles."""
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
