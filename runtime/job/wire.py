"""Messages of the control plane: JSON objects with a length in front, over one TCP connection.

The control plane carries a handful of small messages in the life of a job, so plain text serves, and
nothing that arrives is ever executed. A message that is longer than `LIMIT` or is not an object is
treated as the end of the connection.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import Any

Message = dict[str, Any]

LIMIT = 16 << 20
_LENGTH = struct.Struct("!I")


class Link:
    """One connection. `send` may be called from any thread, `receive` from one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._buffer = bytearray()
        connection.settimeout(10.0)
        if connection.family != socket.AF_UNIX:
            _notice_dead_hosts(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> bool:
        """Send one message; False if the other side is gone."""
        payload = json.dumps(message).encode()
        with self._lock:
            try:
                self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
            except OSError:
                return False
        return True

    def receive(self) -> list[Message] | None:
        """The messages that have arrived (waits for bytes to come), or None at the end."""
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > LIMIT:
                return None
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            try:
                message = json.loads(self._buffer[_LENGTH.size : end])
            except ValueError:
                return None
            if not isinstance(message, dict):
                return None
            messages.append(message)
            del self._buffer[:end]
        return messages

    def close(self) -> None:
        self._socket.close()


def _notice_dead_hosts(connection: socket.socket) -> None:
    """A host that loses power sends no end of connection: ask for signs of life every few seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
