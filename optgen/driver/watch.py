"""`optgen build --watch`: builds again whenever a spec, a plan or the project's table changes.

Every build is a process of its own, so that what a changed file imports is read anew as well.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from optgen.base.errors import UserError
from optgen.driver import load
from optgen.driver.terminal import Terminal

INTERVAL = 0.3  # seconds between two looks

Stamps = dict[Path, tuple[int, int]]


def stamps(project: Path, names: Sequence[str]) -> Stamps:
    """Every watched file with its time and size; a file that goes away between two calls is left out."""
    files = {project / "pyproject.toml", *(Path(n.rpartition(".py:")[0] + ".py" if ".py:" in n else n) for n in names)}
    for folder in load.folders(project):
        with contextlib.suppress(UserError):  # the build says that a folder cannot be read
            files |= set(load.python_files(folder))
    out: Stamps = {}
    for file in sorted(files):
        try:
            found = file.stat()
        except OSError:
            continue
        out[file] = found.st_mtime_ns, found.st_size
    return out


def watch(
    terminal: Terminal,
    project: Path,
    names: Sequence[str],
    plans: Sequence[str],
    backends: Sequence[str],
    out: str | None,
    maths: str | None,
    force: bool,
    keep_on: Callable[[], bool] = lambda: True,
) -> None:
    """Builds now and after every change, until interrupted."""
    command = [sys.executable, "-m", "optgen", "build", *names]
    for option, values in (("--plan", plans), ("--backend", backends)):
        for value in values:
            command += [option, value]
    command += ["--out", out] if out is not None else []
    command += ["--maths", maths] if maths is not None else []
    command += ["--force"] if force else []
    command += ["--json"] if terminal.as_json else []
    terminal.silent = True  # every build says its own
    before: Stamps = {}
    try:
        while keep_on():
            now = stamps(project, names)
            if now != before:
                if before:
                    changed = [p.name for p in sorted(set(now) | set(before)) if now.get(p) != before.get(p)]
                    terminal.log(f"changed: {', '.join(changed)}", "dim")
                before = now
                # Its errors stand on stderr already; the next change gives it another try.
                subprocess.run(command, check=False)
            time.sleep(INTERVAL)
    except KeyboardInterrupt:
        terminal.log("stopped", "dim")
