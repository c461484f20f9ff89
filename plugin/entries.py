"""All handlers, gathered: importing the modules registers them."""

from __future__ import annotations

from stretto.runtime.execution.stream import completions

from . import (
    _capi,
    buffer,
    client,
    cross_host,
    event,
    executable,
    profiler,
    shardings,
    topology,
    transfer,
)
from .errors import describe
from .later import later
from .table import handlers

MODULES = (buffer, client, cross_host, event, executable, profiler, shardings, topology, transfer)


def install() -> None:
    """Give the handlers to the C table."""
    _capi.install(
        handlers(),
        describe,
        client.value_of,
        client.tensor_type,
        later.add,
        completions.submit,
    )
