"""Values, events, streams and completion threads: states, order, and who is told what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from support.handmade import F32

from stretto.runtime.errors import StrettoError
from stretto.runtime.execution.stream import Completions, Event, Stream
from stretto.runtime.execution.value import DeletedError, Landed, Promise, Value
from stretto.testing import NullArray, NullEngine

HOST = np.arange(4, dtype=np.float32)


@pytest.fixture
def engine() -> NullEngine:
    return NullEngine(1)


def test_an_issued_value(engine: NullEngine) -> None:
    array = engine.put(HOST, F32, 0)
    value = Value.of(engine, array, F32, 0)
    assert value.array() is array
    assert value.is_ready()
    np.testing.assert_array_equal(value.host_view(), HOST)


def test_what_is_issued_is_given_without_waiting(engine: NullEngine) -> None:
    array = NullArray(engine, F32, 0, ready_at=2.0)
    assert Value.of(engine, array, F32, 0).issued() is array
    promise = Promise(Event())
    value = Value(F32, 0, engine, None, promise)
    assert value.issued() is None
    promise.content = [array]
    promise.event.set()
    assert value.issued() is array
    assert engine.clock.now == 0.0
    landed = Value(F32, 0, engine, None, Landed(HOST)).issued()
    np.testing.assert_array_equal(engine.host_view(landed), HOST)
    failed = Promise(Event())
    failed.error = StrettoError("no")
    failed.event.set(error=failed.error)
    assert Value(F32, 0, engine, None, failed).issued() is None
    assert Value.failed(engine, StrettoError("no"), F32, 0).issued() is None
    value.delete()
    assert value.issued() is None


def test_a_value_is_ready_when_the_engine_says_so(engine: NullEngine) -> None:
    value = Value.of(engine, NullArray(engine, F32, 0, ready_at=2.0), F32, 0)
    assert not value.is_ready()
    value.block()
    assert value.is_ready()
    assert engine.clock.now == 2.0


def test_host_content_becomes_an_engine_array_once(engine: NullEngine) -> None:
    value = Value(F32, 0, engine, None, Landed(HOST))
    assert value.is_ready()
    assert value.host_view() is HOST
    assert engine.memory_stats(0)["bytes_in_use"] == 0
    assert value.array() is value.array()
    assert engine.memory_stats(0)["bytes_in_use"] == F32.nbytes


def test_a_deleted_value_raises_and_frees_its_memory(engine: NullEngine) -> None:
    value = Value.of(engine, engine.put(HOST, F32, 0), F32, 0)
    value.delete()
    assert value.is_deleted
    assert engine.memory_stats(0)["bytes_in_use"] == 0
    for use in (value.array, value.host_view, value.block, value.capture):
        with pytest.raises(DeletedError, match=r"f32\[4\] on local device 0 has been deleted"):
            use()
    errors: list[BaseException | None] = []
    value.on_ready(errors.append)
    assert isinstance(errors[0], DeletedError)


@pytest.mark.parametrize("landed", [False, True])
def test_a_pending_value_gets_what_its_run_gives(engine: NullEngine, landed: bool) -> None:
    promise = Promise(Event())
    value = Value(F32, 0, engine, None, promise)
    assert not value.is_ready()
    assert value.capture().promise is promise
    got: list[np.ndarray] = []
    errors: list[BaseException | None] = []
    value.on_ready(errors.append)
    waiter = threading.Thread(target=lambda: got.append(value.host_view()))
    waiter.start()
    assert got == errors == []
    promise.content = [Landed(HOST) if landed else engine.put(HOST, F32, 0)]
    promise.event.set()
    waiter.join(30)
    np.testing.assert_array_equal(got[0], HOST)
    assert errors == [None]
    assert value.is_ready()


def test_a_pending_value_gets_the_error_of_its_run(engine: NullEngine) -> None:
    promise = Promise(Event())
    value = Value(F32, 0, engine, None, promise)
    errors: list[BaseException | None] = []
    value.on_ready(errors.append)
    promise.error = StrettoError("bad luck")
    promise.event.set(error=promise.error)
    value.on_ready(errors.append)
    assert errors == [promise.error] * 2
    assert value.is_ready()
    for use in (value.array, value.host_view, value.block, value.capture):
        with pytest.raises(StrettoError, match="bad luck"):
            use()


def test_a_computation_that_failed_is_reported(engine: NullEngine) -> None:
    array = NullArray(engine, F32, 0, ready_at=1.0, error=StrettoError("overflow"))
    value = Value.of(engine, array, F32, 0)
    called = threading.Event()
    errors: list[BaseException | None] = []
    value.on_ready(lambda error: (errors.append(error), called.set()))  # type: ignore[func-returns-value,arg-type]
    assert called.wait(30)
    assert str(errors[0]) == "overflow"
    with pytest.raises(StrettoError, match="overflow"):
        value.block()


def test_an_event_tells_everybody_once() -> None:
    event = Event()
    told: list[int] = []
    for k in range(3):
        event.add_callback(lambda k=k: told.append(k))  # type: ignore[misc]
    event.set("value")
    event.add_callback(lambda: told.append(3))
    assert told == [0, 1, 2, 3]
    assert event.result() == "value"


def test_a_callback_that_fails_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    event = Event()
    told: list[int] = []
    event.add_callback(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    event.add_callback(lambda: told.append(1))
    event.set()
    assert told == [1]
    assert "ZeroDivisionError" in caplog.text


def test_event_callbacks_race_with_set() -> None:
    for _ in range(200):
        event = Event()
        told: list[int] = []
        setter = threading.Thread(target=event.set)
        setter.start()
        for k in range(5):
            event.add_callback(partial(told.append, k))
        setter.join()
        assert sorted(told) == [0, 1, 2, 3, 4]


def test_tasks_run_in_order_on_one_thread() -> None:
    stream = Stream("test")
    seen: list[tuple[int, str]] = []
    work: list[Callable[[], None]] = [
        lambda k=k: seen.append((k, threading.current_thread().name))  # type: ignore[misc]
        for k in range(20)
    ]
    events = [stream.submit(task) for task in work]
    for event in events:
        event.wait()
    assert seen == [(k, "test") for k in range(20)]
    assert stream.close(30)


def test_errors_of_tasks_go_to_their_events() -> None:
    stream = Stream("test")
    bad = stream.submit(lambda: 1 // 0)
    good = stream.submit(lambda: 7)
    assert good.result() == 7
    with pytest.raises(ZeroDivisionError):
        bad.result()
    with pytest.raises(ZeroDivisionError):
        stream.run(lambda: 1 // 0)
    assert stream.idle


def test_run_uses_the_callers_thread_when_the_stream_is_idle() -> None:
    stream = Stream("test")
    assert stream.run(threading.get_ident) == threading.get_ident()
    assert stream.thread_id is None


def test_run_waits_for_what_is_queued() -> None:
    stream = Stream("test")
    gate, seen = threading.Event(), []
    stream.submit(lambda: gate.wait(30))
    stream.submit(lambda: seen.append("queued"))
    caller = threading.Thread(target=lambda: stream.run(lambda: seen.append("run")))
    caller.start()
    assert not stream.idle
    assert seen == []
    gate.set()
    caller.join(30)
    assert seen == ["queued", "run"]


def test_a_waiter_takes_over_what_nobody_runs() -> None:
    stream = Stream("test")
    with stream._turn:  # the stream's thread cannot begin
        events = [stream.submit(threading.get_ident) for _ in range(3)]
    for event in events:
        stream.wait(event)
    assert [event.done for event in events] == [True] * 3
    assert {event.value for event in events} <= {threading.get_ident(), stream.thread_id}


def test_order_holds_whoever_runs_the_tasks() -> None:
    stream = Stream("test")
    seen: list[int] = []
    for start in range(0, 300, 3):
        for k in range(start, start + 2):
            event = stream.submit(lambda k=k: seen.append(k))  # type: ignore[misc]
        if start % 2:
            stream.wait(event)
        stream.run(lambda k=start + 2: seen.append(k))  # type: ignore[misc]
    assert seen == list(range(300))


def test_a_closed_stream_ends_its_tasks_and_takes_no_more() -> None:
    stream = Stream("test")
    events = [stream.submit(lambda k=k: k) for k in range(5)]  # type: ignore[misc]
    assert stream.close(30)
    assert [event.result() for event in events] == list(range(5))
    with pytest.raises(RuntimeError, match="stream test is closed"):
        stream.submit(lambda: None).result()
    assert Stream("unused").close()


def test_completion_threads_do_not_wait_for_each_other() -> None:
    pool = Completions()
    first, second, done = threading.Event(), threading.Event(), threading.Event()
    pool.submit(lambda: (first.wait(30), done.set()))
    pool.submit(lambda: (second.wait(30), first.set()))
    pool.submit(second.set)
    assert done.wait(30)


def test_completion_jobs_beyond_the_limit_are_queued() -> None:
    pool = Completions(limit=1)
    seen: list[int] = []
    done = threading.Event()
    for k in range(5):
        pool.submit(lambda k=k: seen.append(k))  # type: ignore[misc]
    pool.submit(done.set)
    assert done.wait(30)
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("threads", [0, 1])
def test_completion_jobs_run_though_no_thread_begins(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while Python ends, from 3.12 on."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    pool = Completions()
    there, go, done = threading.Event(), threading.Event(), threading.Event()
    if threads:
        pool.submit(lambda: (there.set(), go.wait(30)))
        assert there.wait(30)
    monkeypatch.setattr(threading.Thread, "start", start)
    pool.submit(done.set)
    assert done.is_set() == (not threads)
    go.set()
    assert done.wait(30)
