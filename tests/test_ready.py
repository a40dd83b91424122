"""Ready-made optimizers: generated when they are first asked for, once per machine, and imported from then on."""

import multiprocessing
import os
import shutil
from collections.abc import Mapping
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from optgen import _ready, optim
from optgen.base import ready
from optgen.driver import load
from optgen.runtime.cpu import cache
from tests.harness import ROOT, python
from tools.bench.first_use import first_use


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with nothing in it."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("OPTGEN_CACHE", str(folder))
    return folder


def test_names_are_those_of_the_specs() -> None:
    specs = {load.find_spec(rule, ROOT).class_name: rule for rule, x in load.entries(ROOT).items() if x.own}
    assert ready.classes() == specs and list(ready.classes()) == dir(optim) == optim.__all__ == sorted(specs)
    assert ready.plans() == tuple(load.plans(ROOT))


def test_a_class_is_found_without_the_compiler_once_it_was_generated(empty: Path) -> None:
    code = """
        import inspect, logging, pickle, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s", level="INFO")
        import torch
        exec(sys.argv[1])
        p = torch.nn.Parameter(torch.ones(9))
        opt = cls([p], plan="fp32", backend="reference")
        p.grad = torch.ones(9)
        opt.step()
        print(*sorted({"optgen.driver.emit", "optgen.lang", "jinja2"} & set(sys.modules)))
        print(pickle.dumps(cls).hex(), inspect.getsource(cls).splitlines()[0], sep="\\n")
    """
    *made, compiler, text, _ = python(code, "from optgen.optim import Lion as cls").splitlines()
    assert made == ["generating Lion", "generating plan fp32"] and "optgen.driver.emit" in compiler
    assert python(code, f"cls = pickle.loads(bytes.fromhex('{text}'))") == f"\n{text}\nclass Lion(Optimizer):\n"


def test_the_first_use_of_a_class_is_quick() -> None:
    """0.1 s with a cache and 1.5 s without one; more on a machine that is slower at importing torch."""
    found = first_use("SOAP")
    assert found["warm"] <= max(0.1, 0.08 * found["torch"]), found
    assert found["cold"] <= max(1.5, found["torch"]), found


def _take(start: Any, said: "Queue[Any]") -> None:
    made: list[tuple[str, ...]] = []
    generate = _ready._generate

    def counted(parts: tuple[str, ...]) -> Mapping[str, str]:
        made.append(parts)
        return generate(parts)

    with mock.patch.object(_ready, "_generate", counted):
        start.wait()
        parts = ("lion",), ("plans", "fp32"), ("lion", "bf16")
        texts = [{f.name: f.read_text() for f in _ready.folder(*x).glob("*.[ph]*")} for x in parts]
    said.put((made, texts))


def test_of_processes_that_start_at_once_one_generates(empty: Path) -> None:
    fork = multiprocessing.get_context("fork")
    start, said = fork.Barrier(64), fork.Queue()
    processes = [fork.Process(target=_take, args=(start, said)) for _ in range(64)]
    for process in processes:
        process.start()
    found = [said.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    made = [parts for each, _ in found for parts in each]
    assert sorted(made) == [("lion",), ("lion", "bf16"), ("plans", "fp32")]
    assert all(texts == found[0][1] for _, texts in found)
    assert sorted(f.name for f in empty.glob("*/*")) == ["lion", "plans"]


def test_a_folder_that_is_only_read_is_read(empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cache.kept("one", partial(cache.write, {"a/x.py": "1\n"}))
    assert whole == empty / "one" and (whole / "a/x.py").read_text() == "1\n"
    monkeypatch.setattr(cache.os, "access", lambda *_: False)
    assert cache.kept("one", Path.rmdir) == whole
    with pytest.warns(UserWarning, match="anew in every process: .* takes no files"):
        other = cache.kept("two", partial(cache.write, {"x.py": "2\n"}))
    assert not other.is_relative_to(empty) and other == cache.kept("two", Path.rmdir)
    assert (other / "x.py").read_text() == "2\n"


def test_a_changed_spec_is_generated_anew(empty: Path, tmp_path: Path) -> None:
    unused = shutil.ignore_patterns("__pycache__")
    for name in ("optgen", "specs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=unused)
    code = "from optgen.optim import Lion; import inspect; print(inspect.signature(Lion).parameters['lr'].default)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert python(code, cwd=tmp_path, env=env) == "0.0001\n"
    spec = tmp_path / "specs" / "lion.py"
    spec.write_text(spec.read_text().replace("lr=hyper(1e-4", "lr=hyper(2e-4"))
    assert python(code, cwd=tmp_path, env=env) == "0.0002\n"
    assert len(list(empty.glob("ready_*"))) == 2
