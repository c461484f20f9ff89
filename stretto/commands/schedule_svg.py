"""The schedule of a program's loops as a picture: devices x iterations, bubbles hollow.

One self-contained SVG (https://www.w3.org/TR/SVG11/): for each loop a caption, a row for each device and a
cell for each iteration, filled where what the device computes is read. In the loop of a schedule the colour
of a cell says whether a device runs a microbatch forwards, backwards, or the gradients of weights, the number
in it which microbatch of the program that is, and its shade through which of the device's chunks of layers it
goes: later chunks are lighter. All devices and iterations are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

CELL, GAP = 16, 3  # pixels: the side of a cell, and the space behind it
LEFT, TOP, LINE = 48, 24, 18  # of device numbers, of a caption, of a line of text
LETTER = 6.6  # pixels that a letter of a caption takes, about
STEP = CELL + GAP
LIGHTEST = 0.65  # by how much the last chunk is lighter than the first


def svg(loops: Sequence[dict[str, Any]], captions: Sequence[str]) -> str:
    """``loops`` as `explain` gives them, with the line of text that stands above each."""
    parts: list[str] = []
    width, top = 200.0, TOP
    for loop, caption in zip(loops, captions, strict=True):
        rows = [["" if run == "." else run for run in row] for row in loop.get("runs", ())]
        rows = rows or [["busy" if busy else "" for busy in row] for row in loop["busy"]]
        height = LINE * 2 + STEP * len(rows)
        parts.append(f'<g class="loop" transform="translate(8,{top})">')
        parts += _loop(rows, caption, loop.get("microbatches", ()), loop.get("chunks", ()))
        parts.append("</g>")
        width = max(width, LEFT + STEP * loop["trips"] + 16, LETTER * len(caption) + 24)
        top += height + TOP
    if not loops:
        parts.append('<text x="8" y="24">no loop of this program sends anything</text>')
        width, top = 320, 48
    return "\n".join(
        [
            '<?xml version="1.0" encoding="UTF-8"?>',
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{top}" '
            f'viewBox="0 0 {width:.0f} {top}" font-family="sans-serif" font-size="12">',
            "<style>rect{stroke:#1f6feb;stroke-width:1} .busy,.F{fill:#1f6feb} .B{fill:#e8a33d} "
            ".W{fill:#2da44e} "
            ".idle{fill:none} "
            ".axis{fill:#57606a;font-size:10px} "
            ".number{font-size:9px;text-anchor:middle}</style>",
            *parts,
            "</svg>",
            "",
        ]
    )


NAMES = {"F": ", forwards", "B": ", backwards", "W": ", weights"}


def _loop(
    rows: Sequence[Sequence[str]], caption: str, microbatches: Sequence[Sequence[int]],
    chunks: Sequence[Sequence[int]],
) -> Iterator[str]:  # fmt: skip
    """``rows``: by device and iteration, the class of a cell, empty where it is idle. ``microbatches`` and
    ``chunks``: likewise, where it is that of a run; empty in other loops."""
    last = max((chunk for row in chunks for chunk in row), default=0)
    printable = "".join(
        c if c.isprintable() else "?" for c in caption
    )  # XML has no control characters
    yield f"<text>{escape(printable)}</text>"
    for device, row in enumerate(rows):
        y = LINE + STEP * device
        yield f'<g class="device"><text x="0" y="{y + 12}" class="axis">{device}</text>'
        for iteration, kind in enumerate(row):
            x = LEFT + STEP * iteration
            run, shade = "", ""
            if kind in NAMES and microbatches:
                run = f", microbatch {microbatches[device][iteration]}"
                if last:
                    chunk = chunks[device][iteration]
                    run += f", chunk {chunk}"
                    shade = f' fill-opacity="{1 - LIGHTEST * chunk / last:.2f}"'
            yield (
                f'<rect class="{kind or "idle"}" x="{x}" y="{y}" width="{CELL}" height="{CELL}" '
                f'rx="2"{shade}>'
                f"<title>device {device}, iteration {iteration}{NAMES.get(kind, '')}{run}</title></rect>"
            )
            if run:
                yield (
                    f'<text x="{x + CELL // 2}" y="{y + 11}" class="number">'
                    f"{microbatches[device][iteration]}</text>"
                )
        yield "</g>"
    if rows:
        y = LINE + STEP * len(rows) + 8
        every = max(1, -(-len(rows[0]) // 20))
        for iteration in range(0, len(rows[0]), every):
            yield f'<text x="{LEFT + STEP * iteration + 3}" y="{y}" class="axis">{iteration}</text>'
