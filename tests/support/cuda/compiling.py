"""An engine that compiles what it is given for an H100, without any device, and computes nothing.

Programs are lowered for it as for CUDA. ``STRETTO_TEST_COMPILED`` names a file that gets a line of JSON for
each distinct segment: its name, and what the compiler had against it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.runtime.engines import xla_cuda
from stretto.runtime.engines.null import NullEngine, NullSegment
from stretto.runtime.errors import CompileError
from stretto.runtime.program import Segment


class CompilingEngine(NullEngine):
    """Arrays of zeros, and NVIDIA's code for what would compute them."""

    name = "cuda-compiling"
    lowered_as = "cuda"

    def __init__(self, num_devices: int) -> None:
        super().__init__(num_devices)
        self._compiler = xla_cuda.create(1, target="sm_90")
        self._log = Path(os.environ["STRETTO_TEST_COMPILED"])
        self._known: set[bytes] = set()
        self._writing = threading.Lock()

    def compile(
        self, segment: Segment, *, name: str = "", host_callbacks: Sequence[Any] = ()
    ) -> NullSegment:
        """Compiles even where the compiler refuses: the file says so."""
        if segment.module not in self._known:
            self._known.add(segment.module)
            problem = ""
            try:
                code = self._compiler.serialize(self._compiler.compile(segment, name=name))
                assert code, "no code"
            except (AssertionError, CompileError) as error:
                problem = str(error)
            with self._writing, self._log.open("a") as log:
                log.write(json.dumps([name or segment.name, problem]) + "\n")
        return super().compile(segment, name=name, host_callbacks=host_callbacks)


def create(num_devices: int) -> CompilingEngine:
    """Factory of the entry-point group ``stretto.engines``."""
    return CompilingEngine(num_devices)
