"""Programs that another rank of this host compiles: ranks of one host compile each program once.

Equal modules give equal programs, so whoever comes first compiles, and hands the executable to those who
come meanwhile or later, as a compilation cache would (`executable_codec`), with what was found out about the
program beside it. They lie in the job's folder on this host (`runtime.job.host_folder`), which is this user's
alone: unlike executables that come from elsewhere, they are trusted.

Not shared: programs that call back into Python, whose functions are this process's own, and all programs
where they are dumped or measured (``STRETTO_DUMP``, ``STRETTO_PROFILE``), where the engine cannot restore
code, or with ``STRETTO_SHARE_COMPILED=0``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import struct
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

from stretto.hlo_frontend.schema import CompileOptionsProto
from stretto.runtime.engines.engine import RestoringEngine
from stretto.runtime.errors import StrettoError
from stretto.runtime.job.host_folder import Entry

from . import executable_codec, garbage
from .client import Client
from .executable_codec import StoredExecutable
from .target import measured

_log = logging.getLogger("stretto")
_LENGTH = struct.Struct("<Q")
_FLAGS = 3


@dataclass(frozen=True)
class Taken:
    """A program that another rank has compiled. ``module_digest``: see `executable.Executable`."""

    stored: StoredExecutable
    module_digest: bytes


class Shared:
    """One program that ranks of this host have in common. First `take`, then, whatever that gave, `end`."""

    def __init__(self, client: Client, entry: Entry) -> None:
        self._client, self._entry = client, entry

    def take(self) -> Taken | None:
        """The program, if another rank has compiled it or does so now; None if this one is to do it."""
        world = self._client.world
        data = self._entry.take(world.options.timeout, lambda: world.error is not None)
        if data is None:
            return None
        try:
            with garbage.kept():
                return self._read(data)
        except (StrettoError, ValueError, struct.error, pickle.UnpicklingError, EOFError) as error:
            _log.warning("a program that another rank compiled is compiled again: %s", error)
            return None

    def _read(self, data: bytes) -> Taken:
        (length,) = _LENGTH.unpack_from(data)
        begins = _LENGTH.size + length
        stored = executable_codec.from_bytes(data[_LENGTH.size : begins], self._client.target)
        module_digest, reports = pickle.loads(data[begins:])
        compiled = replace(stored.compiled, **reports)
        return Taken(replace(stored, compiled=compiled), module_digest)

    def end(self, made: StoredExecutable | None = None, module_digest: bytes = b"") -> None:
        """Let other ranks go on, with the program if this one has compiled it."""
        content = None
        if made is not None and self._entry.mine:
            found = made.compiled
            reports = {
                "valid": found.valid,
                "rewrites": found.rewrites,
                "interleaved": found.interleaved,
                "walked": found.walked,
                "splits": found.splits,
            }
            stored = executable_codec.to_bytes(made)
            content = _LENGTH.pack(len(stored)) + stored + pickle.dumps((module_digest, reports))
        self._entry.end(content)


def shared(
    client: Client, source: bytes, options: bytes, ordinals: tuple[int, ...]
) -> Shared | None:
    """The program as the ranks of this host have it in common; None where it is not to be shared.

    ``ordinals``: those of its devices that are this process's.
    """
    world, chosen = client.world, client.options
    folder = world.folder
    if (
        folder is None
        or not ordinals
        or not chosen.share_compiled
        or chosen.profile
        or client.dumps is not None
        or not isinstance(client.engine, RestoringEngine)
    ):
        return None
    about: dict[str, Any] = {
        "target": client.target,
        "measured": measured(client.overlap),
        "calls": repr(client.calls),
        "ordinals": ordinals,
        "cores": world.cores,
        "flags": os.environ.get("XLA_FLAGS", ""),
    }
    digest = hashlib.sha256(json.dumps(about).encode() + b"\0")
    digest.update(_without_place(options) + b"\0" + source)
    return Shared(client, folder.entry(digest.hexdigest()))


def _without_place(options: bytes) -> bytes:
    """Compile options without what tells on which devices and in which process the program runs.

    XLA's flags, field 3 of ``executable_build_options``, have maps, which jaxlib writes in any order.
    """
    proto = CompileOptionsProto.FromString(options)
    build = proto.executable_build_options
    for field in ("device_assignment", "device_ordinal", "process_index"):
        build.ClearField(field)
    unknown = [(f.field_number, f.data) for f in UnknownFieldSet(build)]
    others = [(number, data) for number, data in unknown if number != _FLAGS]
    flags = [
        sorted((f.field_number, repr(f.data)) for f in UnknownFieldSet(Empty.FromString(data)))
        for number, data in unknown
        if number == _FLAGS
    ]
    build.DiscardUnknownFields()
    known = proto.SerializeToString(deterministic=True)
    return known + repr((others, flags)).encode()
