"""The Python blocks of the pages that new users read do run, as they stand; migration.md has tests of its own."""

import ast
import csv
import functools
import inspect
import itertools
import re
import tomllib
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import dadaptation
import matplotlib as mpl
import prodigyopt
import pytest
import pytorch_optimizer
import schedulefree
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from torch import Tensor, nn

import optgen
import optgen.optim
from docs.tools import budgets, draw
from docs.tools.format_bounds import between
from docs.tools.formulas import formulas
from docs.tools.rule_page import rule_page
from optgen.accumulate import accumulator
from optgen.driver import cli, judge
from optgen.driver.load import find_spec
from optgen.formats import Plan
from optgen.optim import AdamW
from optgen.runtime.optimizer import OTHERS
from specs import plans
from tests.harness import sampled
from tools import write_types

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMES = ("contract", "precision", "checkpoints", "memory", "muon", "views", "widths")
PAGES = ("README.md", *(f"docs/{name}.md" for name in NAMES))
ELSEWHERE = ("@optimizer", "from generated import", "from mine import", "torch.cuda")
"""The marks of blocks that stand in files, or need them or a GPU."""


class Model(nn.Module):
    """A model with the names that the pages speak of."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(64, width), nn.Linear(width, width)
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.norm(self.router(self.embed(x))))
        return out


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).float(), y)


def blocks() -> list[Any]:
    found = []
    for page in PAGES:
        for k, text in enumerate(BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))):
            if not any(mark in text for mark in ELSEWHERE):
                found.append(pytest.param(text, id=f"{page}-{k}"))
    return found


def surroundings(text: str) -> dict[str, Any]:
    """Return the names that the pages take for granted."""
    torch.manual_seed(0)
    model = Model()
    if "cast_model" not in text:
        model = model.to(torch.bfloat16)
    opt = AdamW(model.named_parameters(), lr=3e-4)
    rest = [p for name, p in model.named_parameters() if not name.startswith("embed")]
    return {
        "torch": torch, "nn": nn, "optgen": optgen, "AdamW": AdamW, "accumulator": accumulator, "model": model,
        "fp32_model": Model(), "load_fp32_model": Model, "opt": opt, "loss_of": loss_of, "rest": rest, "step": 1,
        "Model": Model, "batches": [(torch.arange(64), torch.arange(64))] * 2,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0),
    }  # fmt: skip


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("text", blocks())
def test_a_block_runs_and_trains(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that say two ways of one thing are run apart; afterwards the optimizer that was made trains the model."""
    monkeypatch.chdir(tmp_path)
    apart = text.splitlines() if re.search(r"^(opt(?: = AdamW|\.release)).*\n\1", text) else [text]
    for part in apart:
        known = surroundings(text)
        exec(part, known)
        model, opt = known["model"], known["opt"]
        owned = {id(p) for group in opt.param_groups for p in group["params"]}
        p = next(p for p in model.parameters() if id(p) in owned)
        before = p.detach().clone()
        summed = 8 if "accumulate=8" in part else 1
        for i in range(8):
            loss_of(model, *known["batches"][0]).backward()
            if (i + 1) % summed == 0:
                opt.step()
        assert not torch.equal(p, before)


def test_the_rule_of_the_first_page_is_the_example_and_trains() -> None:
    page = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    example = ROOT / "examples" / "signed_momentum.py"
    assert example.read_text(encoding="utf-8") in page
    target = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    p = nn.Parameter(torch.zeros(64, 128, dtype=torch.bfloat16))
    opt = optgen.compile(str(example), plan="int8_split24")([p], lr=0.02, weight_decay=0.0)
    for _ in range(100):
        p.grad = p.detach() - target.bfloat16()
        opt.step()
    # 100 steps of at most 0.02 reach every target below 2; what is left is far less than a tenth.
    assert (p.detach().float() - target).square().mean() < 0.1 * target.square().mean()


def test_the_page_of_plans_names_every_plan() -> None:
    names = [name for name, value in vars(plans).items() if isinstance(value, Plan)]
    page = (ROOT / "docs/which-plan.md").read_text(encoding="utf-8")
    rows = [row for row in page.splitlines() if row.startswith("| ")]
    assert [name for name in names if not any(f"`{name}`" in row for row in rows)] == []


@pytest.mark.parametrize("name", ["memory", "pareto", "kernels"])
def test_a_picture_is_what_the_formats_and_measured_tables_say(name: str) -> None:
    assert (draw.IMAGES / f"{name}.svg").read_text(encoding="utf-8") == draw.draw(name)


DATA = ("memory", "pareto", "kernels", "training", "evidence", "curves", "frozen", "transfer", "lightbench")


@pytest.mark.parametrize("name", DATA)
def test_words_of_a_picture_do_not_touch_each_other(name: str) -> None:
    with mpl.rc_context(draw.STYLE):
        drawn = draw.PICTURES[name]()
        FigureCanvasAgg(drawn).draw()
    outside = set()
    for axis in (axis for ax in drawn.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = (*axis.get_major_ticks(), *axis.get_minor_ticks())
        outside |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    words = [x for x in drawn.findobj(Text) if x.get_visible() and x.get_text() and x not in outside]
    boxes = [(x.get_text(), x.get_window_extent()) for x in words]
    assert [(a, b) for (a, x), (b, y) in itertools.combinations(boxes, 2) if x.overlaps(y)] == []


def test_methods_are_covered_by_a_rule_or_miss_something() -> None:
    with (ROOT / "docs/methods.csv").open(newline="", encoding="utf-8") as file:
        methods = list(csv.DictReader(file))
    assert {m["rule"] for m in methods} - {""} <= set(optgen.list_rules())
    assert [m for m in methods if bool(m["rule"]) == bool(m["missing"])] == []


LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
WRITTEN = ("README.md", "ARCHITECTURE.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")))


def anchor(heading: str) -> str:
    """Return the name of a heading in a link, as forges make it: lower case, no marks, a dash for a blank."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", WRITTEN)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    lost = []
    for link in LINK.findall(text):
        file, _, heading = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        if "://" in link:
            continue
        if not target.exists():
            lost.append(link)
        elif heading:
            known = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            lost += [] if heading in map(anchor, known) else [link]
    assert lost == []


def test_tests_that_pages_name_are_there() -> None:
    files = list((ROOT / "tests").glob("*.py"))
    known = {file.stem for file in files}.union(
        *(re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE) for file in files)
    )
    named = {page: set(re.findall(r"`(test_\w+)`", (ROOT / page).read_text(encoding="utf-8"))) for page in WRITTEN}
    assert {page: names - known for page, names in named.items() if names - known} == {}


def test_the_plan_of_ones_own_is_one_that_the_lint_lets_pass() -> None:
    page = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
    known: dict[str, Any] = {}
    (text,) = [block for block in BLOCK.findall(page) if "Plan(" in block]
    exec(text, known)
    verdict = judge.judge(find_spec("adan"), known["mine"])
    assert [f for f in verdict.findings if f.severity == "error"] == []


def test_the_format_of_ones_own_passes_and_a_bound_that_is_too_small_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "new-format.md").read_text(encoding="utf-8")
    parts, whole = BLOCK.findall(page)
    Path("specs").mkdir()
    for text, plan, code in ((parts, "first4", 0), (parts, "first7", 0), (whole, "mx8", 0),
                             (whole.replace("Bound(1 / 64", "Bound(1 / 128"), "mx8", 1)):  # fmt: skip
        Path("specs/plans.py").write_text(text, encoding="utf-8")
        assert cli.main(["fuzz", "adamw", "--plan", plan, "-n", "10"]) == code
        if (plan, code) == ("mx8", 0):
            commands = [line.split() for line in re.findall(r"^optgen (.*?) +#", page, flags=re.MULTILINE)]
            assert [cli.main(words) for words in commands if words[0] != "fuzz"] == [0, 0, 0]
    assert "outside its bound: exp_avg" in capsys.readouterr().err


def test_the_tables_of_budgets_are_what_the_tool_writes() -> None:
    text = (ROOT / "docs" / "budgets.md").read_text(encoding="utf-8")
    assert between(text, budgets.text(), *budgets.MARKS) == text


@functools.cache
def typed() -> dict[str, ast.ClassDef]:
    """Return the classes that type checkers know of the ready-made optimizers."""
    write_types.write()
    tree = ast.parse(write_types.FILE.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def test_type_checkers_and_editors_know_the_ready_made_optimizers() -> None:
    assert list(typed()) == sorted(optgen.optim.__all__)


@pytest.mark.parametrize("name", sampled("types", dir(optgen.optim)))
def test_they_know_the_arguments_of(name: str) -> None:
    (init,) = (x for x in typed()[name].body if isinstance(x, ast.FunctionDef))
    for argument in (*init.args.args, *init.args.kwonlyargs):
        argument.annotation = None
    cls = getattr(optgen.optim, name)
    assert ast.unparse(ast.parse(f"def f{inspect.signature(cls.__init__)}: ...")) == ast.unparse(
        ast.parse(f"def f({ast.unparse(init.args)}): ...")
    )
    assert str(inspect.signature(cls)) == str(inspect.signature(cls.__init__)).replace("self, ", "")
    assert inspect.getdoc(cls).endswith(OTHERS)


def test_a_subclass_has_its_own_signature() -> None:
    class Mine(AdamW):
        """A constructor of few arguments."""

        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr, capturable=True)

    assert list(inspect.signature(Mine).parameters) == ["params", "lr"]
    assert inspect.getdoc(Mine) == "A constructor of few arguments."


@pytest.mark.parametrize("name", ["betas", "weight_decay", "amsgrad", "overrides", "backend"])
def test_an_argument_that_is_misspelt_is_guessed(name: str) -> None:
    """Without any one of its letters."""
    for k in range(len(name)):
        given: dict[str, Any] = {name[:k] + name[k + 1 :]: 0.1}
        with pytest.raises(TypeError, match=rf"unexpected keyword argument .*; did you mean '{name}'\?$"):
            AdamW([torch.zeros(3, requires_grad=True)], **given)


@pytest.mark.parametrize("name", ["foo", "hypers", "blocks"])
def test_an_argument_that_is_not_there_is_named_with_the_class(name: str) -> None:
    given: dict[str, Any] = {name: {"*": 2}}
    with pytest.raises(TypeError, match=rf"^AdamW\.__init__\(\) got an unexpected keyword argument '{name}'$"):
        AdamW([torch.zeros(3, requires_grad=True)], **given)


@pytest.mark.parametrize(("asked", "meant"), [("adamw", "AdamW"), ("Came", "CAME"), ("AdamW8bit", "AdamW")])
def test_an_optimizer_that_is_not_there_has_a_neighbour(asked: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"no optimizer '{asked}': did you mean {meant}"):
        getattr(optgen.optim, asked)
    with pytest.raises(ImportError, match=f"no optimizer '{asked}': did you mean {meant}"):
        exec(f"from optgen.optim import {asked}")
    assert not hasattr(optgen.optim, asked)


def test_what_the_first_lines_say_is_true() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch_,) = [d.partition("torch>=")[2] for d in project["dependencies"] if d.startswith("torch")]
    line = f"Version {project['version']} · Python {project['requires-python'].replace('>=', '>= ')} · "
    line += f"PyTorch >= {torch_} · {project['license']}"
    assert project["version"] == optgen.__version__
    for text in ((ROOT / "README.md").read_text(encoding="utf-8"), project["readme"]["text"]):
        assert text.split("\n\n")[1] == line
    for link in re.findall(r"\]\(([^)]*)|(?:src|href)=.([^\"']*)", project["readme"]["text"]):  # seen from PyPI
        assert "".join(link).startswith("https://")


def test_a_rule_is_shown_as_its_author_wrote_it() -> None:
    """Also one in a wrapper, without what the runtime does with inputs."""
    assert "lookahead_adamw = lookahead(adamw)\n\n@optimizer(" in rule_page(find_spec("lookahead_adamw"), [plans.fp32])
    page = rule_page(find_spec("sophia"), [plans.fp32])
    assert "opt.feed(hessian=...)" in page
    assert "for which <code>hessian</code> was fed" in page
    assert "hessian_fed</mi>" not in page.partition("## States")[0]


@pytest.mark.parametrize("name", ["adamw", "came", "soap", "prodigy", "rprop", "dion"])
def test_the_page_of_a_rule_names_all_that_it_has(name: str) -> None:
    spec = find_spec(name)
    page = rule_page(spec, [plans.fp32, plans.bnb8], kernel="kernel")
    blocks = re.sub(r"^#.*?$|^````.*?^````$", "", page, flags=re.M | re.S)
    tree = ElementTree.fromstring(f"<body>{unescape(re.sub('&(lt|gt|amp);', '', blocks))}</body>")
    codes = {x.text for x in tree.iter("code")}
    assert {x.name for x in (*spec.kept, *spec.hypers, *spec.flags)} | {"fp32", "bnb8"} <= codes
    lefts = [row[0] for row in next(tree.iter("mtable")) if len(row) == 2]
    assert len(lefts) == len(formulas(spec))


def test_each_option_of_a_peer_is_the_rules_or_says_why_not() -> None:
    """Classes that have the name of a rule are looked at; docs/peers.md has a table of what is left."""
    section = (ROOT / "docs/peers.md").read_text(encoding="utf-8").partition("## Options of peers")[2]
    rows = [row.split(" | ") for row in section.partition("\n## ")[0].splitlines() if row.startswith("| ")]
    table = [[set(re.findall(r"`(\w+)`", cell)) for cell in row[:2]] for row in rows]
    classes: dict[str, list[Any]] = {}
    for peer in (torch.optim, pytorch_optimizer, prodigyopt, dadaptation, schedulefree):
        for key, cls in vars(peer).items():
            classes.setdefault(key.lower(), []).extend([cls] if isinstance(cls, type) else [])
    left, seen = [], 0
    for name in optgen.list_rules():
        spec = find_spec(name)
        known = {h.name for h in spec.hypers} | {f.name for f in spec.flags} | {"params", "kwargs"}
        known = known.union(*(options for rules, options in table if not rules or name in rules))
        for cls in (cls for key in {spec.class_name.lower(), ALIASES.get(name)} for cls in classes.get(key, ())):
            left += [(name, cls.__module__, x) for x in inspect.signature(cls).parameters if x not in known]
            seen += 1
    assert (left, seen > 90) == ([], True)


ALIASES = {
    "adafactor_paper": "adafactor", "adam_swd": "adams", "apollo_qn": "apollodqn", "psgd_kron": "kron",
    "sophia": "sophiah", "schedule_free_adamw": "adamwschedulefree", "schedule_free_sgd": "sgdschedulefree",
    "signum": "signsgd", "radam_schedule_free": "radamschedulefree",
}  # fmt: skip
"""Rule -> the class of a peer that has another name, in lower case."""
