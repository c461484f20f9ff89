"""Programs that fail in every way a backend can make a program fail: what the judge is tested with."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import jax
import numpy as np

from stretto.conformance.programs.registry import Program


def right() -> dict[str, Any]:
    return {"out": jax.numpy.arange(3.0)}


def raises() -> dict[str, Any]:
    raise ValueError("the program's own message")


def crashes() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def hangs() -> dict[str, Any]:
    threading.Event().wait()
    return {}


def exits() -> dict[str, Any]:
    os._exit(0)


def wrong() -> dict[str, Any]:
    return {"out": np.arange(3, dtype=np.float32) + 1}


PROGRAMS = {
    f.__name__: Program(f.__name__, f) for f in (raises, crashes, right, hangs, exits, wrong)
} | {"right_again": Program("right_again", right)}
