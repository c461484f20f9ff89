"""The rows that the members of a ragged all-to-all send and receive, checked against what is there.

Offsets and sizes are computed by the program, so that they are known only then, and may be wrong. Errors say
which device asks for which rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray


def ragged_rows(
    operands: Sequence[Array], group: Sequence[int], own: int
) -> tuple[Array, Array, Array, Array]:
    """Offsets and sizes of the operands of device ``own`` of a group, as s64 arrays [size, updates]: input
    offsets, send sizes, output offsets (at the receivers), receive sizes. Raises ``RuntimeError`` for rows
    that its input does not have.
    """
    size, rows = len(group), len(operands[0])
    if operands[2].size % size:
        raise RuntimeError(f"{operands[2].size} offsets for a group of {size}")
    starts, sends, targets, receives = (a.reshape(size, -1).astype(np.int64) for a in operands[2:6])
    wrong = (starts < 0) | (sends < 0) | (starts + sends > rows)
    if wrong.any():
        position, update = np.argwhere(wrong)[0]
        raise RuntimeError(
            f"device {own} sends rows that its input of {rows} rows does not have: "
            f"{sends[position, update]} from {starts[position, update]} on, to device {group[position]}"
        )
    return starts, sends, targets, receives


def check_ragged_targets(
    targets: Array, sends: Array, receives: Array, rows: int, source: int, target: int
) -> None:
    """Raise ``RuntimeError`` where the rows that device ``source`` sends, one entry for each update, do not
    fit what device ``target`` says it gets, or its output of ``rows`` rows.
    """
    wrong = (targets < 0) | (targets + sends > rows)
    if wrong.any():
        update = np.argwhere(wrong)[0][0]
        raise RuntimeError(
            f"device {target} receives rows outside its output of {rows} rows: {sends[update]} from "
            f"{targets[update]} on, of device {source}"
        )
    if not np.array_equal(sends, receives):
        raise RuntimeError(
            f"device {target} is sent {sends.tolist()} rows by device {source} but expects "
            f"{receives.tolist()}"
        )
