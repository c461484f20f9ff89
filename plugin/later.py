"""Ends of runs, told to jaxlib by threads of their own.

jaxlib asks with every run to be called back when the run is over, mostly without waiting for it. A thread
switch for each would cost more than a small run, so one thread (`Later`) takes them in turn: it waits for the
oldest, tells all that are over, and rests for a moment if they come fast. Another one (`Answers`) tells at
once whether a buffer is computed that somebody asks for.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque

from stretto.runtime.job.exits import await_at_exit, grace

from . import _capi

# The longest that an event may be told late: long beside a thread switch, short beside what matters.
REST = 0.001
# Seconds without a call from any other thread after which all are taken to rest, at the end of Python:
# between two calls they are elsewhere in JAX.
QUIET = 0.02


class Later:
    """Events in the order of their runs, completed by one thread of its own."""

    def __init__(self) -> None:
        self._events: deque[_capi.Event] = deque()
        self._wake = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._asleep = False
        self._lock = threading.Lock()
        self._closing = False
        self._closed = False

    def add(self, event: _capi.Event) -> None:
        """Complete this event when what it stands for is done; at once, where Python is ending."""
        if self._closed:
            event.wait()
            return
        self._events.append(event)
        if self._thread is None:
            self._start()
        elif self._asleep:
            self._asleep = False
            self._wake.release()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                atexit.register(self.close)
                self._thread = threading.Thread(
                    target=self._work, name="stretto-later", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Wait for all events, then end the thread: it must not be inside of jaxlib when Python ends."""
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self._closing = True
            self._wake.release()

            def ended(seconds: float) -> bool:
                thread.join(seconds)
                return not thread.is_alive()

            await_at_exit(ended)
            self._closing = False

    def _work(self) -> None:
        events = self._events
        while True:
            if not events:
                if self._closing:
                    return
                self._asleep = True
                if not events:  # one may have come before the flag was up
                    self._wake.acquire()
                self._asleep = False
                continue
            began = time.perf_counter()
            events.popleft().wait()
            while events and events[0].is_ready():
                events.popleft()
            if time.perf_counter() - began < REST and not self._closing:
                time.sleep(REST)


class Answers:
    """The thread that tells jaxlib whether buffers are computed.

    jaxlib may hold a lock while it asks, so that who asks may not wait for the GIL (`_answers.pxi`).
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Have the thread run until Python ends. Where that is so already, who asks takes the GIL."""
        if self._thread is not None:
            return
        thread = threading.Thread(
            target=_capi.answer_questions, name="stretto-answers", daemon=True
        )
        _capi.start_answering()
        try:
            thread.start()
        except RuntimeError:  # from 3.12 on
            _capi.answer_no_more()
            return
        self._thread = thread
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._thread = None
        _capi.answer_no_more()

    def close(self) -> None:
        """Answer what was asked, and end: whoever asks from now on takes the GIL."""
        thread, self._thread = self._thread, None
        if thread is not None:
            _capi.stop_answering()
            thread.join()


class Rest:
    """Has threads rest that still compute when Python ends (`_ends.pxi`)."""

    def __init__(self) -> None:
        self._expected = False

    def expect(self, seconds: float) -> None:
        """Do so when Python ends. ``seconds``: for how long at most, should Python wait for one of them."""
        if not self._expected:
            self._expected = True
            atexit.register(self.begin, seconds)

    def begin(self, seconds: float) -> None:
        """Have all others rest that there are."""
        ending = threading.current_thread()
        others = (t for t in threading.enumerate() if t is not ending)
        if all(thread.name.startswith("stretto-") for thread in others):
            return
        _capi.have_others_rest(seconds)
        until = time.monotonic() + grace()
        await_at_exit(lambda tick: _capi.others_rest(QUIET, tick) or time.monotonic() > until)


rest = Rest()
later = Later()
answers = Answers()
