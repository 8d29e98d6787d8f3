"""The report as one page that needs nothing beside it: no network, no other file. What the cache holds came from
outside, so all of it is escaped, and the page forbids itself everything but its own text."""

from __future__ import annotations

import datetime
import html
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from .report import LABELS, RIVALS, UNMEASURED, Line, Report, us

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
KINDS = ("ours", *RIVALS.values(), "other")
COLOURS = {
    "ours": "#0a6e5c",
    "ATen": "#9a5b13",
    "Triton": "#5a4fa0",
    "C++": "#7a7a7a",
    "unfused": "#b08900",
    "other": "#999",
}
# Bytes/s and floating-point operations/s of dense 16-bit products, from the makers' data sheets.
ROOFS = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "MI350X": (8.0e12, 2300e12), "MI355X": (8.0e12, 2500e12)}
SIXTEEN_BIT = ("bf16", "f16")
STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --ours: #0a6e5c; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
p.about { color: #777; margin-top: .2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { position: sticky; top: 0; background: Canvas; } th.text, td.text { text-align: left; }
tr.problem { cursor: pointer; } tr.problem:hover { background: var(--soft); }
tr.more > td { padding: .4rem 0 1rem 1.5rem; text-align: left; }
.won { font-weight: 600; } .label { color: #777; font-size: .85em; white-space: nowrap; }
.bar { display: inline-block; height: .7em; border-radius: 2px; vertical-align: baseline; }
.cards { display: flex; flex-wrap: wrap; gap: 1rem; }
.card { border: 1px solid var(--line); border-radius: 6px; padding: .7rem 1rem; }
.card b { font-size: 1.4rem; display: block; }
input { font: inherit; padding: .3rem .5rem; width: 20rem; margin-bottom: .5rem; }
figure { margin: 0; background: #fff; border-radius: 6px; } figure svg { max-width: 100%; height: auto; }
"""
SCRIPT = """
const rows = [...document.querySelectorAll("tr.problem")];
for (const row of rows) {
  const more = row.nextElementSibling;
  const turn = () => { more.hidden = !more.hidden; row.setAttribute("aria-expanded", String(!more.hidden)); };
  row.addEventListener("click", turn);
  row.addEventListener("keydown", e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); turn(); } });
}
const filter = document.getElementById("filter"), count = document.getElementById("count");
const show = () => {
  const words = filter.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let seen = 0;
  for (const row of rows) {
    const hit = words.every(w => row.textContent.toLowerCase().includes(w));
    row.hidden = !hit; seen += hit;
    if (!hit) { row.nextElementSibling.hidden = true; row.setAttribute("aria-expanded", "false"); }
  }
  count.textContent = `${seen} of ${rows.length} problems`;
};
filter.addEventListener("input", show); show();
"""


def page(report: Report) -> str:
    """The whole page as HTML."""
    body = [
        "<h1>flykernels: what the cache knows</h1>",
        f'<p class="about">{_t(datetime.date.today().isoformat())}, cache: {_t(", ".join(report.directories))}</p>',
        _cards(report), _totals(report), _roofs(report.lines), _problems(report), *map(_figures, report.figures),
        _legend(),
    ]  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>flykernels report</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + f"\n<script>{SCRIPT}</script>\n</body></html>\n"
    )


def _t(text: Any) -> str:
    return html.escape(str(text))


def _cards(report: Report) -> str:
    measured = {k: t for k, t in report.totals.items() if k[0] != UNMEASURED}
    cards = [
        ("problems", f"{report.problems:,}", ""),
        ("ours is used for", f"{sum(t.ours for t in measured.values()):,}", ""),
    ]
    for (label, machine), t in sorted(measured.items()):
        share = f"{100 * t.saved_us / t.rivals_us:.0f}% of {t.rivals_us / 1e3:.3g} ms" if t.rivals_us else "-"
        cards.append((f"saved, each problem once, {label}", share, machine))
    made = (f'<div class="card">{_t(a)}<b>{_t(b)}</b><span class="label">{_t(c)}</span></div>' for a, b, c in cards)
    return f'<div class="cards">{"".join(made)}</div>'


def _totals(report: Report) -> str:
    rows = []
    for (label, machine), t in sorted(report.totals.items()):
        mean = f"{t.geomean:.2f}" if t.geomean else "-"
        cells = (
            t.problems,
            t.decided,
            t.ours,
            f"{t.rivals_us:.1f}",
            f"{t.rivals_us - t.saved_us:.1f}",
            f"{t.saved_us:.1f}",
        )
        rows.append(_row([(label, "text"), (machine, "text"), *((c, "") for c in (*cells, mean))]))
    head = (
        "figures",
        "machine",
        "problems",
        "decided",
        "ours",
        "others, us",
        "with us, us",
        "saved, us",
        "others / ours",
    )
    about = "One call of each problem. The last column is the geometric mean where ours won."
    return f"<h2>Totals</h2><p>{about}</p>" + _table("totals", head, rows, text=2)


def _problems(report: Report) -> str:
    rows = []
    for line in report.lines:
        times = [(us(line.best(kind)), "won" if _won(line, kind) else "") for kind in ("ours", *RIVALS.values())]
        saved = f"{line.saved:.1f}" if line.saved else "-"
        cells = [(line.name, "text"), *times, (saved, ""), (line.origin, "text"), (line.label, "text label")]
        rows.append(_row(cells, 'class="problem" tabindex="0" aria-expanded="false"'))
        rows.append(f'<tr class="more" hidden><td colspan="{len(cells)}">{_candidates(line)}</td></tr>')
    left = report.problems - len(report.lines)
    more = f" {left:,} more are in the totals only." if left else ""
    head = ("problem", "ours", *RIVALS.values(), "saved", "entry", "figures")
    return (
        f"<h2>Problems</h2><p>Shortest times in us, most saved first; a row opens.{_t(more)}</p>"
        '<input id="filter" type="search" placeholder="filter" aria-label="filter"> '
        '<span id="count" class="label"></span>' + _table("problems", head, rows, text=1, text_last=2)
    )


def _won(line: Line, kind: str) -> bool:
    return any(c.name == line.winner and c.kind == kind for c in line.candidates)


def _candidates(line: Line) -> str:
    times = [c.microseconds for c in line.candidates if c.counts]
    longest = max(times, default=1.0) or 1.0  # type: ignore[type-var]
    rows = []
    for c in line.candidates:
        width = 14 * (c.microseconds or 0.0) / longest if c.counts else 0.0
        drawn = f'<span class="bar" style="width:{width:.2f}rem;background:{COLOURS[c.kind]}"></span>'
        rate = f"{line.flops / c.microseconds / 1e6:.3g}" if c.counts and line.flops and c.microseconds else "-"
        won = " won" if c.name == line.winner else ""
        rows.append(
            f'<tr><td class="text{won}">{_t(c.name)}</td><td class="text">{_t(c.kind)}</td>'
            f"<td>{us(c.microseconds)}</td>"
            f'<td>{rate}</td><td class="text">{drawn} {_t(c.note)}</td></tr>'
        )
    about = f"{_t(line.machine)}; winner: {_t(line.winner or 'not decided')}; {_t(line.label)}"
    return f'<p class="label">{about}</p>' + _table(
        "", ("candidate", "kind", "us", "TFLOP/s", ""), rows, text=2, text_last=1
    )


# -- pictures
def _roofs(lines: Sequence[Line]) -> str:
    """A roofline of every machine that times were measured on."""
    machines: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if line.flops and (line.best("ours") is not None or line.rival is not None):
            machines.setdefault((line.machine, line.label), []).append(line)
    if not machines:
        return "<h2>Roofline</h2><p>No product in the cache was measured yet.</p>"
    made = (f"<figure>{_roof(machine, label, held)}</figure>" for (machine, label), held in sorted(machines.items()))
    return "<h2>Roofline</h2>" + "".join(made)


def _roof(machine: str, label: str, lines: Sequence[Line]) -> str:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "flykernels", "font.size": 9}):
        figure = Figure(figsize=(8.5, 4.2), layout="constrained")
        axes = figure.add_subplot()
        fastest = {"rate": 0.0, "stream": 0.0}
        for kind, get, mark in (
            ("ours", lambda x: x.best("ours"), "o"),
            ("the best of the others", lambda x: x.rival, "x"),
        ):
            points = [(x.flops / x.bytes, x.flops / get(x) / 1e6, x.bytes / get(x) * 1e6) for x in lines if get(x)]
            if not points:
                continue
            axes.scatter(
                [p[0] for p in points], [p[1] for p in points], marker=mark, s=22, label=kind,
                color=COLOURS["ours"] if kind == "ours" else COLOURS["ATen"],
            )  # fmt: skip
            fastest["rate"] = max(fastest["rate"], *(p[1] for p in points))
            fastest["stream"] = max(fastest["stream"], *(p[2] for p in points))
        known = next((v for k, v in ROOFS.items() if k in machine and all(x.dtype in SIXTEEN_BIT for x in lines)), None)
        stream, rate = (known[0], known[1] / 1e12) if known else (fastest["stream"], fastest["rate"])
        reach = [x.flops / x.bytes for x in lines]
        ends = min(reach) / 2, max(*reach, rate * 1e12 / stream) * 2
        xs = [ends[0] * (ends[1] / ends[0]) ** (i / 99) for i in range(100)]
        what = "data sheet: 16-bit products, memory" if known else "highest rates seen here"
        axes.plot(
            xs,
            [min(rate, x * stream / 1e12) for x in xs],
            color="#444",
            linewidth=1,
            linestyle="-" if known else "--",
            label=what,
        )
        axes.set(xscale="log", yscale="log", xlabel="floating-point operations a byte that must move", ylabel="TFLOP/s")
        axes.set_title(f"{machine} ({label})".replace("$", r"\$"), loc="left")
        axes.grid(True, which="major", alpha=0.3)
        axes.legend(loc="lower right", frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


# -- figures of benches, and words
def _figures(held: dict) -> str:
    label = held["label"]
    parts = [f'<h2>bench {_t(held["bench"])} <span class="label">{_t(label)}</span></h2>']
    if label == "simulated":
        parts.append(
            "<p>Cycles of the simulator's model. They are not performance, and nothing here ran on the device.</p>"
        )
    groups: list[tuple[tuple, list[dict]]] = []
    for row in held["rows"]:
        if not groups or groups[-1][0] != tuple(row):
            groups.append((tuple(row), []))
        groups[-1][1].append(row)
    for head, rows in groups:
        cells = ([(_number(v), "" if isinstance(v, (int, float)) else "text") for v in row.values()] for row in rows)
        parts.append(_table("", [str(h).replace("_", " ") for h in head], [_row(c) for c in cells], text=len(head)))
    bars = [
        _row(
            [
                (b.get("name", ""), "text"),
                (_number(b.get("figure")), ""),
                (b.get("unit", ""), "text"),
                (label, "text label"),
            ]
        )
        for b in held["bars"]
    ]
    return "".join(parts) + (_table("", ("figure", "", "unit", "figures"), bars, text=1) if bars else "")


def _number(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
    return str(value)


def _legend() -> str:
    known = ", ".join(LABELS[:3])
    return (
        f"<h2>What the labels say</h2><p>Every figure is one of: {_t(known)}, or measured on the machine that is "
        f"named. “{UNMEASURED}” has code objects and no times: the first run on the device measures. An entry was made "
        "here (by this cache's machines), imported (from a bundle, or compacted), or comes from a layer, a directory "
        "that is only read."
        "</p>"
    )


def _table(name: str, head: Sequence[str], rows: Iterable[str], text: int = 1, text_last: int = 0) -> str:
    left = lambda i: i < text or i >= len(head) - text_last
    cells = "".join(f'<th class="text">{_t(h)}</th>' if left(i) else f"<th>{_t(h)}</th>" for i, h in enumerate(head))
    named = f' id="{name}"' if name else ""
    return f"<table{named}><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _row(cells: Iterable[tuple[Any, str]], attributes: str = "") -> str:
    made = "".join(f'<td class="{kind}">{_t(value)}</td>' if kind else f"<td>{_t(value)}</td>" for value, kind in cells)
    return f"<tr {attributes}>{made}</tr>" if attributes else f"<tr>{made}</tr>"
