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

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from stretto.collectives.types import TensorType

from ..engines.engine import Array, Engine, Joined, ReadingEngine
from ..errors import StrettoError
from .stream import Event, completions

# Bytes from which on a copy that an engine makes into memory of others is worth asking for.
_LARGE = 1 << 20


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


# What results that are there were promised for.
_OVER = Event()
_OVER.set()


class Promise:
    """One output of a run, on all local devices: it is there once ``event`` is set.

    ``content`` has an engine array or `Landed` for each device, in the order of the run's, and None where
    there is only the ``error``; or it is `Joined` arrays. It is None if there is no more than the error.
    ``type``: that of each array, None where only values stand for it.
    """

    __slots__ = ("__weakref__", "content", "error", "event", "type")

    def __init__(self, event: Event, type: TensorType | None = None) -> None:
        self.event = event
        self.type = type
        self.content: Sequence[Any] | Joined | None = None
        self.error: BaseException | None = None

    @classmethod
    def of(cls, type: TensorType, content: Sequence[Any] | Joined) -> Promise:
        """An output that is there."""
        promise = cls(_OVER, type)
        promise.content = content
        return promise

    def result(self, position: int = 0) -> Any:
        """Wait; the engine array or `Landed` of the device at this position. Raises the error."""
        self.event.wait()
        content = None if self.content is None else self.content[position]
        if content is None and self.error is not None:
            raise self.error
        return content

    @property
    def is_joined(self) -> bool:
        """Whether what it has for all devices is there, or fails, at once."""
        return isinstance(self.content, Joined)

    def gave(self, position: int) -> bool:
        """Whether a device has its content, and so no error."""
        content = self.content
        if content is None or not self.event.done:
            return False
        return isinstance(content, Joined) or content[position] is not None

    def array(self, engine: Engine, position: int, ordinal: int) -> Array | None:
        """The engine array of a device, of a promise whose event is set; None if it has an error."""
        content = self.content
        if content is None:
            return None
        array = content[position]
        if type(array) is Landed:
            assert self.type is not None
            array = engine.put(array.host, self.type, ordinal)
            cast("list[Any]", content)[position] = array  # so that it is put once
        return array

    def is_ready(self, engine: Engine, position: int) -> bool:
        """Whether a device has nothing left to wait for: its content is there, or an error is."""
        if not self.event.done:
            return False
        content = self.content
        if content is None:
            return True
        if isinstance(content, Joined):
            return content.is_ready()
        array = content[position]
        return array is None or type(array) is Landed or engine.is_ready(array)

    def block(self, engine: Engine, position: int) -> None:
        """Wait until a device has its content. Raises the error of the run or computation."""
        self.event.wait()
        content = self.content
        if isinstance(content, Joined):
            content.block()
            return
        array = self.result(position)
        if type(array) is not Landed:
            engine.block(array)


class Part:
    """What a promise holds for the device at ``position``."""

    __slots__ = ("position", "promise")

    def __init__(self, promise: Promise, position: int) -> None:
        self.promise = promise
        self.position = position

    def result(self) -> Any:
        """As `Promise.result`."""
        return self.promise.result(self.position)


class Value:
    """An array of this ``type`` on local device ``ordinal`` of ``engine``. ``position``: of the device
    in the run that promised it."""

    __slots__ = ("__weakref__", "_array", "_other", "engine", "ordinal", "position", "type")

    def __init__(
        self,
        type: TensorType,
        ordinal: int,
        engine: Engine,
        array: Array | None,
        other: Any = None,
        position: int = 0,
    ) -> None:
        self.type = type
        self.position = position
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
        if type(other) is Promise and not other.gave(self.position):
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

    def copy_to(self, host: np.ndarray) -> None:
        """Copy the content into an array of its shape and type, with any strides; waits for it. Raises as
        `host_view`."""
        content = self._content()
        if type(content) is Landed:
            host[...] = content.host
        elif (
            host.nbytes >= _LARGE
            and host.flags.c_contiguous
            and isinstance(self.engine, ReadingEngine)
        ):
            self.engine.read_into(content, host)
        else:
            host[...] = self.engine.host_view(content)

    def is_ready(self) -> bool:
        """Whether nothing is left to wait for: the content is there, or an error is."""
        array = self._array
        if array is None:
            other = self._other
            return type(other) is not Promise or other.is_ready(self.engine, self.position)
        return self.engine.is_ready(array)

    def block(self) -> None:
        """Wait until the content is there. Raises the error of the run or computation."""
        other = self._other
        if type(other) is Promise and isinstance(other.content, Joined):
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
        """The present content: an engine array, `Landed` or a `Part` of a promise (which has its content
        already if that is `Joined` arrays). Does not wait.

        Raises the error of a failed value, `DeletedError`.
        """
        array = self._array
        if array is not None:
            return array
        other = self._other
        kind = type(other)
        if kind is Promise:
            if not other.event.done or isinstance(other.content, Joined):
                return Part(other, self.position)
            return other.result(self.position)
        if kind is Landed:
            return other
        if other is None:  # another thread has just issued it
            return self._array
        raise self._error(other)

    def _content(self) -> Any:
        """Engine array or `Landed`, waiting for the run."""
        content = self.capture()
        if type(content) is Part:
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
            try:
                content = other.result(self.position)
            except BaseException as error:
                callback(error)
                return
            if type(content) is Landed:
                callback(None)
            else:
                _notify_computed(self.engine, content, callback)
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
