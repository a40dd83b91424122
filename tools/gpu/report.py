"""JSON, a Markdown table and a picture of what was found."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SECTIONS = ("tensor", "gpt2", "llama_8b")
PARTS = {
    "stages": ("Rules of several sweeps", "settings have the eager reference's bits in strict maths"),
    "graphs": ("CUDA graphs", "settings give the bits of steps outside a graph when they are replayed"),
    "moves": ("Between device and host", "checks find the same bits on both"),
}
"""Section of what is checked beside single kernels -> title, and what is said of those that are right."""
COLOURS = {True: "#1f6f8b", False: "#b9b4a7"}


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """At once or not at all: a run may be cut short at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        json.dump(data, stream, indent=1, default=str)
        stream.write("\n")
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """An earlier report, {} where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# Markdown -------------------------------------------------------------------------------------------------------------


def markdown(data: Mapping[str, Any], picture: str | None) -> str:
    machine = data["machine"]
    lines = [f"# {machine['device']}, {machine['date']}", "", _versions(machine), ""]
    if data.get("correctness"):
        lines += _correctness(data["correctness"])
    for name, (title, said) in PARTS.items():
        if data.get(name):
            lines += _part(data[name], title, said)
    for name in ("correctness", "bench", "room", "run"):
        if data.get(f"{name}_error"):
            lines += [f"The part `{name}` ended early: {data[f'{name}_error']}", ""]
    if data.get("targets"):
        lines += ["## Targets", "", *_targets(data["targets"])]
    if picture:
        lines += [f"![times of all contenders]({picture})", ""]
    for name in SECTIONS:
        if data.get(name):
            lines += _section(data[name])
    if data.get("missing"):
        lines += ["Not compared: " + "; ".join(f"{k} ({v})" for k, v in data["missing"].items()) + ".", ""]
    if data.get("tune"):
        lines += _tune(data["tune"])
    return "\n".join(lines).rstrip() + "\n"


def _versions(machine: Mapping[str, Any]) -> str:
    words = [f"torch {machine['torch']}", f"triton {machine['triton']}"]
    for key, form in (("driver", "driver {}"), ("multiprocessors", "{} multiprocessors"), ("memory_gib", "{} GiB")):
        if machine.get(key):
            words.append(form.format(machine[key]))
    return ", ".join(words) + "."


def _correctness(found: Mapping[str, Any]) -> list[str]:
    lines = ["## Correctness", "", found["summary"], ""]
    rows = [[name, f"{value:.3g}"] for name, value in sorted(found["worst"].items(), key=lambda item: -item[1])[:12]]
    if rows:
        lines += ["Closest to the bound (distance to the reference as a share of it):", ""]
        lines += table(["value", "worst"], rows)
    for outcome in found["failed"][:20]:
        lines += [f"- **{outcome['case']}**: {'; '.join(outcome['problems'][:3])}"]
    return [*lines, ""]


def _part(found: Mapping[str, Any], title: str, said: str) -> list[str]:
    outcomes, missing = found["outcomes"], found.get("not_run", [])
    right = sum(not o["problems"] for o in outcomes)
    words = f"{right} of {len(outcomes) + len(missing)} {said}"
    lines = [f"## {title}", "", f"{words}; {len(missing)} not run." if missing else f"{words}.", ""]
    lines += [f"- **{o['case']}**: {'; '.join(o['problems'][:3])}" for o in outcomes if o["problems"]]
    lines += [f"- not run: {', '.join(missing[:20])}{' ...' * (len(missing) > 20)}"] * bool(missing)
    return [*lines, ""] if lines[-1] else lines


def _targets(targets: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [t["target"], f"{t['at_least']:g}", "" if t["measured"] is None else f"{t['measured']:.3g}", t["verdict"]]
        for t in targets
    ]
    return table(["target", "at least", "measured", ""], rows)


def _section(section: Mapping[str, Any]) -> list[str]:
    copy = section["copy_tb_s"]
    lines = [f"## {section['title']}", ""]
    tensors = section["tensors"]
    note = f"{tensors} tensor{'s' * (tensors > 1)}, {section['elements']:,} elements."
    if copy:
        note += f"  Copying moves {copy['median']:.3g} TB/s ({copy['q1']:.3g} to {copy['q3']:.3g}), read plus written."
    lines += [note, ""]
    steps = any("step_ms" in r for r in section["rows"])
    head = ["", "dtype", "B moved", "device ms", "quartiles", "G elements/s", "of copy", "device, ours = 1"]
    head += ["step ms", "host ms", "step, ours = 1"] if steps else []
    rows = []
    for r in section["rows"]:
        device = r["device_ms"]
        cells = [
            f"**{r['name']}**" if r["ours"] else r["name"],
            r["dtype"],
            f"{r['bytes_per_element']:g}",
            f"{device['median']:.3f}",
            f"{device['q1']:.3f} to {device['q3']:.3f}",
            f"{r['gelements_s']['median']:.1f}",
            f"{r['share_of_copy']['median']:.1%}",
            _ratio(r, "device_ratio"),
        ]
        if steps:
            cells += [f"{r[k]['median']:.3f}" if k in r else "" for k in ("step_ms", "host_ms")]
            cells += [_ratio(r, "step_ratio")]
        rows.append(cells)
    lines += table(head, rows)
    return lines + _left_out(section)


def _left_out(section: Mapping[str, Any]) -> list[str]:
    left_out = section.get("left_out") or {}
    return ["Left out: " + "; ".join(f"{k} ({v})" for k, v in left_out.items()) + ".", ""] if left_out else []


def _ratio(row: Mapping[str, Any], key: str) -> str:
    return f"{row[key]['median']:.2f}" if key in row else ""


def _tune(section: Mapping[str, Any]) -> list[str]:
    lines = ["## Launch settings", "", f"{section['elements']:,} elements; speed beside the default.", ""]
    rows = []
    for r in sorted(section["rows"], key=lambda r: (r["name"], r["device_ms"]["median"])):
        setting = ["default"] * 2 if r["tile"] is None else [str(r["tile"]), str(r["tiles"])]
        speed = r["speed"]
        times = [f"{r['device_ms']['median']:.3f}", f"{speed['median']:.3f}", f"{speed['q1']:.3f} to {speed['q3']:.3f}"]
        rows.append([r["name"], *setting, str(r["warps"]), *times])
    lines += table(["", "elements/tile", "tiles/item", "warps", "device ms", "speed", "quartiles"], rows)
    return lines + _left_out(section)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, columns padded so that it reads as text as well, and an empty line."""
    widths = [max(len(line[k]) for line in (head, *rows)) for k in range(len(head))]
    numeric = [all(r[k][:1].isdigit() or not r[k] for r in rows) for k in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numeric, strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * (w + 1) + (":" if n else "-") for w, n in zip(widths, numeric, strict=True)]
    return [line(head), f"|{'|'.join(rule)}|", *map(line, rows), ""]


# Picture --------------------------------------------------------------------------------------------------------------


def picture(data: Mapping[str, Any], path: Path) -> bool:
    """A bar per contender for each list of tensors; False where matplotlib is missing or there is nothing to show."""
    shown = [data[name] for name in SECTIONS if data.get(name) and data[name]["rows"]]
    if not shown:
        return False
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    heights = [len(section["rows"]) for section in shown]
    figure, axes = plt.subplots(
        len(shown), 1, figsize=(8, 0.32 * sum(heights) + 0.9 * len(shown)), height_ratios=heights, squeeze=False
    )
    for axis, section in zip(axes[:, 0], shown, strict=True):
        key = "step_ms" if all("step_ms" in r for r in section["rows"]) else "device_ms"
        rows = section["rows"][::-1]
        medians = [r[key]["median"] for r in rows]
        spread = [[r[key]["median"] - r[key]["q1"] for r in rows], [r[key]["q3"] - r[key]["median"] for r in rows]]
        colours = [COLOURS[r["ours"]] for r in rows]
        axis.barh([r["name"] for r in rows], medians, xerr=spread, color=colours, ecolor="#555555", height=0.7)
        for place, r in enumerate(rows):
            label = f" {r[key]['median']:.3g} ms"
            if key == "device_ms":
                label += f", {r['share_of_copy']['median']:.0%} of copy bandwidth"
            axis.annotate(label, (r[key]["q3"], place), va="center", fontsize=7, color="#333333")
        axis.set_xlim(0, max(medians) * 1.3)
        what = "one step, host included" if key == "step_ms" else "device time of one step"
        axis.set_title(f"{section['title']}: {what}, ms", fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    machine = data["machine"]
    figure.suptitle(f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
