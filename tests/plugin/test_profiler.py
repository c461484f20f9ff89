"""`jax.profiler` on stretto: planes, lines and events against counts made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jax.profiler import ProfileData
from support.handmade import F32, Rig, block, permute, program, segment
from support.scripts import reports_of

from stretto.plugin import _capi
from stretto.plugin.xspace import PLANE, xspace
from stretto.runtime.program import Run, Start, Wait
from stretto.runtime.recording.recorder import Recorder
from stretto.runtime.recording.trace_events import measure
from stretto.runtime.recording.trace_file import Header
from stretto.testing import NullEngine

_SCRIPT = """
import glob, gzip, json, sys, threading
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from stretto.plugin.client import clients

rank, devices, folder = jax.process_index(), jax.devices(), sys.argv[1]
mesh = Mesh(np.array(devices), ("x",))

def shard_map(f, out):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=out))

def summing(a):
    return a * lax.psum(a, "x")

def doubling(a):
    return 2 * a

def of_stretto(directory):
    (path,) = glob.glob(f"{directory}/**/*.xplane.pb", recursive=True)
    return {
        plane.name.removeprefix("/device:CUSTOM:"): {
            line.name: [[e.name, e.start_ns, e.duration_ns, dict(e.stats)] for e in line.events]
            for line in plane.lines
        }
        for plane in jax.profiler.ProfileData.from_file(path).planes
        if "stretto" in plane.name
    }

x = jax.device_put(np.arange(16, dtype=np.float32), NamedSharding(mesh, P("x")))
y = jax.device_put(np.ones(5, np.float32), jax.local_devices()[0])
summed, double = shard_map(summing, P("x")), jax.jit(doubling)
jax.block_until_ready((summed(x), double(y)))  # loaded, and run, before anybody records
(client,) = clients
"""

_END = """
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(found, file)
"""


def recorded(folder: Path, code: str, devices: int, ranks: int = 1) -> list[Any]:
    return reports_of(folder, _SCRIPT + code + _END, devices, ranks)[0]


_RECORD = """
with jax.profiler.trace(f"{folder}/trace{rank}", create_perfetto_trace=True):
    for _ in range(3):
        summed(x).block_until_ready()
    for _ in range(2):
        double(y).block_until_ready()
    jax.jit(lambda a: a - 7)(y).block_until_ready()  # loaded while it records
watched = client.executor.dispatcher.instrument is not None
summed(x).block_until_ready()
(perfetto,) = glob.glob(f"{folder}/trace{rank}/**/perfetto_trace.json.gz", recursive=True)
names = [e["args"]["name"] for e in json.loads(gzip.open(perfetto).read())["traceEvents"]
         if e.get("name") in ("process_name", "thread_name")]
found = [of_stretto(f"{folder}/trace{rank}"), watched, names]
"""


def check(planes: Any, rank: int, devices: list[int], per_device: int) -> None:
    (plane,) = planes.values()
    assert list(planes) == [f"stretto rank {rank}"]
    assert list(plane) == ["programs", *(f"device {d}" for d in devices), "stream 0"]
    walks = [name for name, *_ in plane["programs"] if not name.startswith(("start", "wait"))]
    assert walks == ["jit_summing"] * 3 + ["jit_doubling"] * 2 + ["jit__lambda"]
    alone = ["jit_doubling"] * 2 + ["jit__lambda"]
    for d in devices:
        ran = [stats["program"] for _, _, _, stats in plane[f"device {d}"]]
        # What calls a collective runs before it and behind it.
        assert ran == ["jit_summing"] * 6 + (alone if d == devices[0] else [])
    moved = plane["stream 0"]
    for d in devices:
        parts = plane[f"device {d}"][:6]
        for k, (_, begin, duration, _) in enumerate(moved):
            (_, first, took, _), (_, again, _, _) = parts[2 * k : 2 * k + 2]
            assert first + took <= begin + 1 and begin + duration <= again + 1
    assert [stats["kind"] for *_, stats in moved] == ["all-reduce"] * 3
    assert {stats["bytes"] for *_, stats in moved} == {per_device * 4}
    assert all("script.py:" in stats["source"] for *_, stats in moved)
    for events in plane.values():
        begins = [begin for _, begin, *_ in events]
        assert begins == sorted(begins)
        assert all(duration >= 0 for _, _, duration, _ in events)
    # Each all-reduce lies within the walk of its program.
    walked = [(b, b + d) for name, b, d, _ in plane["programs"] if name == "jit_summing"]
    for (_, begin, duration, _), (first, last) in zip(moved, walked, strict=True):
        assert first <= begin + 1 and begin + duration <= last + 1


def test_what_runs_in_one_process(tmp_path: Path) -> None:
    ((planes, watched, names),) = recorded(tmp_path, _RECORD, 2)
    check(planes, 0, [0, 1], 8)
    assert not watched
    assert {f"{PLANE} rank 0", "programs", "device 0", "device 1", "stream 0"} <= set(names)


@pytest.mark.mpi
def test_what_runs_on_two_ranks(tmp_path: Path) -> None:
    reports = recorded(tmp_path, _RECORD, 4, 2)
    for rank, (planes, watched, _) in enumerate(reports):
        check(planes, rank, [2 * rank, 2 * rank + 1], 4)
        assert not watched


def test_sessions_begin_and_end_while_programs_run(tmp_path: Path) -> None:
    """Every result is right, and afterwards everything is as it was."""
    code = """
step = shard_map(lambda a: a + lax.pmean(a, "x") - lax.psum(a, "x") / len(devices), P("x"))
results, stop = [], threading.Event()

def work():
    a, b, c, add = x, y, x, jax.jit(lambda v: v + 1, donate_argnums=0)
    while not stop.is_set():
        a, b = step(a), double(b) - b
        if len(results) % 3 == 0:  # another program, which has to be compiled
            add = jax.jit(lambda v: v + 1, donate_argnums=0)
        c = add(c + 0) - 1
        results.append((np.asarray(a) == np.asarray(x)).all() and (np.asarray(b) == 1).all()
                       and (np.asarray(c) == np.asarray(x)).all())

threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
counts, options = [], jax.profiler.ProfileOptions()
options.python_tracer_level = 0  # JAX's own, which exchanges the hooks of all threads while they run
try:
    for k in range(6):
        with jax.profiler.trace(f"{folder}/trace{k}", profiler_options=options):
            done = len(results)
            while len(results) < done + 10:
                stop.wait(0.001)
                assert all(thread.is_alive() for thread in threads)
        (plane,) = of_stretto(f"{folder}/trace{k}").values()
        counts.append(min(len(plane[line]) for line in ("programs", "device 0", "device 1", "stream 0")))
finally:  # a thread that has failed is told; the other one must end for that
    stop.set()
for thread in threads:
    thread.join()
singles = [e.loaded.single is not None for e in client._executables
           if e.loaded.program.single_segment is not None and len(e.devices) == 1]
found = [all(results), min(counts) > 5, singles.count(True) == len(singles) >= 2,
         client.executor.dispatcher.instrument is None]
"""
    assert recorded(tmp_path, code, 2) == [[True] * 4]


def test_what_is_skipped() -> None:
    recorder = Recorder(NullEngine(2), 2, _capi.Rows)
    rig = Rig(2, instrument=recorder)
    # Device 0's message is never sent.
    shift = permute((0, 1), (1, 0), valid_iterations=((1, 0), (0, 9)))
    body = block(
        (0,), [Start(0, (0,), (1,), 0, 0), Run(0, (0,), (2,)), Wait(0), Run(1, (1, 2), (3,))], (3,)
    )
    segments = [segment("increment"), segment("add", (F32, F32))]
    shifting = program([F32] * 4, body, devices=2, segments=segments, collectives=[shift], name="p")
    rig.run(shifting, [0.0, 1.0])
    rig.executor.close()
    recorder.end()
    header = Header(1, 2, "here", 1, 2, "null", 0.0, 0.0)
    data = xspace([measure(recorder.trace(header))], epoch=10**18)
    (plane,) = ProfileData.from_serialized_xspace(data).planes
    assert plane.name == f"{PLANE} rank 1"
    lines = {line.name: list(line.events) for line in plane.lines}
    assert list(lines) == ["programs", "device 2", "device 3", "stream 0"]
    assert [e.name for e in lines["programs"]] == ["p", "start shift", "wait shift"]
    assert [e.name for e in lines["device 2"]] == ["increment", "add"]
    moved = {e.name: dict(e.stats) for e in lines["stream 0"]}
    assert list(moved) == ["shift", "skipped shift"]
    assert moved["skipped shift"]["pair"] == "0 to 1"
    assert {stats["bytes"] for stats in moved.values()} == {16}
    assert all(e.start_ns > 10**18 for events in lines.values() for e in events)


def test_a_second_observer_is_told_beside_the_first() -> None:
    first, second = (Recorder(NullEngine(1), 1, _capi.Rows) for _ in range(2))
    rig = Rig(1, instrument=first)
    body = block((0,), [Run(0, (0,), (1,))], (1,))
    loaded = rig.executor.load(program([F32] * 2, body, segments=[segment("increment")]), (0,))
    counts = []
    for observed in (False, True, False):
        end = rig.executor.observe(second) if observed else lambda: None
        ((value,),) = loaded.execute(rig.arguments(loaded, [0.0]))
        assert value.host_view()[0] == 1
        end()
        counts.append((sum(map(len, first.rows.take())), sum(map(len, second.rows.take()))))
    rig.executor.close()
    (before, nothing), (told, also), (after, none) = counts
    assert before == told == after == also > 0
    assert (nothing, none) == (0, 0)
