"""Traces as an XSpace, the form in which XLA's profilers give theirs to JAX.

Source of the format: ``xla/tsl/profiler/protobuf/xplane.proto``. A rank is a plane. Its lines are the walk of
its programs, each of its devices, and each stream. Lines tell nanoseconds of the host's clock since 1970,
events picoseconds since their line's begin. Names and keys are numbered in each plane.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stretto.hlo_frontend.schema import messages
from stretto.runtime.recording.trace_events import Measured

# Planes with this beginning are what the trace viewer shows of devices that it does not know.
PLANE = "/device:CUSTOM:stretto"

TABLE: dict[str, str] = {
    "XSpace": "planes:1:XPlane* errors:2:string* warnings:3:string* hostnames:4:string*",
    "XPlane": (
        "id:1:int64 name:2:string lines:3:XLine* event_metadata:4:XEventMetadataEntry* "
        "stat_metadata:5:XStatMetadataEntry* stats:6:XStat*"
    ),
    "XLine": (
        "id:1:int64 display_id:10:int64 name:2:string display_name:11:string timestamp_ns:3:int64 "
        "duration_ps:9:int64 events:4:XEvent*"
    ),
    "XEvent": "metadata_id:1:int64 offset_ps:2:int64/ duration_ps:3:int64 stats:4:XStat*",
    "XStat": "metadata_id:1:int64 int64_value:4:int64/ str_value:5:string/",
    # Maps, as they are on the wire.
    "XEventMetadataEntry": "key:1:int64 value:2:XEventMetadata",
    "XEventMetadata": "id:1:int64 name:2:string display_name:4:string",
    "XStatMetadataEntry": "key:1:int64 value:2:XStatMetadata",
    "XStatMetadata": "id:1:int64 name:2:string",
}
XSpace: Any = messages(TABLE)["XSpace"]

_WALK, _DEVICES, _STREAMS = 0, 100, 1000  # ids of lines, in the order of display
_Stats = dict[str, str | int]


@dataclass
class _Plane:
    """A plane in the making. ``epoch``: nanoseconds since 1970 when ``perf_counter`` was 0."""

    proto: Any
    epoch: int
    names: dict[str, int] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)

    def line(self, id: int, name: str, events: Iterable[tuple[str, float, float, _Stats]]) -> None:
        """A line with (name, begin, end, stats) events; times are those of ``perf_counter``."""
        listed = sorted(events, key=lambda event: event[1])
        line = self.proto.lines.add(id=id, display_id=id, name=name, display_name=name)
        if not listed:
            return
        first = listed[0][1]
        line.timestamp_ns = self.epoch + round(first * 1e9)
        line.duration_ps = round((max(event[2] for event in listed) - first) * 1e12)
        for what, begin, end, stats in listed:
            event = line.events.add(
                metadata_id=_number(self.names, what, self.proto.event_metadata),
                offset_ps=round((begin - first) * 1e12),
                duration_ps=round(max(0.0, end - begin) * 1e12),
            )
            for key, value in stats.items():
                stat = event.stats.add(
                    metadata_id=_number(self.keys, key, self.proto.stat_metadata)
                )
                match value:
                    case str():
                        stat.str_value = value
                    case int():
                        stat.int64_value = value


def _number(known: dict[str, int], name: str, table: Any) -> int:
    number = known.get(name)
    if number is None:
        number = known[name] = len(known) + 1
        table.add(key=number).value.MergeFrom(type(table[-1].value)(id=number, name=name))
    return number


def xspace(ranks: Iterable[Measured], epoch: int) -> bytes:
    """The serialized XSpace of what was measured."""
    space = XSpace()
    for rank in ranks:
        header = rank.trace.header
        plane = _Plane(space.planes.add(name=f"{PLANE} rank {header.rank}"), epoch)
        plane.proto.id = header.rank
        plane.line(_WALK, "programs", _walk(rank))
        for ordinal in range(header.local_devices):
            device = header.rank * header.local_devices + ordinal
            plane.line(_DEVICES + ordinal, f"device {device}", _computed(rank, ordinal))
        for stream in sorted({transfer.stream for transfer in rank.transfers}):
            plane.line(_STREAMS + stream, f"stream {stream}", _transferred(rank, stream))
    return space.SerializeToString()


def _walk(rank: Measured) -> Iterable[tuple[str, float, float, _Stats]]:
    for name, program, _, begin, end in rank.marks:
        yield name, begin, end, {"program": program}


def _computed(rank: Measured, ordinal: int) -> Iterable[tuple[str, float, float, _Stats]]:
    for program, segment, where, begin, end in rank.segments:
        if where == ordinal:
            yield segment.name or "segment", begin, end, {"program": program}
    for program, segment, where, at in rank.left_out:
        if where == ordinal:
            yield f"skipped {segment.name or 'segment'}", at, at, {"program": program}


def _transferred(rank: Measured, stream: int) -> Iterable[tuple[str, float, float, _Stats]]:
    for t in rank.transfers:
        if t.stream != stream:
            continue
        c = t.collective
        stats: _Stats = {
            "program": t.program,
            "kind": str(c.kind),
            "bytes": sum(o.nbytes for o in c.operands),
            "source": c.source,
            "exposed_ns": round(t.exposed * 1e9),
        }
        skipped = [pair for k, pair in t.pairs if k in t.skip]
        if not t.pairs or len(skipped) < len(t.pairs):
            yield c.name, t.begin, t.end, stats
        for source, target in skipped:
            yield f"skipped {c.name}", t.begin, t.begin, {**stats, "pair": f"{source} to {target}"}
