"""A picture of one workgroup's waves over simulated time: matrix, LDS, memory, vector work, waits and barriers per
wave."""

from __future__ import annotations

import os
from pathlib import Path

from .report import Report, run_together
from .timing import Machine950

COLOURS = {
    "matrix": "#c0392b",
    "LDS": "#2e86c1",
    "memory": "#7d3c98",
    "vector": "#27ae60",
    "scalar": "#b2babb",
    "wait": "#f4d03f",
    "barrier": "#34495e",
}
ROW = {
    "mfma": "matrix", "lds_read": "LDS", "lds_write": "LDS", "direct": "memory", "load": "memory", "store": "memory",
    "valu": "vector", "trans": "vector", "salu": "scalar", "branch": "scalar", "nop": "scalar", "prio": "scalar",
    "smem": "scalar", "barrier": "barrier",
}  # fmt: skip


def spans(report: Report, machine: Machine950 | None = None) -> list[tuple[int, str, float, float]]:
    """(wave, row, start, length) of everything drawn, in simulated cycles. Waits are the gaps between a wave's issues
    that
    a wait instruction ends."""
    machine = machine or Machine950()
    timing = run_together(report.recorder, 1, machine, events=True)
    out: list[tuple[int, str, float, float]] = []
    last: dict[int, float] = {}
    for wave, _, start, length, kind in sorted(timing.events, key=lambda e: (e[0], e[2])):
        if kind == "wait":
            since = last.get(wave, 0.0)
            if start > since:
                out.append((wave, "wait", since, start - since))
        elif kind in ROW:
            shown = machine.cadence if kind in ("direct", "load", "store") else length
            out.append((wave, ROW[kind], start, max(shown, 1.0)))
        issue = machine.cadence if kind != "barrier" else length
        last[wave] = start + issue
    return out


def draw(report: Report, file: str | os.PathLike, cycles: tuple[float, float] | None = None) -> Path:
    """Writes the timeline as SVG or PNG, by the file's suffix. `cycles` cuts a window out of it.

    ValueError for another suffix; ImportError if matplotlib is missing (pip install flykernels[sim]).
    """
    path = Path(file)
    if path.suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"{path.name}: a timeline is an .svg or a .png file")
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as e:
        raise ImportError("drawing a timeline needs matplotlib: pip install flykernels[sim]") from e
    all_spans = spans(report)
    if cycles is not None:
        all_spans = [s for s in all_spans if s[2] < cycles[1] and s[2] + s[3] > cycles[0]]
    waves = sorted({s[0] for s in all_spans})
    rows = list(COLOURS)
    figure = Figure(figsize=(16, max(2.0, 0.55 * len(waves) + 1.4)))
    axes = figure.add_subplot()
    height = 1.0 / (len(rows) + 1)
    for k, wave in enumerate(waves):
        for n, row in enumerate(rows):
            bars = [(start, length) for w, r, start, length in all_spans if w == wave and r == row]
            axes.broken_barh(bars, (k + n * height, height * 0.9), facecolors=COLOURS[row], linewidth=0)
    axes.set_yticks([k + 0.45 for k in range(len(waves))], [f"wave {w}" for w in waves])
    axes.set_ylim(len(waves), 0)
    if cycles is not None:
        axes.set_xlim(*cycles)
    axes.set_xlabel("cycles, simulated")
    axes.set_title(f"{report.kernel}: one workgroup, simulated (not measured)")
    axes.legend(
        handles=[Patch(color=c, label=r) for r, c in COLOURS.items()], loc="upper center", ncol=len(rows),
        bbox_to_anchor=(0.5, -0.12 - 0.5 / max(2, len(waves))), frameon=False,
    )  # fmt: skip
    figure.savefig(path, bbox_inches="tight", dpi=120)
    return path
