"""The demo's language model trained by many rules, each in fp32 and in few bits; and by AdamW under many plans.

    python -m docs.tools.train_rules                   writes docs/training.md and docs/benchmarks/training.json
    python -m docs.tools.train_rules --plans           the same of AdamW under every plan with states below fp32
    python -m docs.tools.train_rules --plans int4_split24 flashoptim       these alone; others stay as they are
    python -m docs.tools.train_rules --only CAME --steps 200 --seeds 1
    python -m docs.tools.train_rules --tuned           matrix rules, SAM and Sophia at rates found in one way, where
                                                       runs are missing

Every pair starts from the same weights and sees the same batches in the same order, seed by seed; the learning rate is
the rule's own, found in fp32 and used for both.  What is said of a pair is the mean of its paired differences with the
95 % interval of Student's t, beside the noise of the seeds themselves.  The runs of --tuned are kept in training.json,
where those of a rule whose options change are to be deleted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tools.demo import mean_and_interval, mean_and_spread
from tools.demo_model import Corpus, Run, Size, corpus, loss_of, train
from tools.prose import filled, packed, table

# Discouraged plans are measured on purpose.
warnings.filterwarnings("ignore", r"\w+: plan '\w+' is discouraged")

ROOT = Path(__file__).resolve().parents[2]
STEPS, TUNED_STEPS, SEEDS = 600, 400, 3
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


def make(rule: Rule, plan: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of a rule, with two groups where the rule treats embeddings and the head apart."""
    import optgen

    cls, options = optgen.compile(rule.spec, plan=plan), {**rule.options, "lr": lr}
    named = list(model.named_parameters())
    if not rule.aside:
        return cls([p for _, p in named], plan=plan, **options)
    apart = [p for name, p in named if p.ndim < 2 or name.split(".")[0] in ("tokens", "positions", "head")]
    body = [p for name, p in named if all(p is not q for q in apart)]
    return cls([{"params": body}, {"params": apart, **rule.aside}], plan=plan, **options)


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
    """A pair's losses, and the paired differences of 8 bits to fp32."""

    rule: str
    lr: float
    fp32: list[float]
    int8: list[float]
    bytes_fp32: float
    bytes_int8: float

    @property
    def gap(self) -> tuple[float, float]:
        """(mean, half width of the 95 % interval)."""
        return mean_and_interval([b - a for a, b in zip(self.fp32, self.int8, strict=True)])

    @property
    def words(self) -> str:
        mean, half = self.gap
        if math.isinf(half):
            return "one seed says nothing"
        if abs(mean) <= half:
            return "no difference that these seeds show"
        return "measurably " + ("worse" if mean > 0 else "better")


def row(v: Verdict) -> list[str]:
    (a, noise), (b, _), (mean, half) = mean_and_spread(v.fp32), mean_and_spread(v.int8), v.gap
    return [
        v.rule, f"{v.lr:g}", f"{a:.4f} ± {noise:.4f}", f"{b:.4f}", f"{mean:+.4f} ± {half:.4f}", v.words,
        f"{v.bytes_fp32:.2f}", f"{v.bytes_int8:.2f}",
    ]  # fmt: skip


HEAD = ("rule", "lr", "fp32", "8 bits", "8 bits - fp32", "", "B/param fp32", "B/param 8 bits")


def markdown(kept: Mapping[str, Any]) -> str:
    verdicts, plans = ([Verdict(**v) for v in kept.get(key, [])] for key in ("verdicts", "plans"))
    size = Size()
    lines = [
        "# Training with rules and plans", "",
        f"What do few bits cost in training? The demo's model has {size.layers} layers of width {size.width}. It is",
        f"trained on bytes of Python's standard library in batches of {size.batch} x {size.context}, on one CPU (AMD",
        "EPYC). Losses are validation losses at the end in nats per byte: mean and standard deviation over seeds. Runs",
        "that are compared start from the same weights, see the same batches and have the same learning rate.",
        "Differences are paired by seed and have the 95 % interval of Student's t; one such interval in twenty misses",
        "by chance. *B/param* counts weights and states as they stand in memory (tensors below 4096 elements keep fp32",
        "states under most plans).",
    ]  # fmt: skip
    if verdicts:
        lines += [
            "", "## Rules", "",
            f"{kept['steps']} steps, {kept['seeds']} seeds, text {kept['text']}. *8 bits* is plan int8_split24 with",
            "bf16 weights, *fp32* is all in fp32. The rules' learning rates come from a coarse search, so the table",
            "compares formats within a rule, not the rules with one another.",
            "", "    .venv/bin/python -m docs.tools.train_rules", "", *table(HEAD, map(row, verdicts), (0, 5)),
        ]  # fmt: skip
    if kept.get("runs"):
        lines += tuned_section(kept)
    if plans:
        lines += [
            "", "## Plans", "",
            f"AdamW, betas (0.9, 0.95), {kept['plan_steps']} steps, {kept['plan_seeds']} seeds, text",
            f"{kept['plan_text']}; bf16 weights (fp32 ones under `int8`). The fp32 run of a seed is the same in every",
            "row.",
            "", "    .venv/bin/python -m docs.tools.train_rules --plans", "",
            *table(PLAN_HEAD, map(plan_row, plans), (0, 4)), "",
            "The row of `lpmm4_factor` was measured when its steps went on with the second moment as it is kept; they",
            "now go on with the computed one.", "", remark(plans),
        ]  # fmt: skip
    return filled("\n".join(lines)) + "\n"


def tuned_section(kept: Mapping[str, Any]) -> list[str]:
    verdicts = tuned(kept["runs"], kept["tuned_seeds"])
    first = {v.rule.split(",")[0]: v for v in reversed(verdicts)}
    adamw, control = first.pop("AdamW").fp32, next(v.gap[1] for v in verdicts if v.rule == "SOAP, control")
    gaps = [(mean_and_interval([b - a for a, b in zip(adamw, v.fp32, strict=True)]), n) for n, v in first.items()]
    return [
        "", "## Matrix rules, SAM and Sophia", "",
        f"{kept['tuned_steps']} steps, {kept['tuned_seeds']} seeds, text {kept['tuned_text']}. Learning rates are",
        "found in one way. In fp32 with seed 0, half the authors' default, the default and its double are tried, then",
        "more powers of two until the best rate has a worse one on either side. It serves all seeds and plans. Else",
        "rules have their defaults, with a weight decay of 0.1, AdamW's betas (0.9, 0.95), and a quarter of full rank",
        "for GaLore and APOLLO. Embeddings, norms and the head have AdamW under GaLore, APOLLO, Muon and SOAPMuon (in",
        "the last two at the rate found for AdamW). SOAP, Kron and Shampoo take embeddings and the head as matrices.",
        "*Muon, low rank* is LowRankMuon, beside Muon in fp32, which it is without its fewer bits. *SOAP, control*",
        "is SOAP in fp32 with a refresh every 9 steps, not 10: how far fp32 lies from itself if refreshes",
        "fall on other steps. *SAM* is AdamW in `optgen.SAM` with rho 0.05, of two gradients a step. *Sophia* is fed",
        "squared gradients for labels drawn from the model every 10 steps (Sophia-G), with its authors' gamma 0.05.",
        "Neither rho nor gamma was tuned. Sophia's bytes include 4 of the tensor that was fed last.",
        "", "    .venv/bin/python -m docs.tools.train_rules --tuned", "",
        *table(("run", "lr", "fp32", "loss", "- fp32", "", "B/param fp32", "B/param"), map(row, verdicts), (0, 5)),
        "", "![Differences of losses to fp32, with their intervals](images/training.svg)", "",
        "Rules in fp32, minus AdamW, paired: "
        + ", ".join(f"{name} {mean:+.3f} ± {half:.3f}" for (mean, half), name in sorted(gaps))
        + ". Seed 0 also chose the learning rates, on the text of the table's losses. So short a run favours rules",
        f"that are fast at first. The control's interval (± {control:.2f}) is what SOAP's seeds cannot tell apart.",
    ]  # fmt: skip


PLAN_HEAD = ("plan", "fp32", "loss", "- fp32", "", "B/param")


def plan_row(v: Verdict) -> list[str]:
    (a, noise), (b, spread), (mean, half) = mean_and_spread(v.fp32), mean_and_spread(v.int8), v.gap
    return [
        f"`{v.rule}`", f"{a:.4f} ± {noise:.4f}", f"{b:.4f} ± {spread:.4f}", f"{mean:+.4f} ± {half:.4f}", v.words,
        f"{v.bytes_int8:.2f}",
    ]  # fmt: skip


def remark(plans: list[Verdict]) -> str:
    """Return the conclusion from the table, and its limits."""
    apart = [f"`{v.rule}`" for v in plans if v.words.startswith("measurably")]
    widest = max(v.gap[1] for v in plans)
    said = f"Outside the noise: {', '.join(apart)}." if apart else "None of them is outside the noise of these seeds."
    plain = [f"`{v.rule}`" for v in plans if rounds_weights_to_nearest(v.rule)]
    if plain:
        said += (
            f" {', '.join(plain)} round their bf16 weights to nearest, like the packages that they reproduce. Most of "
            "what they lose comes from the weights."
        )
    return (
        f"{said} So few seeds do not tell apart differences below the widths of the intervals (up to {widest:.3f}), "
        "and the noise of few bits may regularise a small model. Losses find what is broken. To compare formats, see "
        "[benchmarks/formats.md](benchmarks/formats.md)."
    )


def rounds_weights_to_nearest(plan: str) -> bool:
    """Return True if the plan stores weights as bf16 alone, rounded to nearest."""
    from optgen.formats import Native
    from specs import plans

    return plan not in OF_FP32 and getattr(plans, plan).master == Native("nearest")


def plans_asked(names: list[str]) -> list[str]:
    """Return the plans with states below fp32, or those of these names; SystemExit for one that is unknown."""
    from optgen.formats import Plan, floats
    from specs import plans

    every = {name: plan for name, plan in vars(plans).items() if isinstance(plan, Plan)}
    unknown = [name for name in names if name not in every]
    if unknown:
        raise SystemExit(f"--plans: expected some of {', '.join(every)}, got {', '.join(unknown)}")
    return names or [name for name, plan in every.items() if plan.signed != floats.f32]


Key = tuple[str, str, int, float]  # rule, plan, seed, learning rate
Found = dict[str, tuple[float, ...]]  # key_of(a key) -> loss at the end, bytes per parameter, losses along the run


def key_of(rule: str, plan: str, seed: int, lr: float) -> str:
    return f"{rule}, {plan}, seed {seed}, lr {lr:g}"


def run_all(
    rules: tuple[Rule, ...], wanted: list[Key], asked: argparse.Namespace, text: Corpus, found: Found,
    save: Callable[[], None] = lambda: None,
) -> Found:  # fmt: skip
    """Return `found` with the runs that are wanted; `save` is called at the end of each."""
    named = {rule.name: rule for rule in rules}
    with ProcessPoolExecutor(asked.jobs) as pool:
        runs = {pool.submit(one_run, named[k[0]], *k[1:3], asked.steps, k[3], text): key_of(*k) for k in wanted}
        for done in as_completed(runs):
            run = done.result()
            curve = (round(loss, 4) for _, loss in run.validation)
            found[runs[done]] = run.final, (run.weight_bytes + run.state_bytes) / run.parameters, *curve
            save()
            print(f"{runs[done]}: {run.final:.4f}")
    return found


def verdict(found: Found, rule: Rule, plan: str, lr: float, seeds: int, name: str) -> Verdict:
    """Compare a plan, or a control, with fp32; KeyError without its runs."""
    pairs = ((rule.control or rule.name, "fp32"), (rule.name, plan))
    base, other = ([found[key_of(*pair, s, lr)] for s in range(seeds)] for pair in pairs)
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


def missing(rules: tuple[Rule, ...], found: Found, seeds: int) -> list[Key]:
    """Return the runs that the tuned table needs next."""
    wanted: list[Key] = []
    for rule in rules:
        lr, tries = rate_found(rule, found)
        if tries:
            wanted += [(rule.control or rule.name, "fp32", 0, x) for x in tries]
        else:
            wanted += [(rule.name, p, s, lr) for p in dict.fromkeys(("fp32", *rule.plans)) for s in range(seeds)]
    return [key for key in dict.fromkeys(wanted) if key_of(*key) not in found]


def tuned(found: Found, seeds: int) -> list[Verdict]:
    """Compare plans and controls with fp32 at the rate that was found, for all rules whose runs are there."""
    verdicts = []
    for rule in TUNED:
        lr, _ = rate_found(rule, found)
        for plan in rule.plans:
            with suppress(KeyError):
                label = rule.name if plan == "fp32" else f"{rule.name}, {plan}"
                verdicts.append(verdict(found, rule, plan, lr, seeds, label))
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", nargs="*", default=[], help="rules by class name")
    parser.add_argument("--plans", nargs="*", help="AdamW under these plans; no name: all with states below fp32")
    parser.add_argument("--tuned", action="store_true", help="the table of matrix rules, SAM and Sophia: missing runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, a thread each")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    asked = parser.parse_args()
    asked.steps = asked.steps or (TUNED_STEPS if asked.tuned else STEPS)
    text = corpus()
    (asked.out / "benchmarks").mkdir(parents=True, exist_ok=True)
    record = asked.out / "benchmarks" / "training.json"
    kept: dict[str, Any] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}

    def save() -> None:
        record.write_text(packed(kept), encoding="utf-8")

    seeds = range(asked.seeds)
    rules = tuple(r for r in (TUNED if asked.tuned else RULES) if not asked.only or r.name in asked.only)
    if asked.tuned:
        if [kept.get(f"tuned_{k}") for k in ("steps", "text")] != [asked.steps, text.digest]:
            kept["runs"] = {}
        kept |= {"tuned_steps": asked.steps, "tuned_seeds": asked.seeds, "tuned_text": text.digest}
        while wanted := missing(rules, kept["runs"], asked.seeds):
            run_all(TUNED, wanted, asked, text, kept["runs"], save)
        verdicts = tuned(kept["runs"], asked.seeds)
    elif asked.plans is not None:
        rule, plans = RULES[0], plans_asked(asked.plans)
        wanted = [(rule.name, plan, s, rule.options["lr"]) for s in seeds for plan in ("fp32", *plans)]
        found = run_all(RULES, wanted, asked, text, {})
        verdicts = [verdict(found, rule, plan, rule.options["lr"], asked.seeds, plan) for plan in plans]
        former = [kept.get(f"plan_{k}") for k in ("steps", "seeds", "text")]
        same = [asked.steps, asked.seeds, text.digest] == former
        old = {v["rule"]: v for v in kept.get("plans", [])} if same else {}
        kept |= {"plan_steps": asked.steps, "plan_seeds": asked.seeds, "plan_text": text.digest}
        kept["plans"] = list((old | {v.rule: asdict(v) for v in verdicts}).values())
    else:
        wanted = [(r.name, plan, s, r.options["lr"]) for r in rules for plan in PLANS for s in seeds]
        found = run_all(RULES, wanted, asked, text, {})
        verdicts = [verdict(found, r, PLANS[1], r.options["lr"], asked.seeds, r.name) for r in rules]
        kept |= {"steps": asked.steps, "seeds": asked.seeds, "text": text.digest}
        kept["verdicts"] = [asdict(v) for v in verdicts]
    head, of = (PLAN_HEAD, plan_row) if asked.plans is not None else (HEAD, row)
    print(*table(head, map(of, verdicts)), sep="\n")
    (asked.out / "training.md").write_text(markdown(kept), encoding="utf-8")
    save()
    if asked.out == ROOT / "docs":
        from draw import write  # which reads this record

        write("training")
        write("curves")
    return 0


if __name__ == "__main__":
    sys.exit(main())
