"""Pictures for the examples, as PNG files, without a library."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np


def write_picture(path: str | Path, values: np.ndarray) -> None:
    """Write a 2-D array as a PNG file: blue where it is negative, white at zero, red where it is positive.

    The first row is at the bottom. The largest magnitude has the full colour.
    """
    scaled = np.asarray(values, np.float64)[::-1] / max(float(np.abs(values).max()), 1e-300)
    fade = 1 - np.abs(scaled)
    red, blue = np.where(scaled > 0, 1, fade), np.where(scaled < 0, 1, fade)
    pixels = (np.stack([red, fade, blue], -1) * 255).round().astype(np.uint8)
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # a filter byte before each row
    Path(path).write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + _chunk(b"IDAT", zlib.compress(rows))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))
