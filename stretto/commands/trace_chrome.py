"""A trace as JSON of Chrome's trace event format, which Perfetto opens (https://ui.perfetto.dev).

A process is a rank; its threads are the walk of programs, those called without one (which may be beside a
walk), the compute of each device, and each stream.
Times are microseconds since the first event of any rank, on rank 0's clock. What was skipped is an instant.
Events of a thread are in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stretto.runtime.recording.trace_events import CALLED, Measured

WALK, CALLS, DEVICES, STREAMS = 0, 1, 100, 1000  # numbers of threads


def beginning(ranks: Sequence[Measured]) -> float:
    """The time of the first event."""
    return min(
        (float(r.trace.events[:, 4].min()) for r in ranks if len(r.trace.events)), default=0.0
    )


def chrome(ranks: Sequence[Measured]) -> dict[str, Any]:
    first = beginning(ranks)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            event for rank in ranks for event in sorted(_events(rank, first), key=_order)
        ],
    }


def _order(event: dict[str, Any]) -> tuple[int, float, float]:
    """By thread and begin, whatever contains others before them."""
    return event["tid"], event.get("ts", -1.0), -event.get("dur", 0.0)


def _events(rank: Measured, first: float) -> Iterator[dict[str, Any]]:
    header = rank.trace.header
    pid = header.rank
    threads = {WALK: "programs"}

    def complete(
        tid: int, name: str, category: str, begin: float, end: float, **args: Any
    ) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": pid,
            "tid": tid,
            "ts": (begin - first) * 1e6,
            "dur": max(0.0, end - begin) * 1e6,
            "args": args,
        }

    def instant(tid: int, name: str, at: float, **args: Any) -> dict[str, Any]:
        ts = (at - first) * 1e6
        common = {"name": name, "pid": pid, "tid": tid, "ts": ts, "args": args}
        return {"ph": "i", "s": "t", "cat": "skipped", **common}

    for name, program, place, begin, end in rank.marks:
        category = "start" if name.startswith("start ") else "walk"
        tid = WALK if place != CALLED else CALLS
        if tid == CALLS:
            threads[tid] = "calls"
        yield complete(tid, name, category, begin, end, program=program)
    for program, segment, ordinal, begin, end in rank.segments:
        tid = DEVICES + ordinal
        threads[tid] = f"device {header.rank * header.local_devices + ordinal}"
        yield complete(tid, segment.name or "segment", "compute", begin, end, program=program)
    for program, segment, ordinal, at in rank.left_out:
        tid = DEVICES + ordinal
        threads[tid] = f"device {header.rank * header.local_devices + ordinal}"
        yield instant(tid, f"skipped {segment.name or 'segment'}", at, program=program)
    for t in rank.transfers:
        tid = STREAMS + t.stream
        threads[tid] = f"stream {t.stream}"
        c = t.collective
        nbytes = sum(o.nbytes for o in c.operands)
        args = {
            "program": t.program,
            "kind": str(c.kind),
            "bytes": nbytes,
            "source": c.source,
            "exposed_us": t.exposed * 1e6,
        }
        skipped = [pair for k, pair in t.pairs if k in t.skip]
        if t.moves:
            yield complete(tid, c.name, "collective", t.begin, t.end, **args)
        for source, target in skipped:
            yield instant(tid, f"skipped {c.name}", t.begin, pair=f"{source} to {target}", **args)
    name = f"rank {header.rank} ({header.host}, pid {header.pid})"
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": pid,
        "tid": 0,
        "args": {"sort_index": pid},
    }
    for tid, label in sorted(threads.items()):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": label}}
        order = {"sort_index": tid}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": order}
