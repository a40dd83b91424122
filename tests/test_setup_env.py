"""The environment: which PyTorch, in which order it is looked for, and when nothing is done."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests import oracles, with_timm
from tools import setup_env

ROOT = Path(__file__).resolve().parent.parent


def test_without_a_gpu_the_cpu_build_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("OPTGEN_TORCH", raising=False)
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: False)
    assert setup_env.wanted_torch() == "cpu"
    first, second, last = (arguments for _, arguments in setup_env.torch_attempts("cpu"))
    assert first == [f"torch=={setup_env.TORCH}+cpu"]
    assert second[:3] == [*first, "--extra-index-url", setup_env.CPU_INDEX]
    assert last == [f"torch=={setup_env.TORCH}"]


def test_with_a_gpu_a_cpu_build_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPTGEN_TORCH", raising=False)
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: True)
    kind = setup_env.wanted_torch()
    ((_, (requirement,)),) = setup_env.torch_attempts(kind)
    packaging = pytest.importorskip("packaging.requirements")
    allowed = packaging.Requirement(requirement).specifier
    assert allowed.contains(setup_env.TORCH)
    assert allowed.contains(setup_env.TORCH + "+cu130")
    assert not allowed.contains(setup_env.TORCH + "+cpu")
    assert setup_env.triton_requirement(kind) == []


def test_every_direct_requirement_is_pinned() -> None:
    def names(file: str) -> set[str]:
        lines = (ROOT / "requirements" / file).read_text().splitlines()
        found = (re.match(r"[\w.-]+", line) for line in lines)
        return {m.group().lower().replace("_", "-") for m in found if m}

    assert names("dev.txt") <= names("constraints.txt")
    apart = (*setup_env.BARE, *setup_env.APART, *setup_env.PACKAGES, *setup_env.JAX)
    assert {name.replace("_", "-") for name in apart} <= names("constraints.txt")
    assert setup_env.FRAMEWORKS.relative_to(setup_env.VENV) == with_timm.FOLDER.relative_to(sys.prefix)
    assert setup_env.ORACLES.relative_to(setup_env.VENV) == oracles.FOLDER.relative_to(sys.prefix)
    pins = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    assert all("==" in line for line in pins if not line.startswith("#"))


@pytest.mark.parametrize("fails", ["--target", "-r"])
def test_a_failure_apart_stops_nothing_and_one_of_the_environment_begins_no_further_folder(
    fails: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, folders = threading.Event(), []

    def pip(*arguments: str, to: Path | None = None) -> bool:
        if "--target" in arguments:
            folders.append(arguments)
            begun.set()
            time.sleep(0.1)
        return begun.wait(9) and fails not in arguments

    changed = {name: tmp_path / name for name in ("LOG", "LOG_APART", "STAMP")} | {"ROOT": tmp_path, "VENV": tmp_path}
    changed |= {"PYTHON": sys.executable, "pip": pip, "make_venv": lambda: None}
    changed |= {"compiling": lambda: subprocess.Popen([sys.executable, "-c", ""])}
    for name, value in changed.items():
        monkeypatch.setattr(setup_env, name, value)
    if fails == "-r":
        with pytest.raises(setup_env.SetupError, match="installing the pinned packages failed"):
            setup_env.install("cpu")
    else:
        setup_env.install("cpu")
    assert len(folders) == (1 if fails == "-r" else 4)
    assert capsys.readouterr().out.count("could not be installed") == (0 if fails == "-r" else 4)
