"""The registry of conformance programs.

A program is a function without arguments that computes on ``jax.devices()`` (eight of them, spread over
any number of processes) and returns a dict of named arrays: ``jax.Array`` (judged shard by shard, by
global index) or numpy arrays (every process must return the same). Its inputs come from a fixed seed, so
JAX's CPU backend in one process is the reference, unless the program carries ``expected``: then the
reference is that function's result, computed with numpy, for what the CPU backend cannot run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ONE_PROCESS = "1x8"
TWO_PROCESSES = "2x4"
EIGHT_PROCESSES = "8x1"
ALL_FORMS = (ONE_PROCESS, TWO_PROCESSES, EIGHT_PROCESSES)

Expected = Callable[[], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Program:
    """One conformance program and how it is judged.

    ``exact``: floats must agree bit by bit (data movement, and sums that every order computes exactly);
    otherwise to ``rtol`` of the largest element, by default a tolerance that depends on the dtype.
    Integers, booleans, shapes and dtypes always agree exactly. ``forms``: where it runs.
    """

    name: str
    run: Callable[[], Mapping[str, Any]]
    expected: Expected | None = None
    exact: bool = False
    rtol: float | None = None
    x64: bool = False
    shardy: bool = True
    forms: tuple[str, ...] = (ONE_PROCESS, TWO_PROCESSES)
    only_full: bool = False


PROGRAMS: dict[str, Program] = {}


def add(program: Program) -> None:
    """Register; raises ValueError when the name is taken."""
    if program.name in PROGRAMS:
        raise ValueError(f"two programs are named {program.name}")
    PROGRAMS[program.name] = program


def program(name: str, **options: Any) -> Callable[[Callable[[], Mapping[str, Any]]], Any]:
    """Decorator: register the function under ``name`` with the options of :class:`Program`."""

    def decorate(run: Callable[[], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
        add(Program(name, run, **options))
        return run

    return decorate


CORE: dict[str, Any] = {"forms": ALL_FORMS}
