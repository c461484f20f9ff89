"""A folder in memory that the ranks of one host have in common, with entries that one makes and all take.

Ranks compile the same programs at the same time. Who comes first to an entry makes it, and those who come
meanwhile wait for it, since they would only take its cores. Nobody waits for a rank that has not begun: an
entry that nobody makes is the next one's to make. A lock of the kernel's says that somebody does, so one that
ends, however it ends, is waited for no longer; one that goes on for too long is not either (``patience``).

Invariants: an entry is there whole or not at all. Whoever makes an entry makes the same one, so it does not
matter who does. Nothing here raises: where the folder cannot be used, everybody makes their own.

The folder is the user's alone, in ``/dev/shm`` where there is one, else where temporary files go. The last
rank to leave removes it; those that killed jobs have left behind are removed by the next job. Ranks that do
not see the same files, in containers of one host, each have their own folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# Entries take memory of the host. Above this the oldest ones are dropped, which costs compiling again.
MOST_BYTES = 64 << 20
_PREFIX = "stretto-"
_ALIVE = "alive"
_SHORTEST, _LONGEST = 0.001, 0.02  # seconds between two looks at a lock


class HostFolder:
    """The folder of a job on this host. ``ranks``: how many have it in common."""

    def __init__(self, path: Path, alive: int, ranks: int) -> None:
        self.path, self.ranks = path, ranks
        self._alive, self._owner = alive, os.getpid()

    @classmethod
    def open(cls, token: str, ranks: int, parent: Path | None = None) -> HostFolder | None:
        """The folder that all ranks of a job open with the same ``token``; None where there can be none."""
        parent = parent or _parent()
        path = parent / f"{_PREFIX}{os.getuid()}-{token}"
        try:
            _remove_left_behind(parent)
            while True:
                path.mkdir(mode=0o700, exist_ok=True)
                found = path.lstat()
                private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
                if not private or found.st_uid != os.getuid():
                    return None
                with contextlib.suppress(FileNotFoundError):  # somebody took it for one left behind
                    alive = os.open(path / _ALIVE, os.O_RDWR | os.O_CREAT, 0o600)
                    fcntl.flock(alive, fcntl.LOCK_SH)
                    if (path / _ALIVE).exists():
                        return cls(path, alive, ranks)
                    os.close(alive)
        except OSError:
            return None

    def leave(self) -> None:
        """This rank needs the folder no more; the last one removes it. Does nothing in a forked child."""
        if self._alive < 0 or os.getpid() != self._owner:
            return
        alive, self._alive = self._alive, -1
        with contextlib.suppress(OSError):
            if _alone(alive):
                shutil.rmtree(self.path, ignore_errors=True)
        os.close(alive)

    def entry(self, name: str) -> Entry:
        """The entry of that name, a word."""
        return Entry(self, name)

    def make_room(self, nbytes: int) -> None:
        """Drop the oldest entries, so that with one of so many bytes there are not too many."""
        kept = []
        with contextlib.suppress(OSError):
            for path in self.path.glob(f"*{Entry.SUFFIX}"):
                with contextlib.suppress(FileNotFoundError):
                    about = path.stat()
                    kept.append((about.st_mtime_ns, about.st_size, path))
        total = nbytes + sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= MOST_BYTES:
                break
            path.unlink(missing_ok=True)
            total -= size


class Entry:
    """What one rank makes and the others take. First `take`, then, whatever that gave, `end`."""

    SUFFIX = ".entry"

    def __init__(self, folder: HostFolder, name: str) -> None:
        self._folder = folder
        self._path = folder.path / f"{name}{self.SUFFIX}"
        self._lock_path = folder.path / f"{name}.lock"
        self._lock = -1

    @property
    def mine(self) -> bool:
        """Whether others wait for this rank to make it."""
        return self._lock >= 0

    def take(self, patience: float, hopeless: Callable[[], bool] = lambda: False) -> bytes | None:
        """The entry, once whoever makes it is done; None if this rank is to make it.

        Waits at most ``patience`` seconds, and no longer where ``hopeless()``.
        """
        try:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            return None
        if not _locked(lock, time.monotonic() + patience, hopeless):
            os.close(lock)
            return None
        self._lock = lock
        try:
            content = self._path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):  # a byte for each who took it: the last one removes it
            os.write(lock, b".")
            if os.fstat(lock).st_size >= self._folder.ranks - 1:
                self._path.unlink(missing_ok=True)
                os.ftruncate(lock, 0)
        self.end()
        return content

    def end(self, content: bytes | None = None) -> None:
        """Let the others go on, with the content if there is one and it was this rank's to make."""
        if self._lock < 0:
            return
        lock, self._lock = self._lock, -1
        try:
            if content is not None and len(content) <= MOST_BYTES:
                self._folder.make_room(len(content))
                partly = self._path.with_suffix(f".{os.getpid()}")
                try:
                    partly.write_bytes(content)
                    os.replace(partly, self._path)
                except OSError:
                    partly.unlink(missing_ok=True)
        except OSError:
            pass
        finally:
            # A child that was forked meanwhile has the lock too: it is given up, not only closed.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)


def _locked(lock: int, until: float, hopeless: Callable[[], bool]) -> bool:
    pause = _SHORTEST
    while not _alone(lock):
        if time.monotonic() >= until or hopeless():
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return True


def _alone(lock: int) -> bool:
    """Whether nobody else has the lock; then this process has it alone."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _parent() -> Path:
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK | os.X_OK)
    return memory if usable else Path(tempfile.gettempdir())


def _remove_left_behind(parent: Path) -> None:
    """Remove this user's folders that no living process has."""
    for path in parent.glob(f"{_PREFIX}{os.getuid()}-*"):
        try:
            alive = os.open(path / _ALIVE, os.O_RDWR)
        except OSError:
            continue  # just being made, or not one of ours
        try:
            if _alone(alive):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(alive)
