"""`Value`: one array on one device, maybe still on its way.

A value is in one of these states; ``_array`` decides, then the class of ``_other``:

- issued: ``_array`` is an engine array (which the engine may still be computing);
- landed: ``_other`` is a host array, the result of a collective. It becomes an engine array only when a
  segment or the user needs one, which copies nothing where the engine can use the host's memory;
- pending: ``_other`` is a `Promise` of a run that has not been walked to its end;
- failed: ``_other`` is the exception;
- deleted: ``_other`` is ``_DELETED``.

Values are handles: a run that was given one keeps what it stands for, whatever happens to the handle.
Transitions set ``_array`` before they clear ``_other``, so that they need no lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stretto.collectives.types import TensorType

from ..engines.engine import Array, Engine, Joined
from ..errors import StrettoError
from .stream import Event, completions


class DeletedError(StrettoError):
    """The array was deleted or donated. Not worth catching: the program uses it twice."""

    code = "INVALID_ARGUMENT"


class _Deleted:
    __slots__ = ()


_DELETED = _Deleted()


class Landed:
    """Content that a collective put into host memory."""

    __slots__ = ("host",)

    def __init__(self, host: np.ndarray) -> None:
        self.host = host


class Promise:
    """One output of one device of a run that is under way: its content is there once ``event`` is set.

    ``content`` is an engine array, `Landed`, or `Joined` arrays of which it is the one at ``position``.
    """

    __slots__ = ("content", "error", "event", "position")

    def __init__(self, event: Event, position: int = 0) -> None:
        self.event = event
        self.position = position
        self.content: Any = None
        self.error: BaseException | None = None

    def result(self) -> Any:
        """Wait; engine array or `Landed`. Raises the error."""
        self.event.wait()
        if self.error is not None:
            raise self.error
        content = self.content
        return content[self.position] if isinstance(content, Joined) else content


class Value:
    """An array of this ``type`` on local device ``ordinal`` of ``engine``."""

    __slots__ = ("__weakref__", "_array", "_other", "engine", "ordinal", "type")

    def __init__(
        self, type: TensorType, ordinal: int, engine: Engine, array: Array | None, other: Any = None
    ) -> None:
        self.type = type
        self.ordinal = ordinal
        self.engine = engine
        self._array = array
        self._other = other

    @classmethod
    def of(cls, engine: Engine, array: Array, type: TensorType, ordinal: int) -> Value:
        """The value of an engine array."""
        return cls(type, ordinal, engine, array)

    @classmethod
    def failed(cls, engine: Engine, error: BaseException, type: TensorType, ordinal: int) -> Value:
        """A value that raises ``error`` wherever it is used."""
        return cls(type, ordinal, engine, None, error)

    def array(self) -> Array:
        """The engine array; waits until it is issued. Raises the error of its run, `DeletedError`."""
        array = self._array
        return array if array is not None else self._issued()

    def issued(self) -> Array | None:
        """The engine array, if it has been issued; None while its run is under way or if that has failed, and
        once it is deleted. Does not wait."""
        array = self._array
        if array is not None:
            return array
        other = self._other
        if type(other) is Promise and not (other.event.done and other.error is None):
            return None
        if isinstance(other, BaseException) or other is _DELETED:
            return None
        return self._issued()

    def host_view(self) -> np.ndarray:
        """Content as a C-contiguous host array that must not be written to; waits for it.

        Raises the error of the run or computation, `DeletedError`.
        """
        content = self._content()
        if type(content) is Landed:
            return content.host
        return self.engine.host_view(content)

    def is_ready(self) -> bool:
        """Whether nothing is left to wait for: the content is there, or an error is."""
        array = self._array
        if array is None:
            other = self._other
            if type(other) is not Promise:
                return True
            if not other.event.done:
                return False
            array = other.content
            if array is None or type(array) is Landed:
                return True
            if isinstance(array, Joined):
                return array.is_ready()
        return self.engine.is_ready(array)

    def block(self) -> None:
        """Wait until the content is there. Raises the error of the run or computation."""
        other = self._other
        if type(other) is Promise and other.error is None and isinstance(other.content, Joined):
            other.content.block()
            return
        content = self._content()
        if type(content) is not Landed:
            self.engine.block(content)

    def on_ready(self, callback: Callable[[BaseException | None], None]) -> None:
        """Have ``callback(error)`` called once, when nothing is left to wait for.

        At once if that is so now; otherwise from another thread, with no lock held. The callback must
        not block.
        """
        array = self._array
        if array is None:
            other = self._other
            if type(other) is Promise and not other.event.done:
                other.event.add_callback(lambda: self._notify(other, callback))
                return
            self._notify(other, callback)
            return
        _notify_computed(self.engine, array, callback)

    def delete(self) -> None:
        """Give the content up: memory is freed when runs that were given it are over."""
        self._other = _DELETED
        self._array = None

    @property
    def is_deleted(self) -> bool:
        return self._other is _DELETED

    def capture(self) -> Any:
        """The present content: an engine array, `Landed` or a `Promise` (which has its content already if
        that is one of `Joined` arrays). Does not wait.

        Raises the error of a failed value, `DeletedError`.
        """
        array = self._array
        if array is not None:
            return array
        other = self._other
        kind = type(other)
        if kind is Promise:
            waits = not other.event.done or isinstance(other.content, Joined)
            return other if waits else other.result()
        if kind is Landed:
            return other
        if other is None:  # another thread has just issued it
            return self._array
        raise self._error(other)

    def _content(self) -> Any:
        """Engine array or `Landed`, waiting for the run."""
        content = self.capture()
        if type(content) is Promise:
            content = content.result()
        if type(content) is not Landed and self._array is None and self._other is not _DELETED:
            self._array, self._other = content, None
        return content

    def _issued(self) -> Array:
        content = self._content()
        if type(content) is not Landed:
            return content
        array = self.engine.put(content.host, self.type, self.ordinal)
        if self._other is not _DELETED:
            self._array, self._other = array, None
        return array

    def _error(self, other: Any) -> BaseException:
        if other is _DELETED:
            return DeletedError(
                f"array {self.type} on local device {self.ordinal} has been deleted"
            )
        return other

    def _notify(self, other: Any, callback: Callable[[BaseException | None], None]) -> None:
        if type(other) is Promise:
            if other.error is not None:
                callback(other.error)
            elif type(other.content) is Landed:
                callback(None)
            else:
                _notify_computed(self.engine, other.result(), callback)
        elif type(other) is Landed or other is None:
            callback(None)
        else:
            callback(self._error(other))


def _notify_computed(
    engine: Engine, array: Array, callback: Callable[[BaseException | None], None]
) -> None:
    """Call back when an engine array is computed: here if it is, else from a completion thread."""

    def block_then_call() -> None:
        error: BaseException | None = None
        try:
            engine.block(array)
        except Exception as raised:
            error = raised
        callback(error)

    if engine.is_ready(array):
        block_then_call()
    else:
        completions.submit(block_then_call)
