"""Options of stretto that a program sets for one `jit`: ``compiler_options={"stretto_interleave": 2}``.

They come in the compile options among those of XLA, which does not know them: `split` takes them out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from stretto.runtime.errors import InvalidProgramError

from .interleaved import SCHEDULES
from .schema import CompileOptionsProto

PREFIX = "stretto_"


@dataclass(frozen=True)
class OwnOptions:
    """Options of one program; None if not set. ``interleave``, ``schedule``, ``split`` and
    ``finite_padding``: see `runtime.options`."""

    interleave: int | None = None
    schedule: str | None = None
    split: bool | None = None
    finite_padding: bool | None = None


def split(serialized: bytes) -> tuple[OwnOptions, bytes, bool]:
    """Our own options, the ``CompileOptionsProto`` without them, and whether it has options of XLA left.

    Raises `InvalidProgramError` for an option that does not exist or a value that cannot be used.
    """
    try:
        proto = CompileOptionsProto.FromString(serialized)
    except DecodeError as error:
        raise InvalidProgramError(f"cannot read the compile options: {error}") from error
    own = [e for e in proto.env_option_overrides if e.key.startswith(PREFIX)]
    left = [e for e in proto.env_option_overrides if not e.key.startswith(PREFIX)]
    if not own:
        return OwnOptions(), serialized, bool(left)
    del proto.env_option_overrides[:]
    proto.env_option_overrides.extend(left)
    values: dict[str, Any] = {}
    for entry in own:
        name = entry.key.removeprefix(PREFIX)
        if name not in _READERS:
            raise InvalidProgramError(
                f"there is no compiler option {entry.key}; stretto has "
                f"{' and '.join(PREFIX + known for known in _READERS)}"
            )
        values[name] = _READERS[name](entry)
    return OwnOptions(**values), proto.SerializeToString(), bool(left)


def _text(entry: Any) -> str:
    kind = entry.value.WhichOneof("one_of")
    return "" if kind is None else str(getattr(entry.value, kind))


def _count(entry: Any) -> int:
    text = _text(entry)
    if entry.value.WhichOneof("one_of") == "bool_field" or not text.isdecimal() or int(text) < 1:
        raise InvalidProgramError(
            f"compiler option {entry.key} is {text!r}: "
            "expected a whole number of chunks a device, at least 1"
        )
    return int(text)


def _schedule(entry: Any) -> str:
    text = _text(entry)
    if text not in SCHEDULES:
        raise InvalidProgramError(
            f"compiler option {entry.key} is {text!r}: expected one of {', '.join(SCHEDULES)}"
        )
    return text


def _switch(entry: Any) -> bool:
    text = _text(entry)
    if entry.value.WhichOneof("one_of") == "bool_field" or text not in ("0", "1"):
        raise InvalidProgramError(f"compiler option {entry.key} is {text!r}: expected 0 or 1")
    return text == "1"


_READERS: dict[str, Callable[[Any], Any]] = {
    "interleave": _count,
    "schedule": _schedule,
    "split": _switch,
    "finite_padding": _switch,
}
