"""Tables and pictures of layouts: aligned text, and SVG that any browser shows."""

from __future__ import annotations

from html import escape
from pathlib import Path

CELL_WIDTH, CELL_HEIGHT, MARGIN = 38, 26, 24  # pixels
HUE_STEP = 360 * 0.381966  # degrees between colours: the golden angle keeps neighbours apart


def text(rows, corner: str = "") -> str:
    """Rows of cells as aligned text with row and column numbers."""
    cells = [[str(c) for c in row] for row in rows]
    width = max(len(c) for row in cells for c in [*row, str(len(row) - 1)])
    head = len(str(len(cells) - 1))
    line = lambda name, row: f"{name:>{head}} | " + " ".join(f"{c:>{width}}" for c in row)
    numbers = line(corner, [str(i) for i in range(len(cells[0]))])
    return "\n".join([numbers, *(line(str(i), row) for i, row in enumerate(cells))])


def svg(cells: dict[tuple[int, int], list[str]], colour: dict[tuple[int, int], int], title: str) -> str:
    """Cells at (row, column), each some lines of text on a background chosen by its number in `colour`."""
    rows, columns = (1 + max(at[i] for at in cells) for i in (0, 1))
    across, down = MARGIN + columns * CELL_WIDTH, 2 * MARGIN + rows * CELL_HEIGHT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{down}" font-family="monospace" '
        'font-size="10" text-anchor="middle" dominant-baseline="central">',
        f'<text x="4" y="10" text-anchor="start">{escape(title)}</text>',
    ]
    for r in range(rows):
        out.append(f'<text x="{MARGIN // 2}" y="{2 * MARGIN + (r + 0.5) * CELL_HEIGHT}">{r}</text>')
    for c in range(columns):
        out.append(f'<text x="{MARGIN + (c + 0.5) * CELL_WIDTH}" y="{1.5 * MARGIN}">{c}</text>')
    for (r, c), lines in sorted(cells.items()):
        x, y = MARGIN + c * CELL_WIDTH, 2 * MARGIN + r * CELL_HEIGHT
        hue = colour[r, c] * HUE_STEP % 360
        out.append(
            f'<rect x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" fill="hsl({hue:.0f},60%,85%)" '
            'stroke="#888" stroke-width="0.5"/>'
        )
        for i, one in enumerate(lines):
            at = y + (i + 0.5) * CELL_HEIGHT / len(lines)
            out.append(f'<text x="{x + CELL_WIDTH / 2}" y="{at}">{escape(one)}</text>')
    return "\n".join([*out, "</svg>\n"])


def save(path, content: str) -> None:
    """Writes a picture; the name must end in .svg, so that nobody takes it for something else."""
    if Path(path).suffix != ".svg":
        raise ValueError(f"{path}: pictures are SVG; let the name end in .svg")
    Path(path).write_text(content, encoding="utf-8")
