"""Streams and events: tasks run in order, on another thread than the one that submits them.

A `Stream` runs its tasks one at a time in the order of submission, on a daemon thread of its own that
starts with the first task. A thread that needs a result may run the stream's next tasks itself if nobody
is running one (`Stream.run`, `Stream.wait`), which saves two thread switches; the order is the same.

Invariants: a task starts only after the one before it has ended; an event is set exactly once; callbacks
are called once, by the thread that sets the event (or at once, if it is set), with no lock held.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from stretto.collectives.waiting import short_slices

Task = Callable[[], Any]
# Tasks that are prepared while the one before them runs.
LOOK_AHEAD = 2
_log = logging.getLogger("stretto")


class Event:
    """A result that arrives once: ``done``, then ``error`` or ``value``.

    ``since``: the time of ``perf_counter`` at which its task was submitted, where an instrument asks for it.
    """

    __slots__ = ("_callbacks", "_lock", "done", "error", "since", "value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._callbacks: list[Callable[[], None]] = []
        self.done = False
        self.error: BaseException | None = None
        self.value: Any = None
        self.since = 0.0

    def set(self, value: Any = None, error: BaseException | None = None) -> None:
        """Deliver. Must be called once."""
        self.value = value
        self.error = error
        self.done = True
        self._lock.release()
        self._call_back()

    def set_to(self, call: Callable[[], Any]) -> None:
        """Make a call, and deliver its result or what it raises."""
        try:
            value = call()
        except BaseException as error:
            self.set(error=error)
        else:
            self.set(value)

    def wait(self) -> None:
        """Wait until it is set; does not raise its error. A signal handler can interrupt the wait."""
        if not self.done:
            with self._lock:
                pass

    def wait_for(self, seconds: float) -> bool:
        """Wait for so long at most; whether it is set."""
        if not self.done and self._lock.acquire(timeout=max(seconds, 0.0)):
            self._lock.release()
        return self.done

    def result(self) -> Any:
        """Wait; the value, or raises the error."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self.value

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once the event is set; it must not block."""
        self._callbacks.append(callback)
        if self.done:
            self._call_back()

    def _call_back(self) -> None:
        # Both setter and adder may come here: popping is atomic, so each callback is called once.
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                return
            try:
                callback()
            except Exception:  # it must not cost the others theirs, nor the setter its result
                _log.exception("a completion callback failed")


class Stream:
    """Tasks in order. ``name`` names the thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._tasks: deque[tuple[Task, Event]] = deque()
        self._turn = threading.Lock()  # held by whoever runs a task
        self._wake: SimpleQueue[bool] = SimpleQueue()  # one token a task; False ends the thread
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False

    @property
    def idle(self) -> bool:
        """Nothing is queued or running (for a moment at least, where others submit)."""
        return not self._tasks and not self._turn.locked()

    def submit(self, task: Task) -> Event:
        """Queue a task. Its return value or exception goes to the event.

        It is run here if it has no thread to run on, as when Python is ending.
        """
        event = Event()
        if self._closed:
            event.set(error=RuntimeError(f"stream {self.name} is closed"))
            return event
        threaded = self._thread is not None or self._start()
        self._tasks.append((task, event))
        if threaded:
            self._wake.put(True)
        else:
            while not event.done:
                with self._turn:
                    self._run_next()
        return event

    def run(self, task: Task) -> Any:
        """Run a task after all those queued, on this thread if the stream is idle. Gives its result."""
        if not self._tasks and self._turn.acquire(blocking=False):
            if not self._tasks:
                try:
                    return task()
                finally:
                    self._turn.release()
            self._turn.release()
        event = self.submit(task)
        self.wait(event)
        return event.result()

    def try_turn(self, patience: float = 0.0) -> bool:
        """Take the turn if the stream is idle: what the caller does until `end_turn` is a task of it.

        ``patience``: seconds to wait for a task that is about to end.
        """
        if self._tasks or self._closed:
            return False
        turn = self._turn
        if turn.acquire(False) or (patience > 0.0 and turn.acquire(timeout=patience)):
            if not self._tasks:
                return True
            turn.release()
        return False

    def end_turn(self) -> None:
        """Any thread may end a turn that it was handed."""
        self._turn.release()

    def hand_over(self, rest: Task) -> None:
        """End the turn; ``rest`` is the next task of the stream's thread, which raises nothing."""
        if self._closed or not (self._thread is not None or self._start()):
            try:
                rest()
            finally:
                self._turn.release()
            return
        self._tasks.appendleft((rest, Event()))
        self._turn.release()
        self._wake.put(True)

    def wait(self, event: Event) -> None:
        """Wait for an event of this stream; runs queued tasks here if no other thread does."""
        while not event.done and self._turn.acquire(blocking=False):
            try:
                if not self._run_next():
                    break
            finally:
                self._turn.release()
        event.wait()

    def look_ahead(self) -> None:
        """Have the next tasks prepare themselves, as many as can: to be called by the task that runs.

        A task that has ``prepare()`` gives whether it is prepared; it is called again until it says so.
        """
        tasks = self._tasks
        for number in range(LOOK_AHEAD):
            try:
                task = tasks[number][0]
            except IndexError:  # there are no more
                return
            prepare = getattr(task, "prepare", None)
            if prepare is None or not prepare():
                return

    @property
    def thread_id(self) -> int | None:
        """``threading.get_ident()`` of the stream's thread, None before its first task."""
        return self._thread.ident if self._thread is not None else None

    def close(self, timeout: float | None = None) -> bool:
        """Let queued tasks end, then the thread. Waits ``timeout`` seconds for it; whether it ended."""
        thread = self._thread
        if not self._closed:
            self._closed = True
            self._wake.put(False)
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _start(self) -> bool:
        """Begin the thread, if there is none; whether there is one now."""
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # from 3.12 on Python begins none once it ends
                    return False
                self._thread = thread
            return True

    def _run_next(self) -> bool:
        """Run the next task, if there is one. The caller holds the turn."""
        try:
            task, event = self._tasks.popleft()
        except IndexError:
            return False
        event.set_to(task)
        return True

    def _work(self) -> None:
        short_slices()  # it mostly sleeps, and somebody waits for it when it wakes up
        wake, turn = self._wake, self._turn
        while wake.get():
            with turn:
                self._run_next()


class Completions:
    """Threads that wait for arrays on behalf of callbacks.

    A wait may last as long as a computation, and a computation may (through a host callback) need
    another wait to end first: a thread is added whenever none is free, up to ``limit``.
    """

    def __init__(self, name: str = "stretto-completion", limit: int = 64) -> None:
        self._name = name
        self._jobs: SimpleQueue[Task] = SimpleQueue()
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._free = 0
        self._threads = 0
        self._limit = limit

    def submit(self, job: Task) -> None:
        """Run a job on a thread of the pool. What it raises is only logged."""
        with self._lock:
            begun = self._free <= 0 and self._threads < self._limit and self._begin_thread()
            there = self._threads > 0
            if there and not begun:
                self._free -= 1  # where none is free, the next thread to end a job takes it
        if there:
            self._jobs.put(job)
        else:
            self._run(job)

    def _begin_thread(self) -> bool:
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError:  # from 3.12 on Python begins none once it ends
            return False
        self._threads += 1
        return True

    def _work(self) -> None:
        while True:
            self._run(self._jobs.get())
            with self._ended:
                self._free += 1
                self._ended.notify_all()

    def idle(self, seconds: float) -> bool:
        """Wait until no job of the threads is left, for so long at most. Whether none is."""
        with self._ended:
            return self._ended.wait_for(lambda: self._free == self._threads, seconds)

    def _run(self, job: Task) -> None:
        try:
            job()
        except Exception:  # nobody waits for a job, and others wait for this thread
            _log.exception("a completion callback failed")


completions = Completions()
