"""Arrays that stand in for outputs which a device did not compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stretto.collectives.types import TensorType

from ..engines.engine import Engine


class Absent:
    """Stand-ins with ``content(type)``, made once for each type and device.

    All outputs of a type that were not computed share one array, which must not be overwritten.
    """

    def __init__(self, engine: Engine, content: Callable[[TensorType], np.ndarray]) -> None:
        self._engine = engine
        self._content = content
        self._made: dict[tuple[TensorType, int], Any] = {}

    def array(self, type: TensorType, ordinal: int) -> Any:
        """The engine's array on a local device."""
        key = (type, ordinal)
        if key not in self._made:
            self._made[key] = self._engine.put(self._content(type), type, ordinal)
        return self._made[key]


def zeros(type: TensorType) -> np.ndarray:
    """The content of a stand-in: zeros, as `Run.valid` promises."""
    return np.zeros(type.shape, type.numpy)
