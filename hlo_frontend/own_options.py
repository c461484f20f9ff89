"""Options of stretto that a program sets for one `jit`: ``compiler_options={"stretto_interleave": 2}``.

They come in the compile options among those of XLA, which does not know them: `split` takes them out.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from stretto.runtime.errors import InvalidProgramError

from .schema import CompileOptionsProto

PREFIX = "stretto_"


@dataclass(frozen=True)
class OwnOptions:
    """Options of one program; None if not set. ``interleave``: see `runtime.options`."""

    interleave: int | None = None


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
    values: dict[str, int] = {}
    for entry in own:
        name = entry.key.removeprefix(PREFIX)
        if name != "interleave":
            raise InvalidProgramError(
                f"there is no compiler option {entry.key}; stretto has stretto_interleave"
            )
        values[name] = _count(entry)
    return OwnOptions(**values), proto.SerializeToString(), bool(left)


def _count(entry: object) -> int:
    value = entry.value  # type: ignore[attr-defined]
    kind = value.WhichOneof("one_of")
    text = "" if kind is None else str(getattr(value, kind))
    if kind == "bool_field" or not text.isdecimal() or int(text) < 1:
        raise InvalidProgramError(
            f"compiler option {entry.key} is {text!r}: "  # type: ignore[attr-defined]
            "expected a whole number of chunks a device, at least 1"
        )
    return int(text)
