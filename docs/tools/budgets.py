"""Write the tables of docs/budgets.md: which model fits on which card, from the bytes that the compiler counts.

    python -m docs.tools.budgets
"""

from __future__ import annotations

import math
from pathlib import Path

from docs.tools.format_bounds import between
from docs.tools.rule_page import sizes
from optgen.driver import load
from tools.prose import table

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "budgets.md"
MARKS = "<!-- tables: docs/tools/budgets.py -->", "<!-- end of tables -->"
CARDS = (8, 16, 24, 48, 80)
MODELS = (0.5, 1.5, 3, 7, 8, 14, 32)
FREE = 0.1  # of a card, which the second table leaves to activations at least
RULES = {"adamw": "AdamW", "lion": "Lion", "muon": "Muon, matrices"}
CLASSIC, FEW = ("fp32", "fp32_master", "split32", "bf16_sr"), ("int6_split24", "int5_split24", "int5_factored_split24")
PAIRS = [*(("adamw", p) for p in (*CLASSIC, "int8_split24", *FEW)), ("lion", "int8_split24"), ("muon", "int8_split24")]
OFFLOADED = 2.0  # bytes per parameter: bf16 weights alone, with states on the host and gradients released


def size(rule: str, plan: str) -> tuple[float, float]:
    """Return the bytes per parameter of weights, states and gradients, and those with gradients released."""
    bf16, fp32 = map(float, sizes(load.find_spec(rule), load.find_plan(plan)))
    return (fp32 + 4, fp32) if plan == "fp32" else (bf16 + 2, bf16)


def fits(model: float, card: float) -> str:
    """Return the first way for AdamW that leaves room on the card, with the GB that are left; "-" where none does."""
    kept, released = size("adamw", "int8_split24")
    ways = {"`int8_split24`": kept, "`int8_split24`, released": released}
    ways |= {f"`{plan}`, released": size("adamw", plan)[1] for plan in FEW} | {"offloaded, released": OFFLOADED}
    left = {way: card - model * each for way, each in ways.items()}
    return next((f"{way}: {rest:.1f}" for way, rest in left.items() if rest >= FREE * card), "-")


def text() -> str:
    """Return the tables."""
    rows = [(f"{RULES[rule]}, `{plan}`", *size(rule, plan)) for rule, plan in PAIRS]
    rows.append(("any rule, `offload=True`", 2 + OFFLOADED, OFFLOADED))
    cells = [[f"{math.floor(10 * c / a) / 10:.1f} / {math.floor(10 * c / b) / 10:.1f}" for c in CARDS]
             for _, a, b in rows]  # fmt: skip
    lines = [(name, f"{a:.2f} / {b:.2f}", *row) for (name, a, b), row in zip(rows, cells, strict=True)]
    cards = [f"{card} GB" for card in CARDS]
    models = [(f"{model:g}", *(fits(model, card) for card in CARDS)) for model in MODELS]
    return "\n".join([
        "Billions of parameters, with gradients kept / released:", "",
        *table(("rule, plan", "bytes per parameter", *cards), lines), "",
        f"For AdamW, the first way that leaves at least {FREE:.0%} of the card to activations, and the GB left:",
        "", *table(("billions", *cards), models, range(6)),
    ])  # fmt: skip


if __name__ == "__main__":
    DOCUMENT.write_text(between(DOCUMENT.read_text(encoding="utf-8"), text(), *MARKS), encoding="utf-8")
