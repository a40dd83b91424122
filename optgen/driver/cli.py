"""The command line: each command calls one function of the driver and reports its result.

Heavy imports stand inside the commands, so that `optgen --help` is quick.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn, cast

import optgen
from optgen.base import ready
from optgen.base.errors import UserError, did_you_mean
from optgen.base.loc import relative
from optgen.driver.terminal import MISSING, OK, WRONG_INPUT, Missing, Terminal, as_fields, table

if TYPE_CHECKING:
    from optgen.driver.project import Maths
    from optgen.formats.plan import Plan
    from optgen.lang.spec import Spec

ABOUT = "A compiler for optimizers: a 20-line update rule becomes a fused, low-memory torch optimizer."
EXIT_CODES = (
    "Exit codes: 0 fine, 1 a check found something, 2 wrong input, 3 not on this machine, 70 a fault of optgen, "
    "130 interrupted."
)
DEFAULT_PLAN = "int8_split24"
NO_SPECS = "nothing to check: specs/ holds no spec; `optgen new my_rule` starts one"

Command = Callable[[Terminal, Namespace], None]
Arguments = tuple[tuple[str, dict[str, Any]], ...]
"""Names and settings of arguments, as argparse takes them; "-n --examples" are two names of one."""

COMMANDS: dict[str, tuple[Command, Arguments]] = {}
SPEC: tuple[str, dict[str, Any]] = ("spec", {"metavar": "SPEC", "help": "a spec: its name, its file, or file.py:name"})
TOPIC: tuple[str, dict[str, Any]] = (
    "spec", {"metavar": "NAME", "help": "a spec, as `optgen list` names it; or a plan, E101, L2"},
)  # fmt: skip
SPECS: tuple[str, dict[str, Any]] = ("specs", {"metavar": "SPEC", "nargs": "*", "help": "specs; none: the project's"})
PLANS: tuple[str, dict[str, Any]] = (
    "--plan", {"action": "append", "default": [], "help": "plans (repeatable; patterns allowed)"},
)  # fmt: skip
PAIR: Arguments = (SPEC, ("--plan", {"default": DEFAULT_PLAN, "help": "a plan: its name, or plans.py:name"}))
CASE: Arguments = (
    *PAIR,
    ("--param", {"default": "bfloat16", "help": "the parameter's dtype"}),
    ("--flag", {"action": "append", "default": [], "help": "a flag to turn over: amsgrad (repeatable)"}),
)


def command(name: str, *arguments: tuple[str, dict[str, Any]]) -> Callable[[Command], Command]:
    """Give a function the name of a command and its arguments."""

    def keep(function: Command) -> Command:
        COMMANDS[name] = function, arguments
        return function

    return keep


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        want = f"one of {', '.join(allowed)}"
        raise UserError("E411", option=option, want=want, got=value, hint=did_you_mean(value, allowed))
    return value


def _pair(spec: str, plan: str) -> tuple[Spec, Plan]:
    from optgen.driver import load

    found = load.find_spec(spec)
    found.check()
    return found, load.find_plan(plan)


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


@command("new", ("name", {"metavar": "NAME", "help": "the rule's name: my_rule, or MyRule"}))
def new(t: Terminal, given: Namespace) -> None:
    """Start a spec: specs/NAME.py, which builds as it stands."""
    from optgen.driver.new import new as write

    path = write(given.name)
    file = relative(str(path))
    t.result["file"] = file
    t.show(f"{file}: edit it, then `optgen build`")
    if path.parent != ready.specs_dir() and (ready.specs_dir() / path.name).is_file():
        t.note(f"it shadows a ready-made optimizer: `{path.stem}` is this file in this project")


@command(
    "build",
    SPECS,
    PLANS,
    ("--out", {"default": "", "help": "the folder to write, or the file; none: the project's"}),
    ("--check", {"action": "store_true", "help": "write nothing; show what would change; exit 1 if anything"}),
    ("--standalone", {"action": "store_true", "help": "write one file of one spec and plan"}),
)
def build(t: Terminal, given: Namespace) -> None:
    """Generate the project's package; with names of specs and --out, another one of these under --plan."""
    from optgen.driver import build as b
    from optgen.driver.project import DEFAULT_PLANS

    if given.standalone:
        _standalone(t, given)
        return
    if given.specs and not given.out or given.plan and not given.specs:
        got, want = " ".join([*given.specs, *given.plan]), "for specs that are named, which are built to another folder"
        hint = "optgen build NAME --plan PLAN --out FOLDER; without names, [tool.optgen] in pyproject.toml decides"
        raise UserError("E411", option="--out" if given.specs else "--plan", want=want, got=got, hint=hint)
    plans = tuple(given.plan) or DEFAULT_PLANS
    outcome = b.build(b.Request(tuple(given.specs), plans, given.out, given.check))
    for line in outcome.warnings:
        t.warn(f"warning: {line}")
    for line in outcome.skipped:
        t.note(f"left out: {line}")
    told = ("out", "written", "removed", "unchanged", "skipped", "warnings")
    t.result |= {name: getattr(outcome, name) for name in told}
    if not given.check:
        changed = f"{len(outcome.written)} written, {len(outcome.removed)} removed, {outcome.unchanged} unchanged"
        t.show(f"{outcome.out}: {changed}")
        return
    t.result["diff"] = outcome.diff
    if outcome.clean:
        t.show(f"{outcome.out} is up to date ({outcome.unchanged} files)")
        return
    t.show(outcome.diff.rstrip("\n"))
    names = [*outcome.written, *outcome.removed]
    which = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
    t.warn(f"{outcome.out} is not what these specs and plans build ({which}): run `optgen build`")
    t.fail()


def _standalone(t: Terminal, given: Namespace) -> None:
    from optgen.driver import load, standalone

    if len(given.specs) != 1 or len(given.plan) != 1 or given.check:
        got = " ".join([*given.specs, *given.plan, *["--check"] * given.check])
        raise UserError("E411", option="--standalone", want="for one spec and one --plan", got=got)
    if find_spec("triton") is None:
        t.warn("warning: the file gets no GPU kernels, as Triton is not installed: it steps in eager torch")
    text = standalone.text(load.find_spec(given.specs[0]), load.find_plan(given.plan[0]))
    t.result["text"] = text
    if not given.out:
        t.show(text.rstrip("\n"))
        return
    t.result["file"] = standalone.write(given.out, text)
    t.show(f"{t.result['file']}: {len(text.splitlines())} lines")


@command("list", ("pattern", {"metavar": "PATTERN", "nargs": "?", "default": "*", "help": 'names, such as "adam*"'}))
def list_(t: Terminal, given: Namespace) -> None:
    """List the optimizers and plans that can be named."""
    from optgen.driver import load, overview

    known = {**load.entries(), **load.plans()}
    names = set(fnmatch.filter(known, given.pattern))
    if not names:
        want, hint = "the name of an optimizer or a plan, or a pattern of some", did_you_mean(given.pattern, known)
        raise UserError("E411", option="PATTERN", want=want, got=given.pattern, hint=hint)
    specs = [overview.of_entry(e) for name, e in load.entries().items() if name in names]
    plans = [overview.of_plan(p) for name, p in load.plans().items() if name in names]
    t.result |= {"specs": specs, "plans": plans, "warnings": load.idle()}
    if specs:
        made = [(r["name"], r["class"], relative(r["file"]) if r["own"] else "", r["does"]) for r in specs]
        t.show(table(("spec", "class", "file, of this project", "does"), made))
    if plans:
        rows = [(r["name"], r["bytes"], r["bytes_float32"], r["discouraged"], r["doc"]) for r in plans]
        t.show("\n" + table(("plan", "bf16*", "fp32*", "", ""), rows))
        t.show("* bytes of AdamW's weight and states per parameter of that dtype; gradients not counted")
        t.show("discouraged: the lint finds an error for AdamW's kind of states; using the plan warns (optgen explain)")
    for line in load.idle():
        t.warn(line)


@command("check", SPECS, PLANS)
def check(t: Terminal, given: Namespace) -> None:
    """Read and verify specs, and judge plans for them; build nothing."""
    from optgen.driver import load, overview

    rows, errors = overview.check(given.specs, given.plan)
    t.result |= {"specs": rows, "errors": list(map(as_fields, errors))}
    found = {v["verdict"] for r in rows for v in r["plans"].values()}
    for row in rows:
        _tell_verdicts(t, row, bool(given.specs))
    for error in errors:
        t.warn(str(error))
        t.fail(WRONG_INPUT)
    for line in () if given.specs else load.idle():
        t.warn(line)
    if given.plan and found & {"refused", "does not fit"}:
        t.fail()
    elif errors:
        t.warn(f"{len(errors)} of {len(rows) + len(errors)} specs have errors")
    else:
        t.show(f"{len(rows)} spec{' is' if len(rows) == 1 else 's are'} fine" if rows else NO_SPECS)


def _tell_verdicts(t: Terminal, row: dict[str, Any], named: bool) -> None:
    """Show the plans of each verdict, and the findings under the plans asked for and those that refuse, each once."""
    verdicts: dict[str, list[str]] = {}
    for name, verdict in row["plans"].items():
        verdicts.setdefault(verdict["verdict"], []).append(name)
    for word, names in verdicts.items():
        t.show(f"{row['name']}: {word} under {', '.join(names)}")
    said: dict[str, list[str]] = {}
    for name, verdict in row["plans"].items():
        for finding in verdict["findings"]:
            if name in row["asked"] or verdict["verdict"] in ("refused", "does not fit"):
                said.setdefault(finding, []).append(name)
    for finding, under in said.items():
        t.show(f"{row['name']} under {', '.join(under)}: {finding}")
    for note in row["notes"]:
        t.note(f"{row['name']}: {note}")
    if named and "discouraged" in verdicts and not {*verdicts["discouraged"]} & {*row["asked"]}:
        t.note(f"{row['name']}: `optgen check {row['name']} --plan PLAN` shows why a plan is discouraged")


@command("show", *CASE)
def show(t: Terminal, given: Namespace) -> None:
    """Show the program of a rule and the codecs of its plan."""
    from optgen.driver import explain as e

    found, chosen = _pair(given.spec, given.plan)
    case = e.case_of(found, chosen, _param(given.param), _flags(found, given.flag))
    parts = e.parts(found, chosen, case)
    t.result |= {"spec": found.name, "plan": chosen.name, "param": given.param, "flags": dict(case.flags)}
    t.result["parts"] = parts
    for title, text in parts.items():
        t.show(f"-- {title}\n{text.rstrip()}")


@command("explain", TOPIC, *CASE[1:])
def explain(t: Terminal, given: Namespace) -> None:
    """Explain a rule under a plan (memory, error bounds, traffic, sweeps and the lint's verdict), or else a plan, an
    error's code, a finding of the lint."""
    from optgen.driver import explain as e
    from optgen.driver import topics

    if topic := list(topics.lines(given.spec)):
        t.result["text"] = topic
        t.show("\n".join(topic))
        return
    found, chosen = _pair(given.spec, given.plan)
    x = e.explain(found, chosen, _param(given.param), _flags(found, given.flag))
    t.result |= asdict(x) | {"traffic": x.traffic, "findings": [str(f) for f in x.findings], "verdict": x.verdict}
    t.show("\n".join(e.lines(x)))


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


@command(
    "fuzz",
    *PAIR,
    ("-n --examples", {"type": _count, "default": 100, "help": "how many to draw"}),
    ("--seed", {"type": int, "default": 0, "help": "another seed, other examples"}),
    ("--backend", {"default": "reference", "help": "reference, cpp, or triton (interpreted without a GPU)"}),
    ("--maths", {"default": "fast", "help": "for triton and cpp: strict or fast"}),
    ("--steps", {"type": _count, "default": 4, "help": "at most this many steps per example"}),
    ("--case", {"help": "one example, as a failure reports it"}),
)
def fuzz(t: Terminal, given: Namespace) -> None:
    """Test random inputs against the derived bounds and the fp64 oracle, and show the worst case found."""
    from optgen.driver.emit import BACKENDS
    from optgen.driver.project import MATHS

    found, chosen = _pair(given.spec, given.plan)
    _choice("--backend", given.backend, tuple(BACKENDS))
    maths = cast("Maths", _choice("--maths", given.maths, MATHS))
    if given.backend == "triton":
        _interpret()
    from optgen.driver import fuzz as f

    one = f.read_example(given.case) if given.case is not None else None
    result = f.fuzz(
        found, chosen, count=given.examples, random_seed=given.seed, backend=given.backend, maths=maths,
        steps=given.steps, case=one, reference=given.spec,
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
    rows = [
        (w.name, f"{w.ratio:.4f}", f"{w.error:.3g}", f"{w.bound:.3g}", f"{w.got:.6g}", f"{w.exact:.6g}") for w in worst
    ]
    t.show(table(("value", "error / bound", "error", "bound", "kept", "fp64 oracle"), rows))
    for name, fmt in result.unknown.items():
        t.fail()
        t.warn(f"no bound is known for {fmt}: what it kept of {name} was not checked")
    for name, (part, of) in result.unbounded.items():
        t.show(f"no bound is known of {name} ({part:,} of {of:,} elements)")
    if result.ok:
        others = "every other element" if result.unknown or result.unbounded else "every element"
        t.show(f"{spec} under {plan}: {result.examples} examples, {others} within its bound")
        return
    t.fail()
    t.warn(f"crashed: {result.crash}" if result.crash else f"outside its bound: {', '.join(result.report.broken)}")
    t.show(f"again: {result.reproduce}")


def _interpret() -> None:
    """Interpret Triton's kernels where there is no GPU, which is decided when Triton is imported."""
    if find_spec("triton") is None:
        raise Missing("Triton; `optgen doctor` says what is here")
    from torch import cuda

    if not cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


@command(
    "diagnose",
    ("--rule", {"required": True, "help": SPEC[1]["help"]}),
    ("--dtype", {"default": "bf16", "help": "of weights and states, as torch.optim has them: fp32, bf16, fp16"}),
    ("--lr", {"type": float, "help": "the rate; --betas and --eps, too, are the rule's own by default"}),
    ("--betas", {"type": float, "nargs": "+"}),
    ("--eps", {"type": float}),
    ("--weight-std", {"type": float, "default": 0.02, "help": "the standard deviation of weights"}),
    ("--gradient-std", {"type": float, "default": 1e-3, "help": "that of gradients, which are noise alone"}),
    ("--steps", {"type": _count, "default": 1000, "help": "after how many steps"}),
)
def diagnose(t: Terminal, given: Namespace) -> None:
    """Predict which share of weights and states rounding keeps where they are; optgen.diagnose(opt) measures it."""
    from optgen.driver import diagnose as d
    from optgen.driver import load

    found, dtype = load.find_spec(given.rule), _choice("--dtype", given.dtype, tuple(d.DTYPES))
    found.check()
    options = {name: x for name in ("lr", "betas", "eps") if (x := getattr(given, name)) is not None}
    settings = {name: getattr(given, name) for name in ("weight_std", "gradient_std", "steps")}
    rows, lost = d.predicted(found, dtype, options, **settings)
    t.result |= {"rule": found.name, "dtype": dtype, "lost_eps": lost, "stays": {row.name: row.stays for row in rows}}
    t.show(table(("",) * 5, [row.cells for row in rows]))
    if {**found.defaults, **options}.get("lr", 0.0) > d.COMPARED:
        t.warn(f"rates above {d.COMPARED:g} are beyond those compared with training: weights grow, and more stay")
    if lost:
        t.warn(lost)
    if lost or any((row.stays or 0.0) >= d.LEAST for row in rows):
        t.fail()


@command("verify-checkpoint", ("file", {"metavar": "FILE", "help": "a checkpoint"}))
def verify_checkpoint(t: Terminal, given: Namespace) -> None:
    """Check every byte of a checkpoint."""
    from optgen.driver import checkpoints

    found = checkpoints.verify(given.file)
    t.result |= {"file": given.file, **found}
    for line in found["findings"]:
        t.warn(line)
        t.fail()
    if not found["findings"]:
        t.show(f"{given.file}: {found['parameters']} parameters, every byte as it was written")


@command(
    "convert",
    ("source", {"metavar": "SRC", "help": "a checkpoint, ours or another package's"}),
    ("target", {"metavar": "DST", "help": "the file to write"}),
    ("--plan", {"required": True, "help": "the plan of the result, or `torch` for torch.optim"}),
    ("--spec", {"help": "the rule, where SRC does not say it: adamw"}),
    ("--weights", {"help": "the model's state dict, where SRC has none"}),
    ("--param", {"help": "the parameters' dtype in the result, instead of SRC's"}),
)
def convert(t: Terminal, given: Namespace) -> None:
    """Convert a checkpoint: plan to plan, torch.optim and other packages to ours, ours to torch.optim."""
    from optgen.driver import checkpoints

    options = {"spec": given.spec, "weights": given.weights, "param": given.param and _param(given.param)}
    t.result |= checkpoints.convert(given.source, given.target, to=given.plan, **options)
    done = t.result
    t.show(f"{given.target}: {done['parameters']} parameters, {done['elements']:,} elements, {done['bytes']:,} bytes")


@command("doctor")
def doctor(t: Terminal, given: Namespace) -> None:
    """Show what this machine has, and what follows from it."""
    from optgen.driver import doctor as d

    lines = d.doctor()
    t.result["lines"] = [vars(line) for line in lines]
    t.show(table(("",) * 3, [(x.what, x.found, x.advice) for x in lines]))
    if any(x.missing for x in lines):
        t.fail(MISSING)


class WrongUsage(Exception):
    """A word of the command line that no command takes."""


class Parser(argparse.ArgumentParser):
    """A parser that raises WrongUsage."""

    def error(self, message: str) -> NoReturn:
        raise WrongUsage(f"error: {message}\n{self.prog} --help says what there is")


def parsers() -> dict[str, Parser]:
    """Return the parser of the program under "", and those of its commands."""
    common = Parser(add_help=False, argument_default=SUPPRESS)  # before a command's name, or behind it
    common.add_argument("-q", "--quiet", action="store_true", help="only results, warnings and errors")
    common.add_argument("-v", "--verbose", action="store_true", help="also the log and tracebacks")
    common.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser = Parser(prog="optgen", description=ABOUT, epilog=EXIT_CODES, parents=[common], allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"optgen {optgen.__version__}")
    found, commands = {"": parser}, parser.add_subparsers(metavar="COMMAND")
    for name, (function, arguments) in COMMANDS.items():
        about = function.__doc__ or ""
        own = commands.add_parser(name, help=about, description=about, parents=[common], allow_abbrev=False)
        own.set_defaults(command=name)
        for names, settings in arguments:
            own.add_argument(*names.split(), **settings)
        found[name] = own
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command `optgen` and return its exit code."""
    words, parser = sys.argv[1:] if arguments is None else arguments, parsers()[""]
    try:
        given = parser.parse_args(words, Namespace(quiet=False, verbose=False, json=False, command=""))
    except WrongUsage as error:
        return _refused(str(error), "--json" in words)
    except SystemExit:  # of --help and --version
        return OK
    if not given.command:
        return _refused(parser.format_help(), given.json)
    return Terminal(given.command, given.quiet, given.verbose, given.json).run(
        lambda t: COMMANDS[given.command][0](t, given)
    )


def _refused(text: str, as_json: bool) -> int:
    return Terminal("", as_json=as_json).run(lambda t: t.error(WRONG_INPUT, text))


if __name__ == "__main__":
    raise SystemExit(main())
