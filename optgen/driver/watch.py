"""`optgen build --watch`: build again whenever a spec, a plan or the project's table changes.

Every build is a process of its own, so that modules imported by a changed file are read again as well.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from optgen.base.errors import UserError
from optgen.driver import load
from optgen.driver.build import Request, read_manifest
from optgen.driver.project import placed, read_config
from optgen.driver.terminal import Terminal

INTERVAL = 0.3  # seconds between two looks

Stamps = dict[Path, tuple[int, int]]


def stamps(project: Path, names: Sequence[str], plans: Sequence[str] = (), out: str | None = None) -> Stamps:
    """Return every watched file with its modification time and size; files that are gone are left out.

    They are the project's table, all of specs/, and the files outside of it that the command line, the table or an
    earlier build names.
    """
    files = {project / "pyproject.toml"}
    for reference in (*names, *plans, *_elsewhere(project, out)):
        stem, end, _ = reference.rpartition(".py")
        files |= {Path(stem + end)} if end else set()
    for folder in load.folders(project):
        with contextlib.suppress(UserError):  # the build says that a folder cannot be read
            files |= set(load.python_files(folder))
    seen: Stamps = {}
    for file in sorted(files):
        with contextlib.suppress(OSError):
            found = file.stat()
            seen[file] = found.st_mtime_ns, found.st_size
    return seen


def _elsewhere(project: Path, out: str | None) -> Iterator[str]:
    """Yield the references to specs and plans in the table and the manifest; the build reports errors in either."""
    with contextlib.suppress(UserError):
        config = read_config(project)
        yield from (placed(name, project) for rule in config.build or () for name in (*rule.specs, *rule.plans))
        built = read_manifest(Path.cwd() / out if out is not None else project / config.out)
        yield from (str(project / spec.reference) for spec in built.specs.values())


def watch(
    terminal: Terminal, request: Request, arguments: Sequence[str], keep_on: Callable[[], bool] = lambda: True
) -> None:
    """Build now and after every change, until interrupted; `arguments` are those of the command without --watch."""
    terminal.silent = True  # every build reports its own result
    before: Stamps = {}
    try:
        while keep_on():
            now = stamps(request.project, request.names, request.plans, request.out)
            if now != before:
                if before:
                    changed = [p.name for p in sorted(set(now) | set(before)) if now.get(p) != before.get(p)]
                    terminal.log(f"changed: {', '.join(changed)}", "dim")
                before = now
                # Its errors are on stderr already; the next change gives it another try.
                subprocess.run([sys.executable, "-m", "optgen", *arguments], check=False)
            time.sleep(INTERVAL)
    except KeyboardInterrupt:
        terminal.log("stopped", "dim")
