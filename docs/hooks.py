"""Generate the site's pages of rules, plans, errors, commands and the API, and lead links that leave docs/ to them.

mkdocs calls the functions `on_...`. A generated page is no file: a new rule, plan or error appears by itself.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import functools
import inspect
import io
import json
import linecache
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import optgen
from docs.tools.rule_page import UNINDEXED, code, fenced, folded, inline, kept_table, prose, rule_page, sizes, table
from optgen._ready import folder
from optgen.accumulate import accumulator
from optgen.base.errors import TABLE, UserError
from optgen.driver import explain, load, memory
from optgen.driver.cli import EXIT_CODES, parsers
from optgen.formats.plan import Plan
from optgen.lang import wrappers
from optgen.lang.spec import Recurrence, Spec
from optgen.runtime.files import CheckpointError
from optgen.runtime.modes.release import Handle
from optgen.runtime.modes.watch import Watch
from optgen.runtime.optimizer import Checkpointed, Optimizer
from optgen.runtime.several import Several
from optgen.runtime.states.memory import Memory

ROOT = Path(__file__).resolve().parent.parent
MAIN, NOTEBOOK = "int8_split24", "examples/your_rule.py"
PAGES = {"README.md": "readme.md", "ARCHITECTURE.md": "architecture.md", "CHANGELOG.md": "changelog.md",
         NOTEBOOK: "notebook.md", "optgen/base/errors.py": "errors.md", "specs": "rules/index.md",
          "specs/plans.py": "plans/index.md"}  # fmt: skip
"""File of the repository -> its page, where that is no file of docs/."""
WHEN = {
    "fp32": "your weights are fp32 and memory is no concern; the baseline of all comparisons.",
    "fp32_master": "you want what mixed precision with an fp32 copy does, exactly.",
    "split32": "you want exact fp32 weights in bf16 training for 2 bytes less than a copy.",
    "bf16_sr": "weights may round stochastically and 6 bytes are few enough.",
    "int8_split24": "you have no reason to take another one: the default.",
    "int8": "your weights are fp32 and stay so.",
    "int6_split24": "half a byte matters.",
    "int5_split24": "three quarters of a byte matter and you can compare a short run.",
    "int4_split24": "a byte matters more than the noise of the updates; compare a run before.",
    "int5_factored_split24": "weights are matrices and 3.7 bytes are the limit.",
    "int4_factored_split24": "weights are matrices and memory is all that counts.",
}
GROUPS = {"1": "The language", "2": "Spaces and dtypes", "3": "Formats and plans", "4": "Finding, building, writing"}
PEERS = ("torch.optim", "bitsandbytes.optim", "torchao.optim", "pytorch_optimizer")
MEASURED = {"bnb8": "bitsandbytes 8-bit", "torchao8": "torchao 8-bit", "torchao4": "torchao 4-bit",
            "torchao_fp8": "torchao fp8"}  # fmt: skip
BULLETS = {
    "adafactor": "Adafactor, torch's", "adafactor_paper": "Adafactor, the paper's", "adam_mini": "Adam-mini",
    "cautious_adamw": "Cautious AdamW, Lion", "cautious_lion": "Cautious AdamW, Lion", "kl_shampoo": "KL-Shampoo",
    "schedule_free_adamw": "Schedule-Free AdamW, SGD", "schedule_free_sgd": "Schedule-Free AdamW, SGD",
    "prodigy": "Prodigy; D-Adaptation", "dadapt_adam": "Prodigy; D-Adaptation", "soap_muon": "SOAP-Muon",
    **{f"dadapt_{name}": "Prodigy; D-Adaptation" for name in ("adagrad", "adan", "lion", "sgd")},
    "clipped_adamw": "Clipping, Lookahead", "lookahead_adamw": "Clipping, Lookahead", "psgd_kron": "PSGD Kron",
}  # fmt: skip
"""Rule -> the heading of its part in docs/peers.md, where that is not the name of the class."""
COMPARED = (
    "Compared over 50 steps in fp64, on ten tensors of 0 to 4 dimensions, under each flag setting with drawn "
    "hyper-parameters"
)
HOW = {
    **dict.fromkeys(("ELEMENTWISE", "REDUCING"), f"{COMPARED}; in fp32, both stay within the derived enclosure of each "
                    "of 25 steps."),
    "WHOLE": f"{COMPARED}.",
    "FED": f"{COMPARED} and inputs from .5 to 2; in fp32, the eager reference and the C++ kernels stay within 64 "
    "roundings a step.",
}  # fmt: skip
"""Family of oracles in tests/oracles.py -> how its rules are compared."""
IN_BASES = (
    "Compared over 24 steps or more in fp64, and in fp32 by the eager reference and the C++ kernels, on vectors and "
    "matrices; their distance stays within a derived bound."
)
"""How rules in bases or spaces of low rank are compared."""
BESIDE = {
    "adagc": "pytorch_optimizer.AdaGC", "agc": "pytorch_optimizer's agc", "hyperball": "heavyball's hyperball",
    "centralized": "pytorch_optimizer.Ranger, with `lookahead`", "lookahead": "the paper around torch.optim.AdamW",
    "clipped": "torch's clip_grad_norm_", "ema": "torch.optim.swa_utils", "averaged": "torch.optim.swa_utils",
    "mars": "a second text; `MARS`", "orthograd": "a second text; `OrthoGrad`", "grams": "a second text; `Grams`",
    "cautious": "a second text; `CautiousAdamW`, `CautiousLion`", "schedule_free": "a second text; `ScheduleFreeSGD`",
    "spam_reset": "Adam that is made anew",
    "sam": "pytorch_optimizer.SAM", "asam": "pytorch_optimizer.SAM", "gsam": "pytorch_optimizer.GSAM",
}  # fmt: skip
"""Wrapper -> what tests compare it with, where that is more than a second text."""
SCROLLS = r'<div class="scrolls"><math.*?</math></div>'
FAMILIES = ("One pass over memory", "Norms of tensors, means of rows and columns",
            "Sums over the model, averages for evaluation, intervals", "Products of matrices")  # fmt: skip
FILTER = """<p><input id="filter" type="search" placeholder="Filter: adam, norm, arXiv:2409" aria-label="Filter"></p>
<script>
document.getElementById("filter").addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(" ");
  for (const row of document.querySelectorAll(".rules tbody tr"))
    row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
});
</script>"""
RULES = """# Rules

{count} rules are ready-made, and each works with [each plan](../plans/index.md). Bytes are those of weight and states
between steps per parameter in bf16 under `{main}`, and passes are those over memory in a step. The distance from the
oracle is the largest of |ours - theirs| / (1 + |theirs|) over 50 steps in fp64, all flag settings and the tested
shapes; that of rules in bases and of low rank is of gradients that tell singular vectors apart ([peers](../peers.md)).

{rules}

## Wrappers

[Wrappers](../language.md#rules-around-rules) go around any rule. Formulas are those of the wrapper around AdamW.

{wrapped}

## Methods that are missing

Of the methods in zij's tables (June 2026), and those of pytorch_optimizer 4.1 that are not ready-made, {counted} are
covered. What is missing was told from the terms of zij's formulas, not by writing each rule: take it as a first
guess. A rule of your own is [a file of twenty lines](../language.md).

{absent}
"""


def specs() -> dict[str, Spec]:
    return {name: load.find_spec(entry.file) for name, entry in load.entries().items()}


def address(room: str) -> Any:
    """Return the link of a name, seen from the pages of rules and plans."""
    known = {**dict.fromkeys(load.entries(), "rules"), **dict.fromkeys(load.plans(), "plans")}
    return lambda name: f"{'' if known[name] == room else f'../{known[name]}/'}{name}.html" if name in known else ""


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and those of rules and plans to the navigation."""
    rules, plans = specs(), load.plans()
    pages = {f"rules/{name}.md": page_of_rule(spec, list(plans.values())) for name, spec in rules.items()}
    made = {
        "errors.md": errors(), "cli.md": commands(), "api.md": api(), "notebook.md": notebook(ROOT / NOTEBOOK),
        "rules/index.md": rules_index(rules), "plans/index.md": plans_index(plans),
        **{page: (ROOT / file).read_text() for file, page in PAGES.items() if file.endswith(".md")},
        **pages,
        **{f"plans/{plan.name}.md": page_of_plan(plan, rules) for plan in plans.values()},
    }  # fmt: skip
    for name, text in {**made, **dict(sources(files, made))}.items():
        files.append(File.generated(config, name, content=text))
    for section in config.nav:
        if "Rules" in section:
            section["Rules"] += [{rules[name].class_name: f"rules/{name}.md"} for name in sorted(rules)]
        if "Plans" in section:
            section["Plans"] += [{name: f"plans/{name}.md"} for name in plans]
    return files


# -- links that leave docs/

LINK = re.compile(r'(\]\(|(?:src|srcset|href)=")([^)\s"#:]+)(#[^)\s"]*)?(?=[)"])')


def target_of(link: str, page: str) -> str | None:
    """Return the file of the repository that a page of docs/, or of its root, links to; None if there is none."""
    origin = next((file for file, name in PAGES.items() if name == page), f"docs/{page}")
    found = os.path.normpath(os.path.join(os.path.dirname(origin), link))
    return found if (ROOT / found).exists() else None


def place_of(file: str) -> str:
    """Return the page, or the file of docs/, that shows a file of the repository."""
    if file in PAGES or file.startswith("docs/"):
        return PAGES.get(file) or file.removeprefix("docs/")
    if re.fullmatch(r"specs/\w+\.py", file):
        return f"rules/{Path(file).stem}.md"
    return f"source/{file}.md"


def sources(files: Files, made: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a page for each file or folder outside docs/ that a written page links to."""
    written = {f.src_uri: f.content_string for f in files.documentation_pages()}
    written |= {name: made[name] for name in PAGES.values()}
    wanted = {
        file for page, text in written.items() for _, link, _ in LINK.findall(text)
        if (file := target_of(link, page)) and place_of(file).startswith("source/")
    }  # fmt: skip
    for file in sorted(wanted):
        if (ROOT / file).is_dir():
            names = subprocess.run(["git", "ls-files", file], cwd=ROOT, capture_output=True, text=True).stdout.split()
            yield place_of(file), f"# {file}/\n\n" + "\n".join(f"- `{name}`" for name in names)
        else:
            text = fenced((ROOT / file).read_text(), Path(file).suffix[1:])
            yield place_of(file), f"# {file} {UNINDEXED}\n\n{text}\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to files of the repository to their pages."""
    here = page.file.src_uri
    if here.startswith(("rules/", "plans/", "source/")):
        return markdown

    def moved(m: re.Match[str]) -> str:
        file = target_of(m[2], here)
        if file is None:
            return m[0]
        shown = os.path.relpath(place_of(file), os.path.dirname(here) or ".")
        shown = shown if m[1] == "](" else re.sub(r"\.md$", ".html", shown)
        return f"{m[1]}{shown}{m[3] or ''}"

    return LINK.sub(moved, markdown)


# -- rules


def family(spec: Spec, passes: int) -> str:
    """Return the family of a rule: the costliest of what it needs."""
    if spec.matrix == "heads" or any(s.trait in ("symmetric", "orthogonal", "triangular") for s in spec.states):
        return FAMILIES[3]
    model = any(s.space.name == "model" for s in spec.states)
    if model or spec.evaluation or any(f.every or f.first for f in spec.flags):
        return FAMILIES[2]
    return FAMILIES[passes > 1 or any(s.space.name != "elem" for s in spec.states)]


def rules_index(rules: dict[str, Spec]) -> str:
    """Return the page of all rules by family, of wrappers, and of methods that are missing."""
    far = json.loads((ROOT / "docs/distances.json").read_text())
    rows: dict[str, list[tuple[str, ...]]] = {title: [] for title in FAMILIES}
    for name, spec in sorted(rules.items(), key=lambda item: item[1].class_name.lower()):
        found = re.search(r"\(oracle: (.*?)\)[.,;: <]", oracle(spec))
        passes = len(explain.explain(spec, load.find_plan(MAIN)).sweeps)
        does = f"{inline(' '.join(spec.doc.split(chr(10) * 2)[0].split()))}<br><small>{inline(spec.cite)}</small>"
        oracle_of = f"{found[1] if found else ''}<br><small>{far[name]:.1e}</small>"
        rows[family(spec, passes)].append((
            f'<a href="{name}.html">{spec.class_name}</a>', does, sizes(spec, load.find_plan(MAIN))[0], str(passes),
            oracle_of,
        ))  # fmt: skip
    with (ROOT / "docs/methods.csv").open(newline="", encoding="utf-8") as file:
        methods = list(csv.DictReader(file))
    made = {spec.class_name.lower() for spec in rules.values()}
    absent = [m for m in methods if not m["rule"] and m["method"].lower() not in made]
    head = ("rule", "what it does", "bytes", "passes", "oracle, distance")
    tables = [f'## {title}\n\n<div class="rules">\n{table(head, found)}\n</div>' for title, found in rows.items()]
    return RULES.format(
        count=len(rules), main=MAIN, rules="\n\n".join([FILTER, *tables]), wrapped=wrapped(),
        counted=f"{len(methods) - len(absent)} of {len(methods)}",
        absent=table(("method", "list", "what is missing"), [
            (escape(m["method"]), m["list"], inline(m["missing"])) for m in absent
        ]),
    )  # fmt: skip


def page_of_rule(spec: Spec, plans: list[Plan]) -> str:
    """Return the page of a rule with its kernels, names elsewhere and oracle."""
    kernels = folder(spec.name) / "triton.py"
    order = sorted(plans, key=lambda plan: plan.name != MAIN)
    text = rule_page(spec, order, link=address("rules"), kernel=kernels.read_text() if kernels.is_file() else "")
    named = "".join(f"<li><code>{name}</code></li>" for name in elsewhere(spec))
    named = f"<ul>{named}</ul>" if named else "<p>None of the packages that the tests use has it under this name.</p>"
    states = ", ".join(code(s.name) for s in spec.states)
    loads = (
        f"<p>States are loaded from a checkpoint in torch.optim's form by their names ({states}), and from "
        "bitsandbytes, torchao and FlashOptim where these have the rule: see "
        '<a href="../checkpoints.html">checkpoints</a>.</p>'
    ) if states else ""
    tested = re.sub(r"^<p>\(oracle: (.*?)\)(?=[.,;:])", r"<p>Oracle: \1", oracle(spec))
    extra = f"## Elsewhere\n\n{named}\n\n{loads}\n\n## Tested against\n\n{tested}\n\n"
    at = text.find("## Kernels")
    return text[:at] + extra + text[at:] if at >= 0 else text + "\n" + extra


def elsewhere(spec: Spec) -> Iterator[str]:
    """Yield the classes of the same name, in any case, in torch and in the packages that are here."""
    wanted = spec.class_name.lower()
    shown = re.compile(rf"{wanted}(8bit|4bit|fp8|32bit)?")
    for module, names in classes().items():
        yield from (f"{module}.{name}" for name in names if shown.fullmatch(name.lower()))


@functools.cache
def classes() -> dict[str, list[str]]:
    """Return the names of classes by package; of their imports nothing is shown."""
    code = "import sys, importlib, json; print('\\n' + json.dumps(dir(importlib.import_module(sys.argv[1]))))"
    found = {}
    for module in PEERS:
        done = subprocess.run([sys.executable, "-c", code, module], capture_output=True, text=True, check=False)
        names = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else []
        found[module] = [name for name in names if name[0].isupper()]
    return found


def wrapped() -> str:
    """Return the table of wrappers: paper, formula around AdamW, options, states, and what each is compared with."""
    rows, inner = [], load.find_spec("adamw")
    for name in wrappers.__all__:
        spec = load.find_spec(f"{name}(adamw)")
        formula = re.search(SCROLLS, rule_page(spec, [load.find_plan(MAIN)]), re.S)
        known = {x.name for x in (*inner.hypers, *inner.flags, *inner.states)}
        options, states = (
            ", ".join(code(x.name) for x in kind if x.name not in known) or "none"
            for kind in ((*spec.hypers, *(f for f in spec.flags if not f.derived)), spec.states)
        )
        cell = f"{inline(spec.cite)}.<br>{folded_line(formula)}"
        rows.append((code(name), cell, options, states, inline(BESIDE.get(name, "a second text"))))
    return table(("wrapper", "paper, formula", "options", "states", "compared with"), rows)


def folded_line(formula: re.Match[str] | None) -> str:
    """Return a formula that is shown when it is asked for."""
    return f"<details><summary>formula</summary>{formula[0]}</details>" if formula else ""


def oracle(spec: Spec) -> str:
    """Return the rule's part of docs/peers.md, or its oracle in tests/oracles.py."""
    head = re.escape(BULLETS.get(spec.name, spec.class_name))
    found = re.search(rf"^- \*\*{head}\*\* (.*?)(?=^- |^\n|^$)", (ROOT / "docs/peers.md").read_text(), re.M | re.S)
    oracles = (ROOT / "tests/oracles.py").read_text()
    families = re.finditer(r"^(\w+)(?:: dict\[str, Oracle\])? = (?:{|table\()\n(.*?)^[})]", oracles, re.M | re.S)
    listed = re.compile(rf'(?:^    "?|, ){spec.name}(?:=|,|": )', re.M)
    family = next((m[1] for m in families if listed.search(m[2])), "")
    if found:
        text = " ".join(found[1].split())
    else:
        row = re.search(rf'^    "?{spec.name}(?:=|": )(\w+)(?:\("(\w+)")?', oracles, re.M)
        packages = {"torch_optim": "torch.optim", "peer": "pytorch_optimizer"}
        peer = f"`{packages[row[1]]}.{row[2]}`" if row and row[1] in packages else spec.like and f"`{spec.like}`"
        text = f"(oracle: {peer or 'the paper, written out in tests/oracles.py'})."
    how = HOW.get(family, IN_BASES)
    return f'<p>{inline(text)}</p>\n\n<p>{how} <a href="../peers.html">All peers</a>.</p>'


# -- plans


def plans_index(plans: dict[str, Plan]) -> str:
    adamw = load.find_spec("adamw")
    rows = [(code(p.name, lambda name: f"{name}.html"), *sizes(adamw, p), inline(when(p))) for p in plans.values()]
    head = ("plan", "bytes, bf16 parameters", "fp32 parameters", "take it if")
    about = "A plan says how weights and states are stored. Bytes are those of AdamW's weight and states per parameter."
    return f"# Plans\n\n{about}\n\n{table(head, rows)}\n"


def when(plan: Plan) -> str:
    if plan.discouraged:
        return f"you compare with others: {plan.discouraged}."
    return WHEN.get(plan.name, plan.doc.splitlines()[0])


def page_of_plan(plan: Plan, rules: dict[str, Spec]) -> str:
    """Return the page of a plan: what it stores, bounds, measured error, bytes of each rule."""
    rows = []
    for spec in rules.values():
        with contextlib.suppress(UserError):
            rows.append((code(spec.name, address("plans")), *sizes(spec, plan)))
    warn = "<p>Discouraged: constructing an optimizer under it warns.</p>" if plan.discouraged else ""
    small = f"<p>Tensors of fewer than {plan.small_numel} elements keep their states in {escape(str(plan.small))}.</p>"
    parts = [
        f"# {plan.name}", prose(plan.doc), f"<p>Take it if {inline(when(plan))}</p>", warn,
        fenced(f'AdamW(model.named_parameters(), lr=3e-4, plan="{plan.name}")', "python"),
        "## What is stored", kept_table(memory.of_plan(plan), "kind of value"), small if plan.small_numel else "",
        *steady(plan), *measured(plan), "## Bytes per parameter",
        table(("rule", "bf16 parameters", "fp32 parameters"), rows),
        f"## Its text {UNINDEXED}", fenced(text_of(plan), "python"),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts)) + "\n"


def text_of(plan: Plan) -> str:
    """Return the assignment of a plan in its file."""
    tree = ast.parse(Path(plan.loc.file).read_text())
    node = next(n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == plan.name)
    return "".join(linecache.getline(plan.loc.file, k) for k in range(node.lineno, (node.end_lineno or 0) + 1))


def steady(plan: Plan) -> list[str]:
    """Return the error of an average after many steps, where a bound is known."""
    rows = [
        (role, f"{decay:g}", escape(found.partition(": ")[2]))
        for role in ("signed", "nonneg") for decay in (0.9, 0.99, 0.999)
        if (found := memory.steady_state(getattr(plan, role), Recurrence("ema", decay)))
    ]  # fmt: skip
    head = ("kind", "decay", "error after many steps")
    return ["## Averages stored again at every step", table(head, rows)] if rows else []


def measured(plan: Plan) -> list[str]:
    """Return how much the storage changed AdamW's updates, from docs/benchmarks/formats.json."""
    found = json.loads((ROOT / "docs/benchmarks/formats.json").read_text())
    for row in found["found"]:
        if row["name"] == MEASURED.get(plan.name, plan.name):
            keys = ("nmse", "median", "p99")
            rows = [(beta, *(f"{x[key]:.2g}" for key in keys)) for beta, x in row["recurrent"].items()]
            head = ("beta2", "squared error / square", "median of elements", "99 % of elements")
            at = f"{found['data']['steps']:,} steps, {found['data']['elements']:,} elements"
            more = f'<p>Of AdamW\'s updates over {at}: <a href="../benchmarks/formats.html">method</a>.</p>'
            return ["## Measured error", table(head, rows), more]
    return []


# -- errors, commands, API, notebook


def errors() -> str:
    """Return the index of errors: each code with an example, whose hint mends it."""
    out = ["# Errors", "Each error has a code, a place, and a hint that mends it. Examples are cases of the tests.",
           "The lint's findings (L1, L2 ...) are in [a table of their own](formats.md#the-lint)."]  # fmt: skip
    for group, title in GROUPS.items():
        out.append(f"## {title}")
        for key in (key for key in TABLE if key[1] == group):
            texts = [p.read_text() for p in sorted((ROOT / "tests/cases/errors").glob(f"{key}*.txt"))]
            example = next((t for t in texts if "  hint: " in t), texts[0] if texts else "")
            head = example.splitlines()[0].partition(": ")[2]
            said = re.sub(r"`?{\w+[^}]*}`?", "…", TABLE[key].message).partition(": ")[0].partition(", and ")[0]
            named = said if len(said) > 8 else head  # some messages are what they are given
            rest = [folded(f"{len(texts) - 1} more", fenced("\n".join(t for t in texts if t != example), "text"))]
            out += [f"### {key}: {named} {{ #{key.lower()} }}", f"<p>For instance: {inline(head)}</p>"]
            out += [fenced(example, "text"), *(rest if len(texts) > 1 else [])]
    return "\n\n".join(out) + "\n"


def commands() -> str:
    """Return the page of the command line."""
    out = ["# Commands", f"<p>{inline(EXIT_CODES)}</p>"]
    for name, parser in parsers().items():
        rows = [
            (code(", ".join(x.option_strings) or x.metavar), inline(x.help or ""),
             code(x.default) if x.default not in (None, False, argparse.SUPPRESS) and x.default != [] else "")
            for x in parser._actions
        ]  # fmt: skip
        out += [f"## optgen {name}".rstrip(), f"<p>{inline(parser.description or '')}</p>"]
        out.append(table(("argument", "meaning", "default"), rows))
    return "\n\n".join(out) + "\n"


def api() -> str:
    """Return the page of the Python API, which mkdocstrings fills in."""
    functions = [getattr(optgen, name) for name in optgen.__all__ if name != "__version__"]
    own = {**vars(Checkpointed), **vars(Optimizer)}
    methods = [x for name, x in own.items() if name[0] != "_" and inspect.isfunction(x)]
    out = ["# Python API", "## optgen", *map(shown, functions), "## Methods of every optimizer", *map(shown, methods)]
    returned = f"{shown(Watch)}\n    options: {{ members: [flush, remove] }}", *map(shown, (Handle, Memory, Several))
    out += ["## What they return and raise", *returned, shown(CheckpointError)]
    out += ["## Accumulators and frameworks", shown(accumulator)]
    out += [f"::: optgen.integrations.{p.stem}" for p in sorted((ROOT / "optgen/integrations").glob("[!_]*.py"))]
    out += ["## Formats and plans", "::: optgen.formats.plan.Plan\n    options: { members: false }"]
    out += [f"{shown(x)}\n    options: {{ members: false }}" for x in formats()]
    return "\n\n".join(out) + "\n"


def shown(x: Any) -> str:
    """Return what mkdocstrings puts a function or class in the place of."""
    return f"::: {x.__module__}.{x.__qualname__}"


def formats() -> Iterator[type]:
    import optgen.formats as room

    for name in "Blocked LogMinMax Codebook Fp8 Rank1 Factored Split Copy Native".split():
        yield getattr(room, name)


def notebook(file: Path) -> str:
    """Return a notebook in jupytext's percent format as a page, each cell with what it shows when it is run."""
    out, known = [], {"__name__": "__main__", "__file__": str(file)}
    source = file.read_text()
    for cell in re.finditer(r"^# %%(.*)\n((?:(?!# %%).*\n)*)", source, flags=re.M):
        head, text = cell.groups()
        if "[markdown]" in head:
            out.append(re.sub(r"^# ?", "", text, flags=re.M).strip())
            continue
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            lines = source.count("\n", 0, cell.start(2))  # a spec's source is read by the numbers of its lines
            exec(compile("\n" * lines + text, str(file), "exec"), known)
        out.append(fenced(text.strip("\n"), "python"))
        if shown.getvalue():
            out.append(fenced(shown.getvalue(), "text"))
    return "\n\n".join(out) + "\n"


VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def on_config(config: Any) -> Any:
    """Show the version below each page."""
    config.copyright = f"optgen {VERSION}, Apache-2.0"
    return config
