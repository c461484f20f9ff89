"""The environment: one release of JAX, stretto as users install it, and a view of the checkout's tests.

All of it lies below ``.cache/jax_suite`` in the repository, one folder for each release of JAX. It is made
once; stretto is installed anew whenever its sources have changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parents[2]
INSIDE = Path(__file__).resolve().parent / "inside"
# Modules in jax/_src that only JAX's tests import: its releases leave them out.
_OF_TESTS = ("hypothesis_test_util.py", "pallas/pallas_test_util.py")
_SOURCES = ("stretto", "collectives", "runtime", "hlo_frontend", "plugin")
_REQUIREMENTS = (
    "absl-py",
    "cloudpickle",
    "flatbuffers",
    "hypothesis",
    "mpi4py>=4",
    "mpich>=4.3",
    "portpicker",
    "protobuf>=5",
    "pytest>=8",
    "rich>=13",
    "scipy",
    "setuptools>=77",
    "threadpoolctl>=3.5",
    "Cython>=3.1",
    "wheel",
)


class SetupError(Exception):
    """The environment cannot be made; the message says what to do."""


@dataclass(frozen=True)
class Environment:
    """Where things are. ``tests`` holds links to the checkout's tests, and nothing else of JAX's sources,
    which would be imported in place of the release."""

    jax: str
    python: Path
    folder: Path
    checkout: Path

    @property
    def tests(self) -> Path:
        return self.folder / "tests"

    @property
    def baselines(self) -> Path:
        return self.folder / "cpu"

    @contextlib.contextmanager
    def started(
        self, command: list[str], variables: dict[str, str], log: BinaryIO
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A process beside the tests, in a session of its own, which is killed behind the block with all that
        it started there. All it says goes to ``log``. SIGTERM waits until there is a process to kill."""
        held: list[int] = []
        handler = signal.signal(signal.SIGTERM, lambda number, _: held.append(number))
        try:
            process = subprocess.Popen(
                command,
                cwd=self.tests,
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            signal.signal(signal.SIGTERM, handler)
            raise
        try:
            signal.signal(signal.SIGTERM, handler)
            for number in held[:1]:
                signal.raise_signal(number)
            yield process
        finally:
            kill(process)

    def variables(self, platform: str, devices: int) -> dict[str, str]:
        """The environment variables of a process that runs tests on ``devices`` devices."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JAX_", "XLA_", "STRETTO_", "PYTHON", "PYTEST_"))
        }
        kept |= {
            "PATH": f"{self.python.parent}{os.pathsep}{kept.get('PATH', '')}",
            "PYTHONPATH": str(INSIDE),
            "PYTHONDONTWRITEBYTECODE": "1",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_PLATFORMS": "cpu" if platform == "cpu" else f"{platform},cpu",
        }
        if platform != "cpu":
            kept["STRETTO_LOCAL_DEVICES"] = str(devices)
        return kept


def kill(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process of `Environment.started` and of those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def version_of(checkout: Path) -> str:
    """The release that a checkout's tests belong to. Raises `SetupError`."""
    path = checkout / "jax/version.py"
    found = re.search(r'^_version = "([0-9.]+)"', path.read_text(), re.M) if path.exists() else None
    if found is None:
        raise SetupError(f"{path} does not tell the version of JAX: name its release with --jax")
    return found[1]


def make(checkout: Path, jax: str) -> Environment:
    """The environment for a checkout's tests, up to date. Raises `SetupError`."""
    if not (checkout / "tests").is_dir():
        raise SetupError(f"{checkout} has no folder `tests`: name a checkout of JAX's repository")
    folder = ROOT / ".cache/jax_suite" / jax
    python = folder / "venv/bin/python"
    if not python.exists():
        print(f"== making an environment with jax {jax}", flush=True)
        venv.create(folder / "venv", clear=True, with_pip=True)
    marks = folder / "installed"
    marks.mkdir(exist_ok=True)
    wanted = " ".join((jax, *_REQUIREMENTS))
    if _read(marks / "requirements") != wanted:
        try:
            _pip(python, f"jax=={jax}", f"jaxlib=={jax}", *_REQUIREMENTS)
        except SetupError:
            shutil.rmtree(folder / "venv")  # a release may need another Python
            raise
        (marks / "requirements").write_text(wanted)
        (marks / "sources").unlink(missing_ok=True)
    sources = _hash_of_sources()
    if _read(marks / "sources") != sources:
        print("== building and installing stretto", flush=True)
        with tempfile.TemporaryDirectory() as copy:  # a build leaves files where it builds
            _copy_sources(Path(copy))
            _pip(python, "--no-build-isolation", "--no-deps", "--force-reinstall", copy)
        (marks / "sources").write_text(sources)
    environment = Environment(jax, python, folder, checkout)
    _link(checkout, environment.tests)
    _complete(checkout, folder / "venv")
    return environment


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _pip(python: Path, *what: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", *what]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        raise SetupError(
            f"failed, with Python {platform.python_version()}: {' '.join(command)}\n"
            "Releases of JAX differ in the Pythons they are for; PYTHON=/path/to/python names another one"
        )


def _sources() -> list[Path]:
    """What an installation is built from, relative to the repository."""
    files = [
        ROOT / name
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "stretto-start.pth")
    ]
    files += [p for top in _SOURCES for p in sorted((ROOT / top).rglob("*.p[yx]*"))]
    return [p.relative_to(ROOT) for p in files if "__pycache__" not in p.parts]


def _copy_sources(folder: Path) -> None:
    for path in _sources():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)


def _hash_of_sources() -> str:
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(str(path).encode())
        digest.update((ROOT / path).read_bytes())
    return digest.hexdigest()


def _complete(checkout: Path, installed: Path) -> None:
    for package in installed.glob("lib/python3.*/site-packages/jax/_src"):
        for name in _OF_TESTS:
            module = checkout / "jax/_src" / name
            if module.exists() and not (package / name).exists():
                shutil.copy(module, package / name)


def _link(checkout: Path, view: Path) -> None:
    view.mkdir(exist_ok=True)
    for name in ("tests", "conftest.py", "pyproject.toml"):
        link = view / name
        link.unlink(missing_ok=True)
        link.symlink_to(checkout.resolve() / name)
