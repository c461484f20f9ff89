"""`stretto run --check-skips`: does anything that is left out of a program change a result?

The program runs three times on the same arguments: with nothing left out, bounds given by hand included, and
its loops as written; as the options in force have it; and with NaN in place of what is left out (then
zeros that are read are sent: only what nobody reads is left out). Results must be equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.runtime.options import Options

Outputs = Mapping[int, Sequence[np.ndarray]]  # by device


@dataclass(frozen=True)
class Variant:
    """A way to run a program. ``what`` completes "with …" in messages."""

    what: str
    policy: ValidPolicy
    options: Options


def variants(policy: ValidPolicy, options: Options) -> tuple[Variant, Variant, Variant]:
    """The program as written, as it runs under these options, and poisoned."""
    plain, poisoned = replace(options, poison_skipped=False), replace(options, poison_skipped=True)
    return (
        Variant(
            "nothing left out",
            replace(policy, as_written=True, dead_only=False, pipeline=False),
            plain,
        ),
        Variant("zeros for what is left out", replace(policy, dead_only=False), plain),
        Variant("NaN for what is left out", replace(policy, dead_only=True), poisoned),
    )


def compare(outputs: Sequence[Outputs], ways: Sequence[Variant]) -> str:
    """The first result, by position and device, that is not that of the first way; empty if none is."""
    reference, *others = outputs
    for device in sorted(reference):
        for i, expected in enumerate(reference[device]):
            for found, way in zip(others, ways[1:], strict=True):
                if found[device][i].tobytes() != expected.tobytes():
                    return _difference(i, device, expected, found[device][i], ways[0], way)
    return ""


def _difference(
    i: int, device: int, expected: np.ndarray, found: np.ndarray, first: Variant, way: Variant
) -> str:
    bits = [a.reshape(-1).view(np.uint8).reshape(a.size, -1) for a in (expected, found)]
    at = int(np.argmax((bits[0] != bits[1]).any(axis=1)))
    place = tuple(int(k) for k in np.unravel_index(at, expected.shape))
    return (
        f"result {i} of device {device} differs: at {list(place)} it is {expected.reshape(-1)[at]} with "
        f"{first.what}, {found.reshape(-1)[at]} with {way.what}"
    )


def check(run: Callable[[Variant], Outputs], policy: ValidPolicy, options: Options) -> str:
    """Run all ways and compare; a message, or an empty string where no bit differs."""
    ways = variants(policy, options)
    return compare([run(way) for way in ways], ways)
