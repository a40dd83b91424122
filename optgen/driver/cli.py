"""The command line: each command calls one function of the driver and reports its result.

Heavy imports stand inside the commands, so that `optgen --help` is quick.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from optgen.base import ready
from optgen.base.errors import UserError, did_you_mean
from optgen.base.loc import relative
from optgen.driver.terminal import MISSING, Terminal, as_fields, interpreted, run, session, table

if TYPE_CHECKING:
    from optgen.driver.project import Maths
    from optgen.formats.plan import Plan
    from optgen.lang.spec import Spec

app = typer.Typer(
    name="optgen",
    help="A compiler for optimizers: a 20-line update rule becomes a fused, low-memory torch optimizer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout and sys.stdout.isatty() else None,  # no boxes in pipes
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 fine, 1 a check found something, 2 wrong input, 3 not on this machine, 70 a fault of optgen, "
    "130 interrupted.",
)

Plans = Annotated[list[str] | None, typer.Option("--plan", help="Plans (repeatable; patterns allowed); none: all.")]
SpecName = Annotated[str, typer.Argument(metavar="SPEC", help="A spec: its name, its file, or file.py:name.")]
SpecNames = Annotated[list[str] | None, typer.Argument(metavar="SPEC", help="Specs; none: the project's.")]
PlanName = Annotated[str, typer.Option("--plan", help="A plan: its name, or plans.py:name.")]
Param = Annotated[str, typer.Option("--param", help="The parameter's dtype.")]
Flags = Annotated[list[str] | None, typer.Option("--flag", help="A flag to turn over: amsgrad (repeatable).")]
DEFAULT_PLAN = "int8_split24"
NO_SPECS = "nothing to check: specs/ holds no spec; `optgen new my_rule` starts one"


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        want = f"one of {', '.join(allowed)}"
        raise UserError("E411", option=option, want=want, got=value, hint=did_you_mean(value, allowed))
    return value


def _maths(value: str) -> Maths:
    from optgen.driver.project import MATHS

    return cast("Maths", _choice("--maths", value, MATHS))


def _pair(spec: str, plan: str) -> tuple[Spec, Plan]:
    from optgen.driver import load

    found = load.find_spec(spec)
    found.check()
    return found, load.find_plan(plan)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and stop.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only results, warnings and errors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also the log, times and tracebacks.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Read the options of all commands."""
    Terminal.quiet, Terminal.verbose, Terminal.as_json = quiet, verbose, json
    if version:
        import optgen

        typer.echo(f"optgen {optgen.__version__}")
        raise typer.Exit


@app.command()
def new(name: Annotated[str, typer.Argument(help="The rule's name: my_rule, or MyRule.")]) -> None:
    """Start a spec: specs/NAME.py, which builds as it stands."""
    with session("new") as t:
        from optgen.driver.new import new as write

        path = write(name)
        file = relative(str(path))
        t.result["file"] = file
        t.show(f"{file}: edit it, then `optgen build`")
        if path.parent != ready.specs_dir() and (ready.specs_dir() / path.name).is_file():
            t.log(f"it shadows a ready-made optimizer: `{path.stem}` is this file in this project", "yellow")


@app.command()
def build(
    names: SpecNames = None,
    plan: Annotated[list[str] | None, typer.Option("--plan", help="Plans (repeatable; patterns allowed).")] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", help="triton, cpp, reference (always there); repeatable."),
    ] = None,
    out: Annotated[str | None, typer.Option("--out", help="The folder to write; none: the project's.")] = None,
    maths: Annotated[str | None, typer.Option("--maths", help="strict or fast; none: the project's.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; show what would change; exit 1 if anything.")
    ] = False,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="Write one file of one spec and plan: torch, and Triton on a GPU.")
    ] = False,
) -> None:
    """Generate the package: all of it, or the named specs."""
    with session("build") as t:
        if standalone:
            given = {"--check": check, "--backend": backend, "--maths": maths}
            _standalone(t, [*(names or ())], [*(plan or ())], out, [name for name, value in given.items() if value])
            return
        from optgen.driver import build as b
        from optgen.driver.emit import BACKENDS

        for name in backend or ():
            _choice("--backend", name, tuple(BACKENDS))
        chosen = None if maths is None else _maths(maths)
        request = b.Request(tuple(names or ()), tuple(plan or ()), tuple(backend or ()), out, chosen, check)
        outcome = b.build(request, lambda items, total: t.track(items, total, "generating"))
        _tell_build(t, outcome, check)


def _standalone(t: Terminal, names: list[str], plans: list[str], out: str | None, more: list[str]) -> None:
    from optgen.driver import load, standalone

    if more:
        raise UserError("E411", option="--standalone", want="for one file", got=more[0])
    if len(names) != 1 or len(plans) != 1:
        got = " ".join([*names, *plans])
        raise UserError("E411", option="--standalone", want="for one spec and one --plan", got=got)
    if find_spec("triton") is None:
        t.warn("warning: the file gets no GPU kernels, as Triton is not installed: it steps in eager torch")
    text = standalone.text(load.find_spec(names[0]), load.find_plan(plans[0]))
    t.result["text"] = text
    if out is None:
        t.show(text.rstrip("\n"))
        return
    t.result["file"] = standalone.write(out, text)
    t.show(f"{t.result['file']}: {len(text.splitlines())} lines")


def _tell_build(t: Terminal, outcome: Any, check: bool) -> None:
    for line in outcome.warnings:
        t.warn(f"warning: {line}")
    for line in outcome.skipped:
        t.log(f"left out: {line}", "dim")
    told = ("out", "written", "removed", "unchanged", "skipped", "warnings")
    t.result |= {name: getattr(outcome, name) for name in told}
    if check:
        t.result["diff"] = outcome.diff
        if not outcome.clean:
            t.show(outcome.diff.rstrip("\n"))
            names = [*outcome.written, *outcome.removed]
            which = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
            t.log(f"{outcome.out} is not what these specs and plans build ({which}): run `optgen build`", "red")
            t.fail()
        else:
            t.show(f"{outcome.out} is up to date ({outcome.unchanged} files)")
        return
    changed = f"{len(outcome.written)} written, {len(outcome.removed)} removed, {outcome.unchanged} unchanged"
    t.show(f"{outcome.out}: {changed}")
    package = outcome.out.replace("/", ".")
    if outcome.written and all(name.isidentifier() for name in package.split(".")):
        more = ", ..." if len(outcome.classes) > 3 else ""
        t.show(f"from {package} import {', '.join(outcome.classes[:3])}{more}")


@app.command("list")
def list_(
    pattern: Annotated[str, typer.Argument(metavar="PATTERN", help='Names, such as "adam*"; none: all.')] = "*",
) -> None:
    """List the optimizers and plans that can be named."""
    with session("list") as t:
        from optgen.driver import load, overview

        specs = [overview.of_entry(e) for name, e in load.entries().items() if fnmatch.fnmatchcase(name, pattern)]
        plans = [overview.of_plan(p) for name, p in load.plans().items() if fnmatch.fnmatchcase(name, pattern)]
        if not specs and not plans:
            known = [*load.entries(), *load.plans()]
            want, hint = "the name of an optimizer or a plan, or a pattern of some", did_you_mean(pattern, known)
            raise UserError("E411", option="PATTERN", want=want, got=pattern, hint=hint)
        t.result |= {"specs": specs, "plans": plans, "warnings": load.idle()}
        made = [(r["name"], r["class"], r["states"], relative(r["file"]) if r["own"] else "") for r in specs]
        if made:
            t.show(table("optimizers (with a file: of this project)", ("spec", "class", "states", "file"), made))
        if not plans:
            return
        rows = [(r["name"], r["bytes"], r["bytes_float32"], r["discouraged"], r["doc"]) for r in plans]
        t.show(table("plans", ("plan", "bf16*", "fp32*", "", ""), rows))
        t.show("* bytes of AdamW's weight and states per parameter of that dtype; gradients not counted")
        _warn_of_idle(t)
        t.show("discouraged: the lint finds an error for AdamW's kind of states; using the plan warns (optgen explain)")


@app.command()
def check(names: SpecNames = None, plan: Plans = None) -> None:
    """Read and verify specs, and judge plans for them; build nothing."""
    with session("check") as t:
        from optgen.driver import overview

        rows, errors = overview.check(names or [], plan or [], lambda items, total: t.track(items, total, "checking"))
        t.result |= {"specs": rows, "errors": list(map(as_fields, errors))}
        found = {v["verdict"] for r in rows for v in r["plans"].values()}
        if rows:
            t.show(_verdicts(rows, [x for x in ("ok", "discouraged", "refused", "does not fit") if x in found]))
        for row in rows:
            _tell_findings(t, row, bool(names))
        for error in errors:
            t.log(str(error), "red")
            t.fail(2)
        if not names:
            _warn_of_idle(t)
        if "discouraged" in found:
            t.show("discouraged: the lint finds an error; using the plan warns (optgen explain says why it exists)")
        if plan and found & {"refused", "does not fit"}:
            t.fail(1)
        else:
            _tell_count(t, len(rows), len(errors))


def _tell_count(t: Terminal, sound: int, wrong: int) -> None:
    if wrong:
        t.log(f"{wrong} of {sound + wrong} specs have errors", "red")
    else:
        t.show(f"{sound} spec{' is' if sound == 1 else 's are'} fine" if sound else NO_SPECS)


def _warn_of_idle(t: Terminal) -> None:
    from optgen.driver import load

    for line in load.idle():
        t.warn(line)


def _verdicts(rows: list[dict[str, Any]], kinds: list[str]) -> Any:
    """Return a table with plans in its cells: a column for each plan would be too narrow for its name."""
    columns = [[", ".join(p for p, v in r["plans"].items() if v["verdict"] == kind) for r in rows] for kind in kinds]
    return table("", ("spec", *kinds), zip([r["name"] for r in rows], *columns, strict=True))


def _tell_findings(t: Terminal, row: dict[str, Any], all_plans: bool) -> None:
    """Show each finding once, with its plans: most plans share theirs with others."""
    said: dict[str, list[str]] = {}
    for name, verdict in row["plans"].items():
        for finding in verdict["findings"]:
            if all_plans or verdict["verdict"] in ("refused", "does not fit"):
                said.setdefault(finding, []).append(name)
    for finding, under in said.items():
        t.show(f"{row['name']} under {', '.join(under)}: {finding}")
    for note in row["notes"]:
        t.log(f"{row['name']}: {note}", "yellow")


@app.command()
def show(
    spec: SpecName,
    plan: PlanName = DEFAULT_PLAN,
    param: Param = "bfloat16",
    flag: Flags = None,
    maths: Annotated[str, typer.Option("--maths", help="strict or fast.")] = "fast",
    after: Annotated[str | None, typer.Option("--pass", help="The IR after this pass, for instance fold.")] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Only the lines that each pass changes.")] = False,
) -> None:
    """Show the program of a rule, how many lines each pass changes, and the codecs of its plan; with --pass one IR."""
    with session("show") as t:
        from optgen.driver import explain as e

        found, chosen = _pair(spec, plan)
        case = e.case_of(found, chosen, _param(param), _flags(found, flag or []))
        t.result |= {"spec": found.name, "plan": chosen.name, "param": param, "flags": dict(case.flags), "stages": []}
        stages = e.stages(found, chosen, case, _maths(maths))
        if after is not None:
            _choice("--pass", after, tuple(dict.fromkeys(stage.name for stage in stages)))
        for stage in stages:
            if after in (None, stage.name):
                t.result["stages"].append({"pass": stage.name, "changed": stage.changed, "text": stage.text})
                whole = not diff and (after is not None or stage.diff == stage.text)
                if whole or (diff and stage.changed):
                    t.show(f"-- {stage.name}\n" + (stage.text if whole else stage.diff).rstrip())
                else:
                    count = sum(line.startswith("+") for line in stage.diff.splitlines())
                    t.show(f"-- {stage.name}  ({f'new lines: {count}' if stage.changed else 'unchanged'})")


@app.command()
def explain(
    spec: SpecName,
    plan: PlanName = DEFAULT_PLAN,
    param: Param = "bfloat16",
    flag: Flags = None,
) -> None:
    """Explain memory, error bounds, traffic, sweeps and the lint's verdict."""
    with session("explain") as t:
        from optgen.driver import explain as e

        found, chosen = _pair(spec, plan)
        x = e.explain(found, chosen, _param(param), _flags(found, flag or []))
        t.result |= asdict(x) | {"traffic": x.traffic, "findings": [str(f) for f in x.findings], "verdict": x.verdict}
        _tell_explanation(t, x)


def _tell_explanation(t: Terminal, x: Any) -> None:
    flags = ", ".join(f"{k}={v}" for k, v in x.flags.items())
    head = f"{x.spec} under {x.plan}, {x.param} parameters" + (f", {flags}" if flags else "")
    t.show_filled(x.verdict, 0)
    t.show_filled(f"{head}  ({x.source})", 4)
    for line in x.formulas:
        t.show_filled(f"    {line}", 8)
    rows = [(k.name, k.stored, f"{k.bytes:g}", k.error, k.valid) for k in x.memory]
    rows.append(("total", "", f"{x.total:g}", "", f"{x.plain:g} in fp32"))
    t.show(table("between steps", ("value", "stored as", "B/param", "|error| <=", "where"), rows))
    for k in x.memory:
        if k.steady:
            t.show_filled(f"stored again at every step  {k.name}: {k.steady}", 28)
    for n, s in enumerate(x.sweeps, 1):
        what = [f"writes {' '.join(s.writes)}"] if s.writes else []
        what += [f"reduces {', '.join(s.reduces)}"] if s.reduces else []
        did = "; ".join([f"reads {' '.join(s.reads)}", *what])
        t.show_filled(f"sweep {n}/{len(x.sweeps)}  {did}: {s.bytes:g} B per parameter")
    speed = f"{x.traffic / 4.8:.3g} ms per 1e9 parameters at 4.8 TB/s"  # the memory of an H200
    t.show_filled(f"why        {x.sweeps[-1].why}")
    t.show_filled(f"traffic    {x.traffic:g} B per parameter and step; {speed}")
    t.show_filled(f"host       {len(x.host)} scalars in fp64 per step: " + ", ".join(name for name, _ in x.host))
    if x.rules:
        t.show_filled(f"fast maths rounds differently by: {', '.join(x.rules)}")
    for f in x.findings:
        t.show_filled(f"lint       {f}")
    if x.discouraged:
        t.show_filled(f"discouraged {x.discouraged}", 12)
    elif not x.findings:
        t.show("lint       nothing to say")


@app.command()
def fuzz(
    spec: SpecName,
    plan: PlanName = DEFAULT_PLAN,
    examples: Annotated[int, typer.Option("--examples", "-n", min=1, help="How many to draw.")] = 100,
    seed: Annotated[int, typer.Option("--seed", help="Another seed, other examples.")] = 0,
    backend: Annotated[
        str, typer.Option("--backend", help="reference, cpp, or triton (interpreted without a GPU).")
    ] = "reference",
    maths: Annotated[str, typer.Option("--maths", help="For triton and cpp: strict or fast.")] = "fast",
    steps: Annotated[int, typer.Option("--steps", min=1, help="At most this many steps per example.")] = 4,
    case: Annotated[str | None, typer.Option("--case", help="One example, as a failure reports it.")] = None,
) -> None:
    """Test random inputs against the derived bounds and the fp64 oracle, and show the worst case found."""
    with session("fuzz") as t:
        from optgen.driver import fuzz as f
        from optgen.driver.emit import BACKENDS

        found, chosen = _pair(spec, plan)
        _choice("--backend", backend, tuple(BACKENDS))
        if backend == "triton" and interpreted(t, ARGUMENTS):
            return
        one = f.read_example(case) if case is not None else None
        f.keep_away_from(Path.cwd())
        with t.counter("examples", examples) as advance:
            result = f.fuzz(
                found, chosen, count=examples, random_seed=seed, backend=backend, maths=_maths(maths),
                steps=steps, case=one, progress=advance, reference=spec,
            )  # fmt: skip
        _tell_fuzz(t, found.name, chosen.name, result)


def _tell_fuzz(t: Terminal, spec: str, plan: str, result: Any) -> None:
    worst = sorted(result.report.worst.values(), key=lambda w: -w.ratio) if result.report else []
    cases = {name: e.text() for name, e in result.worst_cases.items()}
    data = [{"value" if k == "name" else k: x for k, x in vars(w).items()} for w in worst]
    t.result |= {
        "spec": spec, "plan": plan, "examples": result.examples, "holds": result.ok and not result.unknown,
        "worst": [row | {"case": cases.get(row["value"], "")} for row in data],
        "reproduce": result.reproduce, "crash": result.crash,
        "unknown": dict(result.unknown), "unbounded": dict(result.unbounded),
    }  # fmt: skip
    columns = ("value", "error / bound", "error", "bound", "kept", "fp64 oracle")
    rows = [
        (w.name, f"{w.ratio:.4f}", f"{w.error:.3g}", f"{w.bound:.3g}", f"{w.got:.6g}", f"{w.exact:.6g}") for w in worst
    ]
    t.show(table("worst case found" if result.ok else "the shrunk failure", columns, rows))
    _tell_unbounded(t, result)
    if result.ok:
        others = "every other element" if result.unknown or result.unbounded else "every element"
        t.show(f"{spec} under {plan}: {result.examples} examples, {others} within its bound")
        return
    t.fail()
    broken = f"crashed: {result.crash}" if result.crash else f"outside its bound: {', '.join(result.report.broken)}"
    t.log(broken, "red")
    t.show(f"again: {result.reproduce}")


def _tell_unbounded(t: Terminal, result: Any) -> None:
    """Name the values that were not checked, because no bound is known of them."""
    for fmt in sorted(set(result.unknown.values())):
        t.fail()
        names = ", ".join(name for name, other in result.unknown.items() if other == fmt)
        t.log(f"no bound is known for {fmt}: what it kept of {names} was not checked", "red")
    if result.unbounded:
        counts = (f"{name} ({part:,} of {of:,} elements)" for name, (part, of) in result.unbounded.items())
        t.show(f"no bound is known of {', '.join(counts)}")


@app.command(name="verify-checkpoint")
def verify_checkpoint(file: Annotated[str, typer.Argument(metavar="FILE", help="A checkpoint.")]) -> None:
    """Check every byte of a checkpoint."""
    with session("verify-checkpoint") as t:
        from optgen.driver import checkpoints

        found = checkpoints.verify(file)
        t.result |= {"file": file, **found}
        for line in found["findings"]:
            t.log(line, "red")
            t.fail()
        if not found["findings"]:
            t.show(f"{file}: {found['parameters']} parameters, every byte as it was written")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint, ours or another package's.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="The file to write.")],
    plan: Annotated[str, typer.Option("--plan", help="The plan of the result, or `torch` for torch.optim.")],
    spec: Annotated[str | None, typer.Option("--spec", help="The rule, where SRC does not say it: adamw.")] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="The model's state dict, where SRC has none.")
    ] = None,
    param: Annotated[
        str | None, typer.Option("--param", help="The parameters' dtype in the result, instead of SRC's.")
    ] = None,
) -> None:
    """Convert a checkpoint: plan to plan, torch.optim and other packages to ours, ours to torch.optim."""
    with session("convert") as t:
        from optgen.driver import checkpoints

        if param is not None:
            _param(param)
        t.result |= checkpoints.convert(source, target, to=plan, spec=spec, weights=weights, param=param)
        done = t.result
        t.show(f"{target}: {done['parameters']} parameters, {done['elements']:,} elements, {done['bytes']:,} bytes")


@app.command()
def doctor() -> None:
    """Show what this machine has, and what follows from it."""
    with session("doctor") as t:
        from optgen.driver import doctor as d

        lines = d.doctor()
        t.result |= {"lines": [vars(line) for line in lines], "verdict": d.verdict(lines)}
        marks = {"ok": "ok", "note": "note", "warning": "WARNING", "missing": "MISSING"}
        t.show(table("", ("", "", "", ""), [(marks[x.verdict], x.what, x.found, x.advice) for x in lines]))
        t.show(t.result["verdict"])
        if any(x.verdict == "missing" for x in lines):
            t.fail(MISSING)


# -- shared


ARGUMENTS: list[str] = []
"""Arguments of the running command, for the commands that run it again in another process."""


def _param(name: str) -> str:
    from optgen.driver.targets import PARAM_DTYPES

    return _choice("--param", name, tuple(d.torch for d in PARAM_DTYPES))


def _flags(spec: Spec, turned: list[str]) -> dict[str, bool]:
    """Return the settings that `--flag` asks for: each named flag turned from its default."""
    known = {f.name: f.default for f in spec.flags}
    if turned and not known:
        raise UserError("E411", option="--flag", want=f"a flag of {spec.name}, which has none", got=turned[0])
    for name in turned:
        _choice("--flag", name, tuple(known))
    return {name: not known[name] for name in turned}


def main(arguments: list[str] | None = None) -> int:
    """Run the command `optgen` and return its exit code."""
    ARGUMENTS[:] = sys.argv[1:] if arguments is None else arguments
    # Options of all commands are read before the command's name, and may stand behind it.
    first = sorted(ARGUMENTS, key=lambda word: not re.fullmatch("-[qv]+|--quiet|--verbose|--json", word))
    return run(app, first)


if __name__ == "__main__":
    raise SystemExit(main())
