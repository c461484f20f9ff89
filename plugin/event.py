"""Events that the caller makes and sets itself. All others are answered in C."""

from __future__ import annotations

from typing import Any

from . import _capi
from .errors import StatusError
from .structs import read_bytes
from .table import entry


@entry("PJRT_Event_Create")
def create(args: Any) -> None:
    args.event = _capi.give(_capi.Event())


@entry("PJRT_Event_Set")
def set_event(args: Any) -> None:
    event = _capi.event_at(args.event)
    if event is None or event.is_ready():
        raise ValueError("the event is set already")
    if args.error_code == 0:
        event.complete()
    else:
        message = read_bytes(args.error_message, args.error_message_size).decode(errors="replace")
        event.complete(StatusError(args.error_code, message))
