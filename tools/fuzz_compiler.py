"""Run random programs (tests/programs.py) for some minutes, and keep the shrunk text of each kind that fails.

    python tools/fuzz_compiler.py --minutes 60 --seed 1

Batches have a process and a cache of kernels of their own.  One of five (--emulated) has a sixth of the programs, whose
Triton kernels are compiled for sm_90, executed by emulation (tests/ptx) and searched for races.  A failure is shrunk
for a minute and written to tests/cases/programs (or --keep), where tests/test_programs.py repeats it; failures of a
kind that was met before are counted.  Ends with 1 where there was any.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHRINK_SECONDS = 60.0


def kind(error: BaseException) -> str:
    """Return what failures of one kind share: the message without numbers and names."""
    lines = f"{type(error).__name__}: {error}".replace("\\", "").splitlines()
    said = next((line for line in lines if "error:" in line and "error: " in line), lines[0])
    return re.sub(r"\(?\d[\d.e+-]*,?\)?|\bs\d\b|_?(b?float\d*\w*)", "#", said)[-240:]


def batch(seed: int, count: int, keep: Path) -> dict[str, object]:
    """Run a number of programs under a seed up to the first that fails, which is shrunk and kept."""
    import torch
    from hypothesis import HealthCheck, Phase, given, reject, settings
    from hypothesis import seed as seeded

    from tests.interpreter import quicken

    torch.set_num_threads(1)
    if emulated := "OPTGEN_EMULATE" in os.environ:
        from tests.ptx import driver

        driver.install(int(os.environ["OPTGEN_EMULATE"]))
    else:
        quicken()
    from tests import programs

    refused: Counter[str] = Counter()
    ran, until = 0, 0.0
    failed: list[tuple[programs.Case, BaseException]] = []

    def one(case: programs.Case) -> None:
        nonlocal ran, until
        if failed and time.monotonic() > until and case != failed[-1][0]:
            reject()
        ran += not failed
        try:
            with tempfile.TemporaryDirectory() as folder:
                programs.run(replace(case, kernels="triton fast") if emulated else case, Path(folder))
        except programs.Refused as refusal:
            refused[str(refusal)[:60]] += not failed
        except Exception as error:
            if failed and kind(error) != kind(failed[0][1]):
                return  # of another kind: not what is being shrunk
            until = until or time.monotonic() + SHRINK_SECONDS
            failed.append((case, error))
            raise

    check = settings(
        max_examples=count, deadline=None, database=None, print_blob=False, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )(seeded(seed)(given(programs.cases())(one)))  # fmt: skip
    try:
        check()
    except Exception:
        if not failed:
            raise
    found = ""
    if failed:
        case, error = min(failed, key=lambda x: len(str(x[0])))
        found = kind(error)
        keep.mkdir(parents=True, exist_ok=True)
        about = f"{type(error).__name__}: {error}".replace("\\", "").splitlines()[0][:600]
        (keep / f"seed_{seed}.txt").write_text(f"{case}# {about}\n", encoding="utf-8")
    return {"ran": ran, "refused": dict(refused), "found": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument("--count", type=int, default=60, help="programs of a batch")
    parser.add_argument("--emulated", type=int, default=5, help="one batch of so many is emulated; 0: none")
    parser.add_argument("--keep", type=Path, default=ROOT / "tests" / "cases" / "programs")
    parser.add_argument("--batch", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.batch:
        sys.path.insert(0, str(ROOT))
        print(json.dumps(batch(asked.seed, asked.count, asked.keep)))
        return 0
    print(f"seed {asked.seed}", flush=True)
    end, seed, ran = time.monotonic() + 60 * asked.minutes, asked.seed, 0
    refused: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    emulation = {"OPTGEN_EMULATE": "90", "OPTGEN_RACES": "1"}
    while time.monotonic() < end:
        emulated = asked.emulated > 0 and (seed - asked.seed) % asked.emulated == asked.emulated - 1
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "OPTGEN_CACHE": cache, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
            environment |= emulation | {"TRITON_CACHE_DIR": cache} if emulated else {"TRITON_INTERPRET": "1"}
            count = -(-asked.count // 6) if emulated else asked.count
            own = [f"--seed={seed}", f"--count={count}", f"--keep={asked.keep}"]
            command = [sys.executable, __file__, "--batch", *own]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        try:
            result = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            found = f"the process ended with {done.returncode}: {done.stderr[-400:]}"
            result = {"ran": 0, "refused": {}, "found": found}
        ran += result["ran"]
        refused.update(result["refused"])
        if result["found"]:
            if kinds[result["found"]]:
                (asked.keep / f"seed_{seed}.txt").unlink(missing_ok=True)
            kinds[result["found"]] += 1
            print(f"seed {seed}: {result['found']}", flush=True)
        counts = f"{ran} programs, {sum(refused.values()) / max(ran, 1):.0%} refused, {sum(kinds.values())} failures"
        print(f"{time.strftime('%H:%M')} {counts}", flush=True)
        seed += 1
    print(f"refusals: {refused.most_common(8)}\nkinds of failures: {kinds.most_common()}")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
