"""A folder that the ranks of a host have in common: one makes an entry, the others take it, nobody waits in
vain. A lock is an opened file's, so two folders of one process are to each other as those of two ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stretto.runtime.job import host_folder
from stretto.runtime.job.host_folder import HostFolder

FOREVER = 60.0


def opened(parent: Path, ranks: int = 2, token: str = "job") -> HostFolder:
    folder = HostFolder.open(token, ranks, parent)
    assert folder is not None
    return folder


def test_who_comes_first_makes_it_and_the_others_wait_for_it(tmp_path: Path) -> None:
    first = opened(tmp_path, 3).entry("a")
    assert first.take(FOREVER) is None
    assert first.mine
    taken: list[bytes | None] = []
    others = [opened(tmp_path, 3).entry("a") for _ in range(2)]
    threads = [threading.Thread(target=lambda o=o: taken.append(o.take(FOREVER))) for o in others]
    for thread in threads:
        thread.start()
    assert taken == []
    first.end(b"content")
    for thread in threads:
        thread.join()
    assert taken == [b"content"] * 2
    assert not any(other.mine for other in others)


def test_the_last_one_to_take_an_entry_removes_it(tmp_path: Path) -> None:
    folder = opened(tmp_path, 3)
    entries = [folder.entry("a") for _ in range(4)]
    assert entries[0].take(FOREVER) is None
    entries[0].end(b"content")
    assert [e.take(FOREVER) for e in entries[1:3]] == [b"content"] * 2
    assert entries[3].take(FOREVER) is None
    entries[3].end(b"anew")
    assert [folder.entry("a").take(FOREVER) for _ in range(2)] == [b"anew"] * 2


def test_an_entry_whose_maker_gave_up_is_the_next_ones(tmp_path: Path) -> None:
    first, second = (opened(tmp_path).entry("a") for _ in range(2))
    assert first.take(FOREVER) is None
    first.end()
    assert second.take(FOREVER) is None
    assert second.mine


def test_a_maker_that_is_killed_is_waited_for_no_longer(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from stretto.runtime.job.host_folder import HostFolder
entry = HostFolder.open("job", 2, Path({str(tmp_path)!r})).entry("a")
assert entry.take(1) is None
print("making", flush=True)
sys.stdin.read()
"""
    maker = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert maker.stdout is not None and maker.stdout.readline() == b"making\n"
        entry = opened(tmp_path).entry("a")
        assert entry.take(0) is None
        assert not entry.mine
        os.kill(maker.pid, signal.SIGKILL)
        maker.wait()
        assert entry.take(FOREVER) is None
        assert entry.mine
    finally:
        maker.kill()
        maker.communicate()


def test_who_stops_waiting_makes_its_own_and_keeps_it(tmp_path: Path) -> None:
    first, second, third = (opened(tmp_path, 3).entry("a") for _ in range(3))
    assert first.take(FOREVER) is None
    assert second.take(FOREVER, hopeless=lambda: True) is None
    second.end(b"of the second")
    first.end(b"of the first")
    assert third.take(FOREVER) == b"of the first"


@pytest.mark.filterwarnings("ignore:.*fork")  # the child does nothing but end
def test_a_child_that_was_forked_meanwhile_holds_nobody_up(tmp_path: Path) -> None:
    first, second = (opened(tmp_path).entry("a") for _ in range(2))
    assert first.take(FOREVER) is None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        first.end(b"content")
        assert second.take(0) == b"content"
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_the_last_rank_to_leave_removes_the_folder(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    first.leave()
    assert second.path.exists()
    second.leave()
    assert list(tmp_path.iterdir()) == []
    assert second.entry("a").take(0) is None


def test_what_killed_jobs_left_behind_is_removed_by_the_next(tmp_path: Path) -> None:
    living = opened(tmp_path, token="living")
    dead = opened(tmp_path, token="dead")
    os.close(dead._alive)  # as when its process is killed
    mine = opened(tmp_path, token="next")
    assert {path for path in tmp_path.iterdir()} == {living.path, mine.path}


def test_there_is_no_folder_where_others_may_write(tmp_path: Path) -> None:
    found = opened(tmp_path)
    found.path.chmod(0o777)
    assert HostFolder.open("job", 2, tmp_path) is None
    assert HostFolder.open("job", 2, tmp_path / "missing") is None


def test_the_oldest_entries_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_folder, "MOST_BYTES", 100)
    folder = opened(tmp_path)
    for age, name in enumerate("abc"):
        entry = folder.entry(name)
        assert entry.take(FOREVER) is None
        entry.end(bytes(40))
        kept = folder.path / f"{name}.entry"
        os.utime(kept, ns=(age, age))
    assert folder.entry("a").take(FOREVER) is None
    assert folder.entry("b").take(FOREVER) == bytes(40)
    assert folder.entry("c").take(FOREVER) == bytes(40)
    too_large = folder.entry("d")
    assert too_large.take(FOREVER) is None
    too_large.end(bytes(101))
    assert folder.entry("d").take(FOREVER) is None
