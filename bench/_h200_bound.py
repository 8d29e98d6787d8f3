"""How much faster than the others a kernel could be at most, case by case, from what `bench h200` has measured.

    python -m bench._h200_bound bench/results/h200.json                  # tables in Markdown
    python -m bench._h200_bound bench/results/h200.json docs/h200.md     # put there, between the marks

No way to compute a case takes less than its memory traffic at the rate at which this GPU reads, nor less than its
arithmetic at the highest rate that anybody reached in any case of the same state and form: in a graph that is what
power allows. To either comes what lies between kernels: the least that anybody took beyond a case's memory traffic.
Where somebody was faster than all this, the bound is that time. Hot operands may come out of L2, so hot bounds of what
fits there are no more than the fastest time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import _h200_time as timing
from ._h200_gemm import Case
from .common import geomean


def _case(row: dict[str, Any]) -> Case:
    return Case(row["kind"], row["M"], row["N"], row["K"])


def bounds(rows: Sequence[dict[str, Any]], state: str, form: str) -> list[dict[str, Any]]:
    """Of each row of the raw figures: microseconds of the bound and of the ways, and how many times faster than the
    best of the others the bound is."""
    at = [row[f"{state} {form}"] for row in rows]
    least = [min(a["us"].values()) for a in at]
    cases = [_case(row) for row in rows]
    rate = max(c.operations / us for c, us in zip(cases, least, strict=True))
    beyond = [us - c.memory_us for c, us in zip(cases, least) if c.memory_us >= c.operations / rate]
    between = max(0.0, min(beyond, default=0.0))
    found = []
    for case, a, us in zip(cases, at, least, strict=True):
        bound = min(us, max(case.memory_us, case.operations / rate) + between)
        other = a["us"][a["best other"]]
        told = {
            "bound": bound,
            "ours": a["us"].get("ours", float("nan")),
            "other": other,
            "best other": a["best other"],
        }
        found.append({"kind": case.kind, "case": f"{case.m}x{case.n}x{case.k}", "floor": case.floor_us, **told,
                      "most": other / bound, "reached": a.get("ours ratio", float("nan"))})  # fmt: skip
    return found


def most(rows: Sequence[dict[str, Any]], state: str, form: str) -> float:
    """The geometric mean over the cases: what no kernel goes beyond."""
    return geomean(b["most"] for b in bounds(rows, state, form))


def table(rows: Sequence[dict[str, Any]], state: str, form: str) -> str:
    """In Markdown, a line a case; microseconds."""
    found = bounds(rows, state, form)
    lines = [
        "| case | floor | bound | ours | best other | bound allows | reached |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for b in found:
        what = b["case"] if b["kind"] == "mm" else f"{b['kind']} {b['case']}"
        other = f"{b['other']:.1f} ({b['best other']})"
        us, ratios = f"{b['floor']:.1f} | {b['bound']:.1f} | {b['ours']:.1f}", f"{b['most']:.3f} | {b['reached']:.3f}"
        lines.append(f"| {what} | {us} | {other} | {ratios} |")
    reached = geomean(b["reached"] for b in found)
    lines.append(f"| geometric mean | | | | | {geomean(b['most'] for b in found):.3f} | {reached:.3f} |")
    return "\n".join(lines)


PARTS = {"dense": timing.FORMS, "fused": ("graph",)}
BEGIN, END = "<!-- bounds: begin -->", "<!-- bounds: end -->"


def summary(raw: dict[str, Any]) -> str:
    """In Markdown, a line for each geometric mean."""
    lines = ["| | bound allows | reached |", "| --- | --- | --- |"]
    for part, forms in PARTS.items():
        for state, form in ((s, f) for s in timing.STATES for f in forms):
            reached = geomean(b["reached"] for b in bounds(raw[part], state, form))
            lines.append(f"| {part}, {state}, {form} | {most(raw[part], state, form):.3f} | {reached:.3f} |")
    return "\n".join(lines)


def document(raw: dict[str, Any]) -> str:
    """What the documentation holds: all means, and case by case those of graphs with cold operands."""
    cold = [f"{part}, L2 cold, graph, us:\n\n{table(raw[part], 'cold', 'graph')}" for part in PARTS]
    return "\n\n".join([summary(raw), *cold])


def main(file: Path, into: Path | None = None) -> None:
    raw = json.loads(file.read_text())["raw"]
    if into is not None:
        before, _, rest = into.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        into.write_text(f"{before}{BEGIN}\n{document(raw)}\n{END}{after}")
        return
    for part, forms in PARTS.items():
        for state in timing.STATES:
            for form in forms:
                print(f"{part}, L2 {state}, {form}:\n\n{table(raw[part], state, form)}\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
