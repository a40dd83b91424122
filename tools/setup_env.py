"""Set up .venv: a virtual environment with pinned packages and the right build of PyTorch.

    python3 tools/setup_env.py          sets up what is missing; the second call only looks at a stamp

Which PyTorch: the CPU build on a machine without an NVIDIA GPU, the CUDA build (several GB) on one with a GPU.
OPTGEN_TORCH=cpu or OPTGEN_TORCH=cuda decides it by hand.  Everything goes through pip as the machine has it configured.
Only the standard library is used: this file runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "optgen-setup.stamp"
LOG, LOG_APART = VENV / "optgen-setup.log", VENV / "optgen-setup-apart.log"
INPUTS = ("requirements/constraints.txt", "requirements/dev.txt", "pyproject.toml", "tools/setup_env.py")

MIN_PYTHON = (3, 11)
TORCH = "2.13.0"
TRITON = "3.9.0"  # where torch brings none of its own: the interpreter and the cross-compilers need no GPU
BARE = ("torchtitan", "tyro", "typeguard", "docstring_parser", "spmd_types")
"""torchtitan and what its optimizers import: without the loggers and servers that it also asks for."""
APART = ("timm", "torchvision")
"""Installed into FRAMEWORKS: beside a CPU build of torch, a torchvision that is none stops all that import it."""
FRAMEWORKS = VENV / "frameworks"
PACKAGES = ("absl_py", "apollo_torch", "emerging_optimizers", "galore_torch")
"""Optimizers of matrices that tests compare rules with, and what one of them imports; in a folder of their own."""
JAX = ("optax", "jax", "jaxlib", "ml_dtypes", "opt_einsum")  # into it too; only jax' factorizations need SciPy
ORACLES = VENV / "oracles"
OLDEST_TRITON = "3.6.0"
"""The oldest version that kernels are counted under, beside the one that tests run with; in a folder of its own."""
OLDEST = VENV / "oldest"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own index of CPU builds


class SetupError(Exception):
    """Something the user must see; the text is the message."""


def has_nvidia_gpu() -> bool:
    """Return True if the driver lists a GPU (a CUDA toolkit alone does not count)."""
    gpus = Path("/proc/driver/nvidia/gpus")
    if gpus.is_dir() and any(gpus.iterdir()):
        return True
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    try:
        listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def wanted_torch() -> str:
    """Return "cpu" or "cuda"."""
    asked = os.environ.get("OPTGEN_TORCH", "")
    if asked in ("cpu", "cuda"):
        return asked
    if asked:
        raise SetupError(f"OPTGEN_TORCH is {asked!r}; it can be cpu or cuda")
    return "cuda" if has_nvidia_gpu() else "cpu"


def torch_attempts(kind: str) -> list[tuple[str, list[str]]]:
    """Return (message, arguments of pip install), to be tried in this order.

    "2.13.0+cpu" names the CPU build and nothing else.  A machine's own package index or wheel folder may offer it; if
    not, PyTorch's index does.  The plain version is last: on Linux it is the CUDA build, which works without a GPU
    too, on other systems it is the CPU build.
    """
    plain = f"torch=={TORCH}"
    if kind == "cuda":
        return [("CUDA build, several GB: this takes a while", [f"{plain},!={TORCH}+cpu"])]
    if sys.platform == "darwin":
        return [("CPU build", [plain])]
    cpu = f"torch=={TORCH}+cpu"
    return [
        ("CPU build, from the package indexes configured on this machine", [cpu]),
        (f"CPU build, from {CPU_INDEX}", [cpu, "--extra-index-url", CPU_INDEX, "--timeout", "15", "--retries", "1"]),
        ("no CPU build within reach: the default build, several GB on Linux", [plain]),
    ]


def triton_requirement(kind: str) -> list[str]:
    """Return Triton for a CPU build of torch; a CUDA build depends on the Triton that belongs to it."""
    has_wheel = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64", "aarch64", "arm64")
    return [f"triton=={TRITON}"] if kind == "cpu" and has_wheel else []


def fingerprint(kind: str) -> str:
    text = hashlib.sha256(kind.encode())
    for name in INPUTS:
        text.update((ROOT / name).read_bytes())
    text.update(str(ROOT).encode())  # a moved checkout needs its editable install again
    return text.hexdigest()


def pip(*arguments: str, to: Path = LOG) -> bool:
    """Install, with the output in a log; no bytecode, which takes 35 s on one core, mostly for what nothing imports."""
    fixed = ["install", "--no-compile", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    command = [str(PYTHON), "-m", "pip", *fixed, "-c", str(ROOT / "requirements/constraints.txt"), *arguments]
    with to.open("a") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode == 0


def compiling() -> subprocess.Popen[bytes]:
    """Start to compile what nearly every process imports; other modules are compiled when they are imported."""
    where = next(VENV.glob("[lL]ib/**/site-packages"))
    return subprocess.Popen([str(PYTHON), "-m", "compileall", "-qq", "torch", "sympy", "mpmath"], cwd=where)


def failed(step: str) -> SetupError:
    tail = "\n".join("    " + line for line in LOG.read_text().splitlines()[-12:])
    return SetupError(f"{step} failed; the end of {LOG.relative_to(ROOT)}:\n{tail}")


def say(text: str) -> None:
    print(f"setup: {text}\n", end="", flush=True)  # in one write: two threads say what they do


def make_venv() -> None:
    if PYTHON.exists():
        probe = "import sys; sys.exit(sys.version_info[:2] < (3, 11))"
        if subprocess.run([str(PYTHON), "-c", probe], check=False).returncode != 0:
            raise SetupError(".venv is there, but its Python is broken or older than 3.11: delete .venv, run again")
        return
    say(f".venv with Python {platform.python_version()}")
    made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        why = made.stdout + made.stderr
        raise SetupError(f"python3 -m venv failed (on Debian and Ubuntu: apt install python3-venv)\n{why}")


def install_torch(kind: str) -> None:
    for words, arguments in torch_attempts(kind):
        say(f"torch {TORCH}: {words}")
        if pip(*arguments):
            return
    raise failed("installing torch")


def install_alone(names: list[str], *where: str, to: Path = LOG) -> None:
    """Install what a few tests and an example need, without dependencies; a failure stops nothing."""
    say(f"{', '.join(names)}: alone, without dependencies")
    if not pip("--no-deps", *where, *names, to=to):
        again = f"{to.relative_to(ROOT)} says why; to try again delete {STAMP.relative_to(ROOT)}"
        say(f"{names[0]} could not be installed, nor what is beside it; their tests will be skipped ({again})")


def install(kind: str) -> None:
    make_venv()
    LOG.write_text("")
    LOG_APART.write_text("")
    folders = ([*APART], FRAMEWORKS), ([*PACKAGES], ORACLES), ([*JAX], ORACLES), ([f"triton=={OLDEST_TRITON}"], OLDEST)
    given = "--upgrade", "--ignore-requires-python", "--target"  # emerging_optimizers' tests run with 3.11 too
    pool = ThreadPoolExecutor(1)  # for folders of their own, beside the environment: pip works on one core
    apart = [pool.submit(install_alone, names, *given, str(x), to=LOG_APART) for names, x in folders]
    try:
        install_torch(kind)
        bytecode = compiling()
        triton = triton_requirement(kind)
        say("the packages of requirements/dev.txt" + (f" and triton {TRITON}" if triton else ""))
        if not pip("-r", str(ROOT / "requirements/dev.txt"), *triton):
            raise failed("installing the pinned packages")
        install_alone([*BARE])
        say("optgen itself (editable)")
        if not pip("--no-build-isolation", "--no-deps", "--editable", str(ROOT)):
            raise failed("installing optgen")
        for done in apart:
            done.result()
    finally:  # no further folder where something failed, or Ctrl-C was pressed
        pool.shutdown(cancel_futures=True)
    bytecode.wait()
    check = "import torch, optgen; print(torch.__version__, 'with CUDA' if torch.cuda.is_available() else 'on the CPU')"
    answer = subprocess.run([str(PYTHON), "-c", check], cwd=VENV, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise SetupError(f"torch or optgen does not import:\n{answer.stderr}")
    say(f"torch {answer.stdout.strip()}")


def main() -> int:
    if sys.version_info < MIN_PYTHON:
        found = platform.python_version()
        print(f"setup: optgen needs Python 3.11 or newer, {sys.executable} is {found}", file=sys.stderr)
        return 2
    try:
        kind = wanted_torch()
        now = fingerprint(kind)
        if PYTHON.exists() and STAMP.is_file() and STAMP.read_text() == now:
            return 0
        start = time.monotonic()
        install(kind)
        STAMP.write_text(now)
        say(f"ready in {time.monotonic() - start:.0f} s")
    except SetupError as failure:
        print(f"setup: {failure}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
