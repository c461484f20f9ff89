"""The key-value store of `jax.distributed`, where the program has called ``initialize``.

It is asked through JAX's own client. Handed to a PJRT client, as JAX does, that one would be watched with the
client of stretto, which lives until Python has ended and then tells of a service that is gone.
"""

from __future__ import annotations

from typing import Any

from stretto.runtime.job.rendezvous import Rendezvous

_LONGEST_MS = (1 << 31) - 1  # 24 days


class JaxStore:
    """The store behind a distributed client. Calls wait without the GIL."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, value: str) -> bool:
        try:
            self._client.key_value_set(key, value)
        except RuntimeError as error:
            if _says(error, "ALREADY_EXISTS"):
                return False
            raise
        return True

    def get(self, key: str, timeout: float) -> str:
        try:
            value = self._client.blocking_key_value_get(key, int(min(timeout * 1000, _LONGEST_MS)))
        except RuntimeError as error:
            if _says(error, "DEADLINE_EXCEEDED"):
                raise TimeoutError(f"no process wrote {key} within {timeout:g} s") from error
            raise
        return str(value)

    def try_get(self, key: str) -> str | None:
        try:
            return str(self._client.key_value_try_get(key))
        except RuntimeError as error:
            if _says(error, "NOT_FOUND"):
                return None
            raise


def _says(error: RuntimeError, code: str) -> bool:
    return str(error).startswith(code)


_rendezvous: Rendezvous | None = None


def joined(client: Any, rank: int, size: int) -> None:
    """The program has called ``jax.distributed.initialize``: the next client meets others by its store."""
    global _rendezvous
    _rendezvous = Rendezvous("jax.distributed", rank, size, JaxStore(client))


def rendezvous() -> Rendezvous | None:
    """Which process of how many this is; None without ``jax.distributed.initialize``."""
    return _rendezvous
