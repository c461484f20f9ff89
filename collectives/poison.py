"""For debugging: a communicator whose skipped transfers leave NaN where they should leave zeros.

A transfer is skipped because no device reads its data. With NaN in their place (the largest number, or true,
for types without NaN) a device that does read them gives other results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .communicator import Array, BoundCollective, Communicator, Reducer, Request
from .ops import Collective, Kind
from .types import TensorType


class PoisonedCommunicator:
    """``communicator``, with poison for the targets of skipped pairs."""

    def __init__(self, communicator: Communicator) -> None:
        self.process = communicator.process
        self.num_processes = communicator.num_processes
        self._communicator = communicator

    def bind(
        self, collective: Collective, owner: Mapping[int, int], reducer: Reducer | None = None
    ) -> BoundCollective:
        bound = self._communicator.bind(collective, owner, reducer)
        return _Poisoned(bound) if collective.valid_iterations else bound

    def abort(self, reason: str) -> None:
        self._communicator.abort(reason)

    def close(self) -> None:
        self._communicator.close()


class _Poisoned:
    prompt = False

    def __init__(self, bound: BoundCollective) -> None:
        self.collective = bound.collective
        self.bytes = bound.bytes
        self.messages = bound.messages
        self._bound: Any = bound
        self._poison = [poison(t) for t in bound.collective.results]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bound, name)

    def run(
        self, operands: Mapping[int, Sequence[Array]], skip: frozenset[int] | None = None
    ) -> dict[int, list[Array]]:
        results: dict[int, list[Array]] = self._bound.run(operands, **_skipping(skip))
        return self._spread(results, skip)

    def start(
        self, operands: Mapping[int, Sequence[Array]], skip: frozenset[int] | None = None
    ) -> Request:
        request: Request = self._bound.start(operands, **_skipping(skip))
        if self.collective.kind is Kind.SEND:
            return request
        return _PoisonedRequest(request, lambda results: self._spread(results, skip))

    def _spread(
        self, results: dict[int, list[Array]], skip: frozenset[int] | None
    ) -> dict[int, list[Array]]:
        for k in skip or ():
            target = self.collective.pairs[k][1]
            if target in results:
                results[target] = list(self._poison)
        return results


def _skipping(skip: frozenset[int] | None) -> dict[str, frozenset[int]]:
    return {} if skip is None else {"skip": skip}


class _PoisonedRequest:
    def __init__(self, request: Request, spread: Any) -> None:
        self._request = request
        self._spread = spread

    def test(self) -> bool:
        return self._request.test()

    def wait(self) -> dict[int, list[Array]]:
        results: dict[int, list[Array]] = self._spread(self._request.wait())
        return results


def poison(type: TensorType) -> np.ndarray:
    """An array that no computation would have made: NaN, or the largest value of the type."""
    dtype = type.numpy
    if type.dtype == "pred":
        return np.ones(type.shape, dtype)
    if dtype.kind in "fc":
        return np.full(type.shape, np.nan, dtype)
    try:
        return np.full(type.shape, ml_dtypes.iinfo(dtype).max, dtype)
    except ValueError:
        return np.full(type.shape, np.nan).astype(dtype)
