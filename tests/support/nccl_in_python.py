"""NCCL and what of CUDA `collectives/_launches.pyx` calls, as functions of Python."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_void_p, cast
from typing import Any

from stretto.collectives._launches import Launches

MESSAGE = CFUNCTYPE(c_int, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
GATHER = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p)
REDUCE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)


class Library:
    """Stands for NCCL: keeps what was called, and answers as told."""

    def __init__(self) -> None:
        self.called: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()
        self.answers: dict[str, int] = {}
        self.states: dict[int, int] = {}
        self.asked: list[int] = []
        self.on_call: Callable[[], None] = lambda: None
        kinds = (MESSAGE, MESSAGE, GATHER, REDUCE, REDUCE, REDUCE)
        self._functions = [
            CFUNCTYPE(c_int, c_void_p)(self._kept("use")),
            CFUNCTYPE(c_int)(self._kept("start")),
            CFUNCTYPE(c_int)(self._kept("end")),
            CFUNCTYPE(c_int, c_void_p, POINTER(c_int))(self._state),
            *(k(self._kept(n)) for k, n in zip(kinds, Launches.KINDS, strict=True)),
        ]
        self.launches = Launches(*(cast(f, c_void_p).value for f in self._functions))

    def _kept(self, name: str) -> Callable[..., int]:
        def called(*arguments: int) -> int:
            self.called.append((name, *arguments))
            self.threads.add(threading.get_ident())
            self.on_call()
            return self.answers.get(name, 0)

        return called

    def _state(self, communicator: int, state: Any) -> int:
        self.asked.append(communicator)
        state[0] = self.states.get(communicator, 0)
        return 0
