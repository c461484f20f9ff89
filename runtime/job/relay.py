"""A service of rank 0's, reached through a relay of this rank's own, so that its end is not noticed.

A client that sees its connection end may end the process, as that of `jax.distributed` does; but how a job
ends is for the control plane to say (`control`). What ends behind the relay, clients take for slow.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from .control import addresses_of_host

DIAL_WITHIN = 10.0
ASK_EVERY = 0.005
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Service:
    """Where rank 0 may start a service: ``host`` and ``port`` are its own side, others try ``addresses``."""

    host: str
    port: int
    addresses: tuple[str, ...]


def reserve(host: str) -> tuple[Service, socket.socket]:
    """A port, at ``host`` if that is given, kept for who shares it until the socket is closed."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((host, 0))
    reachable = [host] if host else addresses_of_host()
    return Service(host or "0.0.0.0", held.getsockname()[1], tuple(reachable)), held


class Relay:
    """Passes on to the service what comes to ``address``, of this host's loopback, until the process ends."""

    def __init__(self, service: Service, same_host: bool) -> None:
        self._port = service.port
        first = ["127.0.0.1"] if same_host and service.host == "0.0.0.0" else []
        self._addresses = [*first, *service.addresses]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        # The other end of each end that is listened to; those of clients.
        self._other: dict[Any, socket.socket] = {}
        self._ours: set[Any] = set()
        threading.Thread(target=self._run, name="stretto-relay", daemon=True).start()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._other:
                    self._pass_on(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        service = _dial(self._addresses, self._port)
        if service is None:
            client.close()
            return
        for one, other in ((client, service), (service, client)):
            self._other[one] = other
            self._selector.register(one, selectors.EVENT_READ)
        self._ours.add(client)

    def _pass_on(self, source: Any) -> None:
        other = self._other[source]
        try:
            data = source.recv(_CHUNK)
        except OSError:
            data = b""
        if data:
            with contextlib.suppress(OSError):  # the service is gone: the client waits
                other.sendall(data)
            return
        self._selector.unregister(source)
        del self._other[source]
        if source in self._ours:
            self._ours.discard(source)
            if self._other.pop(other, None):
                self._selector.unregister(other)
            source.close()
            other.close()
        # Else the service is gone, and the client's end stays open.


def _dial(tried: Sequence[str], port: int) -> socket.socket | None:
    """Asks again and again: rank 0 may not have begun. A client would ask once in a second."""
    deadline = monotonic() + DIAL_WITHIN
    while monotonic() < deadline:
        for address in tried:
            with contextlib.suppress(OSError):
                made = socket.create_connection((address, port), timeout=DIAL_WITHIN)
                made.settimeout(None)
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return made
        sleep(ASK_EVERY)
    return None
