"""What all tests share: importable helpers, and JAX with stretto as a second platform in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from stretto.hlo_frontend import pipeline
from stretto.runtime import options

# ``support`` and ``programs`` are packages that several tests share.
sys.path.insert(0, str(Path(__file__).parent))

from support.ahead import Launches

from stretto.conformance import judge

TESTS = Path(__file__).parent

# Ranks write to one pipe: where this is set, Python writes a line and its end separately, and the launcher
# passes on another rank's line between them.
os.environ.pop("PYTHONUNBUFFERED", None)

# Graphs are checked between passes, in child processes too.
os.environ[pipeline.CHECKED] = "1"

# Before any test module is imported: one that makes an array while it is collected makes JAX's devices,
# and then it is too late. The CPU stays the default platform.
jax.config.update("jax_platforms", "cpu,stretto")
options.configure(options.Options(local_devices=4))


@pytest.hookimpl(tryfirst=True)  # before pytest leaves tests out by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases that their test's mark ``quick`` does not name are ``thorough``. Raises where it names one that
    there is not."""
    missing: dict[str, set[str]] = {}
    for item in items:
        if (mark := item.get_closest_marker("quick")) is not None:
            case = item.callspec.id  # type: ignore[attr-defined]
            missing.setdefault(item.nodeid.split("[")[0], set(mark.args)).discard(case)
            if case not in mark.args:
                item.add_marker(pytest.mark.thorough)
    chosen = any("::" in argument for argument in config.args)  # cases, perhaps
    for name, cases in missing.items():
        if cases and not chosen:
            raise pytest.UsageError(f"{name} has no case {', '.join(sorted(cases))} to be quick")


@pytest.fixture(scope="session")
def launches(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Launches]:
    """The launches of the conformance programs that this session collected."""
    from stretto.conformance.programs import PROGRAMS  # only now: see above

    chosen: dict[str, list[str]] = {}
    for item in request.session.items:
        if item.path == TESTS / "test_conformance.py" and item.name.startswith("test_program["):
            form, name = item.callspec.params["form"], item.callspec.params["name"]
            if judge.FORMS[form].processes == 1 or judge.find_mpiexec() is not None:
                chosen.setdefault(form, []).append(name)
    judged = {n for names in chosen.values() for n in names if PROGRAMS[n].expected is None}
    chosen[judge.REFERENCE.name] = [n for n in PROGRAMS if n in judged]
    made = Launches(tmp_path_factory.mktemp("conformance"), chosen)
    yield made
    made.stop()
