"""Draw docs/memory.svg: bytes per parameter of AdamW under some plans, as derived from their formats.

.venv/bin/python tools/draw_memory.py
"""

from __future__ import annotations

from pathlib import Path

from optgen.driver import load
from optgen.formats.plan import Storage
from optgen.ops import dtypes

FILE = Path(__file__).resolve().parent.parent / "docs" / "memory.svg"
PLANS = ("fp32", "bf16_sr", "int8_split24", "int6_split24", "int5_split24", "int4_split24", "int5_factored_split24")
NAMES = {"fp32": "fp32, as torch.optim"}
WEIGHT, STATES, INK = "#3b6ea8", "#e39a3b", "#222222"
LEFT, SCALE, BAR, PITCH, TOP = 190, 34, 20, 30, 44


def storage(plan: str) -> Storage:
    """Return the storage of AdamW, for an fp32 parameter under `fp32` (as in torch) and else for a bf16 parameter."""
    adamw = load.find_spec("adamw")
    states = adamw.present({f.name: f.default for f in adamw.flags})
    return load.find_plan(plan).storage(states, dtypes.f32 if plan == "fp32" else dtypes.bf16, False)


def draw() -> str:
    """Return the text of the SVG."""
    width, height = LEFT + 12 * SCALE + 90, TOP + len(PLANS) * PITCH + 6
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="10" y="22" font-weight="bold">AdamW, bytes per parameter</text>',
    ]
    for x, colour, label in ((LEFT + 170, WEIGHT, "weight"), (LEFT + 260, STATES, "optimizer states")):
        out.append(f'<rect x="{x}" y="11" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 18}" y="22">{label}</text>')
    for n, plan in enumerate(PLANS):
        found, y = storage(plan), TOP + n * PITCH
        total = found.bytes_per_param
        states = sum(fmt.bytes_per_param for fmt in found.states.values())
        weight, edge = total - states, LEFT + (total - states) * SCALE
        out += [
            f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{NAMES.get(plan, plan)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{weight * SCALE:.1f}" height="{BAR}" fill="{WEIGHT}"/>',
            f'<rect x="{edge:.1f}" y="{y}" width="{states * SCALE:.1f}" height="{BAR}" fill="{STATES}"/>',
            f'<text x="{LEFT + total * SCALE + 8:.1f}" y="{y + 15}">{total:g}</text>',
        ]
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
