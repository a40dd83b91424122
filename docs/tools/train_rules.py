"""The demo's language model trained by many rules, each in fp32 and in few bits; and by AdamW under many plans.

    python -m docs.tools.train_rules               runs that docs/benchmarks/training.json lacks, then page and pictures
    python -m docs.tools.train_rules --seeds 8     the same with more seeds
    python -m docs.tools.train_rules --page        page and pictures of the runs that are there

Runs that are compared start from the same weights and see the same batches in the same order; a difference is the mean
of their differences, seed by seed, with the 95 % interval of Student's t.  To make a run again, delete it from the
record.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optgen.formats import Plan
from tools.demo import mean_and_interval, mean_and_spread
from tools.demo_model import Corpus, Run, Size, corpus, loss_of, train
from tools.prose import packed, table

# Discouraged plans are measured on purpose.
warnings.filterwarnings("ignore", r"\w+: plan '\w+' is discouraged")

ROOT = Path(__file__).resolve().parents[2]
RECORD, PAGE = ROOT / "docs/benchmarks/training.json", ROOT / "docs/training.md"
STEPS = {"fixed": 600, "tuned": 400}  # of runs at a rule's own rate, and at one that was searched for
SEEDS = 3
PLANS = ("fp32", "int8_split24")


@dataclass(frozen=True)
class Rule:
    """A generated class and how it is used here; `aside`: options of embeddings, norms and the head; `plans`: those
    compared with fp32; `control`: the rule with whose fp32 runs, at whose learning rate, this one is compared;
    `between`: what `demo_model.train` calls between backward and step."""

    name: str
    spec: str
    options: Mapping[str, Any]
    aside: Mapping[str, Any] = field(default_factory=dict)
    plans: tuple[str, ...] = PLANS[1:]
    control: str = ""
    between: Callable[..., Any] | None = None


def moved_uphill(model: nn.Module, optimizer: Any, step: int, x: Tensor, y: Tensor) -> Any:
    """Take the gradient at moved weights, as SAM does."""
    import optgen

    optimizer.sam = getattr(optimizer, "sam", None) or optgen.SAM(optimizer)
    optimizer.sam.first_step()
    loss_of(model, x, y).backward()
    return optimizer.sam.second_step


def fed(model: nn.Module, optimizer: Any, step: int, x: Tensor, y: Tensor) -> None:
    """Feed the squared gradient for labels drawn from the model, every ten steps (Sophia-G)."""
    if step % 10 == 0:
        drawn = torch.distributions.Categorical(logits=model(x).detach()).sample()
        found = torch.autograd.grad(loss_of(model, x, drawn), list(model.parameters()))
        optimizer.feed(hessian=[x.numel() * g.float().square() for g in found])


ADAMW = {"lr": 1.5e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
RULES = (
    Rule("AdamW", "adamw", ADAMW),
    Rule("CAME", "came", {"lr": 5e-4, "weight_decay": 0.1}),
    Rule("Adafactor", "adafactor", {"lr": 1e-1, "weight_decay": 0.1}),
    Rule("LAMB", "lamb", {**ADAMW, "lr": 4e-2}),
    Rule("StableAdamW", "stable_adamw", ADAMW),
    Rule("ScheduleFreeAdamW", "schedule_free_adamw", {**ADAMW, "lr": 3e-3, "warmup_steps": 30}),
    Rule("Muon", "muon", {"lr": 3e-2, "weight_decay": 0.1, "adamw_lr": 1.5e-3}, {"adamw": True}),
)

FEWER = (*PLANS[1:], "int4_split24")
SOAP = {"lr": 3e-3, "weight_decay": 0.1}
LOW_RANK = {"lr": 1e-2, "weight_decay": 0.1, "rank": Size().width // 4}
MUON = {"lr": 2e-2, "weight_decay": 0.1, "adamw_lr": 2e-3}
TUNED = (  # lr: the authors' default, at which the search begins; adamw_lr: the one found for AdamW
    Rule("AdamW", "adamw", {**ADAMW, "lr": 1e-3}),
    Rule("Muon", "muon", MUON, {"adamw": True}, FEWER),
    Rule("Muon, low rank", "low_rank_muon", MUON, {"adamw": True}, FEWER[1:], control="Muon"),
    Rule("SOAP", "soap", SOAP, plans=FEWER),
    Rule("SOAP, control", "soap", {**SOAP, "precondition_frequency": 9}, plans=PLANS[:1], control="SOAP"),
    Rule("SOAPMuon", "soap_muon", {"lr": 3.75e-2, "weight_decay": 0.1, "adamw_lr": 2e-3}, {"adamw": True}),
    Rule("Kron", "psgd_kron", {"lr": 3e-4, "weight_decay": 0.1}),
    Rule("Shampoo", "shampoo", {"lr": 1e-3, "weight_decay": 0.1}),
    Rule("GaLore", "galore", LOW_RANK, {"adamw": True}),
    Rule("APOLLO", "apollo", LOW_RANK, {"adamw": True}),
    Rule("SAM", "adamw", {**ADAMW, "lr": 1e-3}, between=moved_uphill),
    Rule("Sophia", "sophia", {"lr": 6e-4, "gamma": 0.05, "weight_decay": 0.1}, between=fed),
)


def make(rule: Rule, plan: str | Plan, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of a rule, with two groups where the rule treats embeddings and the head apart."""
    import optgen

    cls = optgen.compile(rule.spec, plan=plan)
    options = {**rule.options, "lr": lr, "plan": plan if isinstance(plan, str) else plan.name}
    named = list(model.named_parameters())
    if not rule.aside:
        return cls([p for _, p in named], **options)
    apart = [p for name, p in named if p.ndim < 2 or name.split(".")[0] in ("tokens", "positions", "head")]
    body = [p for name, p in named if all(p is not q for q in apart)]
    return cls([{"params": body}, {"params": apart, **rule.aside}], **options)


OF_FP32 = ("fp32", "int8")
"""Plans that are run on fp32 weights."""


def one_run(rule: Rule, plan: str, seed: int, steps: int, lr: float, text: Corpus) -> Run:
    """Train once, in a worker process."""
    torch.set_num_threads(1)
    dtype = torch.float32 if plan in OF_FP32 else torch.bfloat16
    given: dict[str, Any] = {"between": rule.between} if rule.between else {}
    return train(text, Size(), lambda model: make(rule, plan, model, lr), dtype=dtype, steps=steps, seed=seed, **given)


@dataclass(frozen=True)
class Verdict:
    """Losses in fp32 and in few bits, seed by seed, and bytes per parameter."""

    rule: str
    lr: float
    fp32: list[float]
    few: list[float]
    bytes_fp32: float
    bytes_few: float

    @property
    def gap(self) -> tuple[float, float]:
        """(mean of the paired differences, half width of its 95 % interval)."""
        return mean_and_interval([b - a for a, b in zip(self.fp32, self.few, strict=True)])

    @property
    def apart(self) -> bool:
        """The interval excludes 0."""
        mean, half = self.gap
        return abs(mean) > half

    def difference(self, widest: float) -> str:
        """Return the difference, bold if its interval excludes 0, or a dash if that is wider than `widest`."""
        mean, half = self.gap
        words = f"{mean:+.4f} ± {half:.4f}"
        return f"**{words}**" if self.apart else words if half <= widest else "–"


WIDEST = 0.04  # nats: about what bf16 weights cost here that are rounded to nearest
HEAD = ("run", "lr", "minus fp32", "fp32", "B/param", "in fp32")


def row(v: Verdict) -> list[str]:
    mean, noise = mean_and_spread(v.fp32)
    kept = f"{v.bytes_few:.2f}", f"{v.bytes_fp32:.2f}"
    return [v.rule, f"{v.lr:g}", v.difference(WIDEST), f"{mean:.4f} ± {noise:.4f}", *kept]


def page(kept: Mapping[str, Any], text: str) -> str:
    """Return the text of training.md with its tables of the runs that are there, and show something."""
    found = {name: [v for v in part if v.difference(WIDEST) != "–"] for name, part in parts(kept).items()}
    text = with_table(text, "Rules", table(HEAD, map(row, found["rules"])))
    text = with_table(text, "Matrix rules, SAM and Sophia", table(HEAD, map(row, found["tuned"])))
    plans = [(f"`{v.rule}`", v.difference(WIDEST), f"{v.bytes_few:.2f}") for v in found["plans"]]
    text = with_table(text, "Plans", table(("plan", "minus fp32", "B/param"), plans))
    return text


def with_table(page: str, heading: str, lines: list[str]) -> str:
    """Return the page with another table in the place of the first one below a heading."""
    before, found, rest = page.partition(f"\n## {heading}\n")
    if not found:
        raise SystemExit(f"no heading {heading!r} in the page")
    return before + found + re.sub(r"(?m)(^\|.*\n)+", lambda _: "\n".join([*lines, ""]), rest, count=1)


def rules_of(part: str) -> tuple[Rule, ...]:
    """Return the rules of "tuned" or of "fixed", where AdamW has every plan with states below fp32."""
    from optgen.formats import floats
    from specs import plans

    if part == "tuned":
        return TUNED
    few = [name for name, plan in vars(plans).items() if isinstance(plan, Plan) and plan.signed != floats.f32]
    return replace(RULES[0], plans=tuple(few)), *RULES[1:]


Key = tuple[str, str, int, float]  # rule, plan, seed, learning rate
Found = dict[str, tuple[float, ...]]  # key_of(a key) -> loss at the end, bytes per parameter, losses along the run


def key_of(rule: str, plan: str, seed: int, lr: float) -> str:
    return f"{rule}, {plan}, seed {seed}, lr {lr:g}"


def verdict(found: Found, rule: Rule, plan: str, lr: float, name: str) -> Verdict | None:
    """Compare a plan, or a control, with fp32 over the first seeds that both have; None without any."""
    pairs = ((rule.control or rule.name, "fp32"), (rule.name, plan))
    keys = ([key_of(*pair, seed, lr) for pair in pairs] for seed in range(len(found)))
    runs = [[found[key] for key in seed] for seed in takewhile(lambda seed: all(k in found for k in seed), keys)]
    if not runs:
        return None
    base, other = zip(*runs, strict=True)
    return Verdict(name, lr, [run[0] for run in base], [run[0] for run in other], base[0][1], other[0][1])


def rate_found(rule: Rule, found: Found) -> tuple[float, list[float]]:
    """Return the best learning rate of fp32 at seed 0, and its neighbours in powers of 2 that are yet to be tried.

    The search begins with the rule's own rate, its half and its double.
    """
    rates = {k: rule.options["lr"] * 2.0**k for k in range(-12, 13)}
    name = rule.control or rule.name
    losses = {k: found[key][0] for k, lr in rates.items() if (key := key_of(name, "fp32", 0, lr)) in found}
    best = min(losses, key=lambda k: losses[k] if math.isfinite(losses[k]) else math.inf, default=0)
    return rates[best], [rates[k] for k in (best - 1, best, best + 1) if k not in losses]


def missing(part: str, found: Found, seeds: int) -> list[Key]:
    """Return the runs that a part of the record needs next."""
    wanted: list[Key] = []
    for rule in rules_of(part):
        lr, tries = rate_found(rule, found) if part == "tuned" else (rule.options["lr"], [])
        if tries:
            wanted += [(rule.control or rule.name, "fp32", 0, x) for x in tries]
        else:
            wanted += [(rule.name, p, s, lr) for p in dict.fromkeys(("fp32", *rule.plans)) for s in range(seeds)]
    return [key for key in dict.fromkeys(wanted) if key_of(*key) not in found]


def parts(kept: Mapping[str, Any]) -> dict[str, list[Verdict]]:
    """Return the comparisons of the page's tables, of those runs that are there."""
    fixed, rates = rules_of("fixed"), {r.name: rate_found(r, kept["tuned"])[0] for r in TUNED}
    labels = {(r.name, plan): r.name if plan == "fp32" else f"{r.name}, {plan}" for r in TUNED for plan in r.plans}
    made = {
        "rules": [verdict(kept["fixed"], r, PLANS[1], r.options["lr"], f"{r.name}, {PLANS[1]}") for r in fixed],
        "plans": [verdict(kept["fixed"], fixed[0], plan, fixed[0].options["lr"], plan) for plan in fixed[0].plans],
        "tuned": [verdict(kept["tuned"], r, p, rates[r.name], labels[r.name, p]) for r in TUNED for p in r.plans],
    }
    return {name: [v for v in verdicts if v] for name, verdicts in made.items()}


def run_all(kept: dict[str, Any], seeds: int, jobs: int) -> None:
    """Make the runs that are missing side by side, and write each down at its end."""
    text = corpus()
    if kept["text"] != text.digest:
        raise SystemExit(f"train_rules: {RECORD} is of the text {kept['text']}, not of {text.digest}")
    with ProcessPoolExecutor(jobs) as pool:
        for part, steps in STEPS.items():
            named = {rule.name: rule for rule in rules_of(part)}
            while wanted := missing(part, kept[part], seeds):
                runs = {pool.submit(one_run, named[k[0]], *k[1:3], steps, k[3], text): key_of(*k) for k in wanted}
                for done in as_completed(runs):
                    run = done.result()
                    curve = (round(loss, 4) for _, loss in run.validation)
                    kept[part][runs[done]] = run.final, (run.weight_bytes + run.state_bytes) / run.parameters, *curve
                    RECORD.write_text(packed(kept), encoding="utf-8")
                    print(f"{runs[done]}: {run.final:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, a thread each")
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    kept: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    if not asked.page:
        run_all(kept, asked.seeds, asked.jobs)
    PAGE.write_text(page(kept, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    from docs.tools.draw import write  # which reads this record

    write("training")
    write("curves")


if __name__ == "__main__":
    main()
