"""What a file with a table of costs must hold: two objects of numbers, each in its range.

``docs/overlap.md`` says what they mean. Keys of links that are not known are left alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.runtime.errors import InvalidProgramError

# Rates (a second) and times (seconds) beyond which sums of predicted times would not be finite.
LEAST_RATE, LONGEST_TIME = 1e-9, 1e9
MOST_SHOWN = 40  # characters of a value in an error


@dataclass(frozen=True)
class _Field:
    """A number: its range, which is ``expected`` in words, and what it is where it is not given."""

    least: float
    most: float
    expected: str
    default: float | None = None
    whole: bool = False

    def read(self, entry: Mapping[str, Any], name: str, where: str) -> float:
        if name not in entry and self.default is not None:
            return self.default
        if name not in entry:
            raise _bad(f"{where} has no {name}")
        value = entry[name]
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            fits = self.least <= number <= self.most
            if fits and not (self.whole and number % 1):
                return int(number) if self.whole else number
        raise _bad(f"{name} of {where} is {_shown(value)}, and should be {self.expected}")


_RATE = _Field(LEAST_RATE, math.inf, f"a number of at least {LEAST_RATE:g}: rates must be positive")
_TIME = _Field(0.0, LONGEST_TIME, f"seconds from 0 to {LONGEST_TIME:g}")
_COUNT = _Field(1, 1e15, "a whole number of at least 1", whole=True)
_COMPUTE = {
    "flops_per_s": _RATE,
    "bytes_per_s": _RATE,
    "launch_s": _Field(0.0, LONGEST_TIME, _TIME.expected, default=0.0),
}
_LINK = {
    "axis_stride": _COUNT,
    "group_size": _COUNT,
    "latency_s": _TIME,
    "bytes_per_s": _RATE,
    "busy": _Field(0.0, 1.0, "a share, from 0 to 1", default=0.0),
}


def parse(text: str) -> Any:
    """What JSON text says. Raises `InvalidProgramError`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidProgramError(f"is not JSON: {error}") from None


def numbers(data: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fields of ``compute``, and those of each of ``links``: floats, strides and sizes int.

    Raises `InvalidProgramError` with the place in ``data`` and what should be there.
    """
    table = _object(data, "it")
    compute = _object(_entry(table, "compute"), "compute")
    unknown = sorted(compute.keys() - _COMPUTE.keys())
    if unknown:
        raise _bad(f"compute has {_shown(unknown[0])}, which is none of {', '.join(_COMPUTE)}")
    links = _entry(table, "links")
    if not isinstance(links, Sequence) or isinstance(links, str):
        raise _bad(f"links is {_shown(links)}, and should be a list")
    read: list[dict[str, Any]] = []
    places: dict[tuple[int, int], int] = {}
    for index, link in enumerate(links):
        fields = _fields(_object(link, f"links[{index}]"), _LINK, f"links[{index}]")
        stride, size = fields["axis_stride"], fields["group_size"]
        read.append(fields)
        other = places.setdefault((stride, size), index)
        if read[other] != fields:
            raise _bad(
                f"links[{other}] and links[{index}] are both for axis_stride {stride} and group_size {size}, "
                "and differ"
            )
    return _fields(compute, _COMPUTE, "compute"), read


def _fields(entry: Mapping[str, Any], known: Mapping[str, _Field], where: str) -> dict[str, Any]:
    return {name: field.read(entry, name, where) for name, field in known.items()}


def _entry(table: Mapping[str, Any], name: str) -> Any:
    if name not in table:
        raise _bad(f"it has no {name}")
    return table[name]


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _bad(f"{what} is {_shown(value)}, and should be an object")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) > 10**MOST_SHOWN:
        return "a number of many digits"
    text = json.dumps(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def _bad(problem: str) -> InvalidProgramError:
    return InvalidProgramError(f"not a cost table: {problem}")
