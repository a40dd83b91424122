"""Tables on the terminal and in Markdown, and the roofline picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.report import COLOURS, table

from cpu.contenders import BASE

Head = tuple[str, ...]
Rows = list[list[str]]

SHORT = {BASE: "torch fused fp32"}
"""How tables and labels call the contender that all others are compared with."""


# Tables ---------------------------------------------------------------------------------------------------------------


def contender_table(section: Mapping[str, Any]) -> tuple[Head, Rows]:
    """A row per contender; `speed`: how many times as fast as torch's fused fp32 AdamW."""
    whole = section["whole_step"]
    ceilings = any("share_of_ceiling" in r for r in section["rows"])
    head = ["", "B kept", "B moved", "us per step" if whole else "ns per parameter", "quartiles", "speed", "quartiles"]
    head += ["of ceiling"] * ceilings
    rows = []
    for r in section["rows"]:
        time, speed = r["us_per_step" if whole else "ns_per_parameter"], r.get("speed")
        cells = [
            r["name"],
            f"{r['kept_per_parameter']:.4g}",
            f"{r['bytes_per_parameter']:.4g}",
            digits(time["median"]),
            f"{digits(time['q1'])} to {digits(time['q3'])}",
            digits(speed["median"]) if speed else "1",
            f"{digits(speed['q1'])} to {digits(speed['q3'])}" if speed else "",
        ]
        if ceilings:
            cells.append(f"{r['share_of_ceiling']['median']:.0%}" if "share_of_ceiling" in r else "")
        rows.append(cells)
    return tuple(head), rows


def ceiling_table(section: Mapping[str, Any]) -> tuple[Head, Rows]:
    rows = [
        [
            c["streams"],
            f"{c['bytes_per_parameter']:.4g}",
            digits(c["ns_per_parameter"]["median"]),
            f"{c['gb_s']['median']:.1f}",
            f"{c['gb_s']['q1']:.1f} to {c['gb_s']['q3']:.1f}",
        ]
        for c in section["ceilings"]
    ]
    return ("memory alone, per parameter", "B moved", "ns per parameter", "GB/s", "quartiles"), rows


def target_table(targets: Sequence[Mapping[str, Any]]) -> tuple[Head, Rows]:
    rows = [
        [
            t["name"],
            SHORT.get(t["against"], t["against"]),
            t["size"],
            str(t["threads"]),
            f"{t['at_least']:g}",
            "" if t["measured"] is None else f"{t['measured']:.3g}",
            t["verdict"],
        ]
        for t in targets
    ]
    return ("target", "against", "size", "threads", "at least", "measured", ""), rows


def settled(targets: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """(those that were measured, a sentence about the rest)."""
    measured = [t for t in targets if t["measured"] is not None]
    others = len(targets) - len(measured)
    return measured, [f"Targets of which this run measured nothing: {others}."] if others else []


def digits(value: float) -> str:
    """Three of them.

    >>> digits(0.5812), digits(34.06), digits(1234.5)
    ('0.581', '34.1', '1234')
    """
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


# Terminal -------------------------------------------------------------------------------------------------------------


def show_section(section: Mapping[str, Any]) -> None:
    show(f"{section['title']}, {threads_of(section)}", *contender_table(section))
    if section["ceilings"]:
        show("", *ceiling_table(section))


def show_targets(targets: Sequence[Mapping[str, Any]]) -> None:
    measured, rest = settled(targets)
    if measured:
        show("Targets", *target_table(measured))
    print(*rest, sep="\n", flush=True)


def show(title: str, head: Head, rows: Rows) -> None:
    """With rich, whose tables fit themselves to the terminal; a Markdown table where it is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("\n".join([title, "", *table(head, rows)]), flush=True)
        return
    styles = {"met": "green", "missed": "red"}
    shown = Table(title=title or None, title_justify="left", header_style="bold")
    for k, name in enumerate(head):
        numeric = all(row[k][:1].isdigit() or not row[k] for row in rows) and k > 0
        shown.add_column(name, justify="right" if numeric else "left", no_wrap=k == 0)
    for row in rows:
        shown.add_row(*row, style=styles.get(row[-1]))
    console = Console()
    # A pipe has no width of its own: wide enough for every table.
    (console if console.is_terminal else Console(width=140)).print(shown)


def threads_of(section: Mapping[str, Any]) -> str:
    return f"{section['threads']} thread{'s' * (section['threads'] > 1)}"


# Markdown -------------------------------------------------------------------------------------------------------------


def markdown(data: Mapping[str, Any], picture: str | None) -> str:
    machine = data["machine"]
    lines = [f"# {machine['cpu']}, {machine['date']}", "", _machine(machine), ""]
    lines += [
        "Contenders took turns in one process, in a random order every round.  Times are medians with quartiles; "
        f"*speed* is the median of the rounds' own ratios to {BASE} (higher is faster).  *Of ceiling*: the time that "
        "memory alone takes for the same streams, in the same rounds, as a share of the contender's.  *B kept* and "
        "*B moved* are counted on the tensors that each holds.",
        "",
    ]
    if data.get("targets"):
        measured, rest = settled(data["targets"])
        lines += ["## Targets", ""] + (table(*target_table(measured)) if measured else [])
        lines += [*rest, ""] if rest else []
    if picture:
        lines += [f"![time per parameter over bytes per parameter]({picture})", ""]
    for section in data["sections"]:
        lines += [f"## {section['title']}, {threads_of(section)}", ""]
        lines += table(*contender_table(section))
        if section["ceilings"]:
            lines += table(*ceiling_table(section))
        lines += left_out(section["left_out"], "Left out")
    lines += left_out(data["missing"], "Not compared")
    return "\n".join(lines).rstrip() + "\n"


def _machine(machine: Mapping[str, Any]) -> str:
    words = [f"{machine['cores']} cores", f"torch {machine['torch']}"]
    words += [f"{name} {version}" for name, version in machine["packages"].items()]
    words += [machine["compiler"]] if machine["compiler"] else []
    words += [f"code path {machine['code_path']}"]
    if machine["last_cache_mib"]:
        words.append(f"{machine['last_cache_mib']:g} MiB of last-level cache")
    if machine["load"] is not None:
        words.append(f"load at the start {machine['load']}")
    return ", ".join(words) + "."


def left_out(found: Mapping[str, str], words: str) -> list[str]:
    """A sentence, with those together that have the same reason."""
    reasons = {reason: [name for name, why in found.items() if why == reason] for reason in found.values()}
    said = [f"{' and '.join(names)} ({reason})" for reason, names in reasons.items()]
    return [f"{words}: {'; '.join(said)}.", ""] if said else []


# Picture --------------------------------------------------------------------------------------------------------------


def roofline_section(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The sections to draw, one per number of threads: the largest single tensor with ceilings."""
    fitting = [s for s in data["sections"] if s["ceilings"] and s["tensors"] == 1 and s["rows"]]
    if not fitting:
        return []
    largest = max(s["elements"] for s in fitting)
    return sorted((s for s in fitting if s["elements"] == largest), key=lambda s: s["threads"])


def picture(data: Mapping[str, Any], path: Path) -> bool:
    """Time over traffic: what lies on the line is as fast as memory.  False where there is nothing to draw with."""
    shown = roofline_section(data)
    if not shown:
        return False
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    figure, axes = plt.subplots(1, len(shown), figsize=(6.6 * len(shown), 7.2), squeeze=False)
    times = [r["ns_per_parameter"]["median"] for s in shown for r in (*s["rows"], *s["ceilings"])]
    for axis, section in zip(axes[0], shown, strict=True):
        _draw(axis, section, (min(times) * 0.75, max(times) * 1.35))
    axes[0][0].set_ylabel("ns per parameter and step")
    machine = data["machine"]
    figure.suptitle(f"{machine['cpu']}, torch {machine['torch']}, {shown[0]['title']}", fontsize=10)
    figure.tight_layout()
    for axis, section in zip(axes[0], shown, strict=True):
        _label(axis, section["rows"])  # where there is room is known once everything else stands
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return True


def _draw(axis: Any, section: Mapping[str, Any], span: tuple[float, float]) -> None:
    """span: of the times, the same on all axes."""
    from matplotlib.ticker import FixedLocator, FormatStrFormatter, LogLocator, NullFormatter

    ceilings = section["ceilings"]
    bandwidth = statistics.median(c["gb_s"]["median"] for c in ceilings)
    moved = [r["bytes_per_parameter"] for r in section["rows"]]
    ends = [min(moved) * 0.85, max(moved) * 1.15]
    axis.fill_between(ends, [b / bandwidth for b in ends], span[0], color="#ececec", lw=0, zorder=0)
    axis.plot(ends, [b / bandwidth for b in ends], color="#444444", lw=1.2, zorder=1)
    heights = [c["ns_per_parameter"]["median"] for c in ceilings]
    axis.plot([c["bytes_per_parameter"] for c in ceilings], heights, "_", color="#444444", ms=9, zorder=2)
    for r in section["rows"]:
        time = r["ns_per_parameter"]
        spread = [[time["median"] - time["q1"]], [time["q3"] - time["median"]]]
        look = {"fmt": "o", "ms": 5, "color": COLOURS[r["ours"]], "ecolor": "#999999", "elinewidth": 1, "zorder": 3}
        axis.errorbar(r["bytes_per_parameter"], time["median"], yerr=spread, **look)
    axis.set(xscale="log", yscale="log", xlim=(ends[0], ends[1] * 1.6), ylim=span)
    axis.set_title(f"{threads_of(section)}; memory alone: {bandwidth:.0f} GB/s", fontsize=9, loc="left")
    axis.set_xlabel("bytes moved per parameter and step")
    axis.xaxis.set_major_locator(FixedLocator([x for x in (8, 10, 12, 14, 16, 20, 24, 28) if ends[0] <= x <= ends[1]]))
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(FormatStrFormatter("%g"))
        side.set_minor_formatter(NullFormatter())
    axis.minorticks_off()
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _label(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Names beside their points, each at the nearest place where it covers no other name and no point."""
    figure = axis.figure
    figure.canvas.draw()
    renderer, point = figure.canvas.get_renderer(), figure.dpi / 72
    spots = {r["name"]: (r["bytes_per_parameter"], r["ns_per_parameter"]["median"]) for r in rows}
    on_screen = {name: axis.transData.transform(spot) for name, spot in spots.items()}
    radius, away, height = 3 * point, 8 * point, 9 * point
    taken: list[Box] = [(x - radius, y - radius, x + radius, y + radius) for x, y in on_screen.values()]
    places = [(side, up) for side in (1, -1) for up in range(-120, 121, 4)]
    places.sort(key=lambda place: abs(place[1]) + 6 * (place[0] < 0))
    room = axis.get_window_extent(renderer)
    for r in sorted(rows, key=lambda r: -r["ns_per_parameter"]["median"]):
        words = SHORT.get(r["name"], r["name"])
        trial = axis.text(0, 0, words, fontsize=7)
        width = trial.get_window_extent(renderer).width
        trial.remove()

        def box(place: tuple[int, int], name: str = r["name"], width: float = width) -> Box:
            x, y = on_screen[name]
            left, middle = (x + away if place[0] > 0 else x - away - width), y + place[1] * point
            return left, middle - height / 2, left + width, middle + height / 2

        free = (p for p in places if _inside(box(p), room) and not any(overlap(box(p), other) for other in taken))
        side, up = place = next(free, places[0])
        taken.append(box(place))
        line = {"arrowstyle": "-", "lw": 0.4, "color": "#999999", "shrinkA": 0, "shrinkB": 2, "relpos": (side < 0, 0.5)}
        axis.annotate(
            words, spots[r["name"]], xytext=(8 * side, up), textcoords="offset points", fontsize=7, va="center",
            ha="left" if side > 0 else "right", color="#123f4e" if r["ours"] else "#555555", arrowprops=line,
        )  # fmt: skip


Box = tuple[float, float, float, float]
"""(left, bottom, right, top)."""


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _inside(box: Box, room: Any) -> bool:
    return bool(room.x0 <= box[0] and room.y0 <= box[1] and box[3] <= room.y1)
