"""The command line: arguments in, one function of the driver, words out.

Heavy imports stand inside the commands, so that `optgen --help` is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optgen.driver.terminal import Terminal, run, session

if TYPE_CHECKING:
    from optgen.formats.plan import Plan
    from optgen.lang.spec import Spec

app = typer.Typer(
    name="optgen",
    help="A compiler for optimizers: a 20-line update rule becomes a fused, low-memory torch optimizer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 fine, 1 a check found something, 2 wrong input, 3 not on this machine, 70 a fault of optgen.",
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
SpecName = Annotated[str, typer.Argument(metavar="SPEC", help="A spec: its name, its file, or file.py:name.")]
PlanName = Annotated[str, typer.Option("--plan", help="A plan: its name, or plans.py:name.")]
DEFAULT_PLAN = "int8_split24"


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> str:
    from optgen.base.errors import UserError, did_you_mean

    if value not in allowed:
        want = f"one of {', '.join(allowed)}"
        raise UserError("E411", option=option, want=want, got=value, hint=did_you_mean(value, allowed))
    return value


def _pair(spec: str, plan: str) -> tuple[Spec, Plan]:
    from optgen.driver import load

    found = load.find_spec(spec)
    found.check()
    return found, load.find_plan(plan)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and stop.")] = False,
) -> None:
    if version:
        import optgen

        typer.echo(f"optgen {optgen.__version__}")
        raise typer.Exit


@app.command()
def new(name: Annotated[str, typer.Argument(help="The rule's name: my_rule, or MyRule.")], json: Json = False) -> None:
    """Start a spec: specs/NAME.py, which builds as it stands."""
    with session("new", json) as t:
        from optgen.base.loc import relative
        from optgen.driver.new import new as write

        file = relative(str(write(name)))
        t.result["file"] = file
        t.show(f"{file}: edit it, then `optgen build`")


@app.command()
def build(
    names: Annotated[list[str] | None, typer.Argument(metavar="[SPEC]...", help="Specs; none: the project's.")] = None,
    plan: Annotated[list[str] | None, typer.Option("--plan", help="Plans (repeatable; patterns allowed).")] = None,
    backend: Annotated[
        list[str] | None, typer.Option("--backend", help="triton or reference (repeatable; the reference is always there).")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", help="The folder to write. [default: generated]")] = None,
    maths: Annotated[str | None, typer.Option("--maths", help="strict or fast kernels. [default: fast]")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; print what would change; exit 1 if anything.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Build again whenever a spec or plan changes.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite edited files; build plans that the lint refuses.")] = False,
    json: Json = False,
) -> None:
    """Print the generated package: all of it, or the named specs."""
    with session("build", json) as t:
        from optgen.driver import build as b
        from optgen.driver.project import BACKENDS, MATHS

        for name in backend or ():
            _choice("--backend", name, BACKENDS)
        if maths is not None:
            _choice("--maths", maths, MATHS)
        if watch:
            from optgen.driver.watch import watch as keep_building

            keep_building(t, Path.cwd(), names or [], plan or [], backend or [], out, maths, force)
            return
        request = b.Request(
            tuple(names or ()), tuple(plan or ()), tuple(backend or ()), out, maths, check, force  # type: ignore[arg-type]
        )
        outcome = b.build(request, lambda items, total: t.track(items, total, "printing"))
        _tell_build(t, outcome, check)


def _tell_build(t: Terminal, outcome: Any, check: bool) -> None:
    for line in outcome.warnings:
        t.log(f"warning: {line}", "yellow")
    for line in outcome.skipped:
        t.log(f"left out: {line}", "dim")
    t.result |= {
        "out": outcome.out, "written": outcome.written, "removed": outcome.removed, "unchanged": outcome.unchanged,
        "skipped": outcome.skipped, "warnings": outcome.warnings,
    }  # fmt: skip
    if check:
        t.result["diff"] = outcome.diff
        if not outcome.clean:
            t.show(outcome.diff.rstrip("\n"))
            t.log(f"{outcome.out} is not what these specs and plans build: run `optgen build`", "red")
            t.fail()
        else:
            t.show(f"{outcome.out} is up to date ({outcome.unchanged} files)")
        return
    changed = f"{len(outcome.written)} written, {len(outcome.removed)} removed, {outcome.unchanged} unchanged"
    t.show(f"{outcome.out}: {changed}")


def main(arguments: list[str] | None = None) -> int:
    """The command `optgen`: its exit code."""
    return run(app, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
