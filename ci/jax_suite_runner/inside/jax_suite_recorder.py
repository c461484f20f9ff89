"""A pytest plugin: selects tests, and tells what each did as soon as it did it.

Loaded with ``-p`` into the process that runs a file of JAX's tests. It appends one JSON object a line to
the file named by ``JAX_SUITE_RECORD``: ``{"collected": [names]}``, ``{"begin": name}``, and ``{"end": name,
"outcome": "passed" | "failed" | "skipped", "seconds": s, "detail": text}``. Tests that the file has a
``begin`` of are not run again, so that a run can go on after a crash.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

_record = Path(os.environ["JAX_SUITE_RECORD"])
_modulus, _residue = (int(os.environ[f"JAX_SUITE_{name}"]) for name in ("MODULUS", "RESIDUE"))
_left_out = set(filter(None, os.environ["JAX_SUITE_LEFT_OUT"].split(",")))
_only = os.environ.get("JAX_SUITE_ONLY")


def _tell(**what: Any) -> None:
    with _record.open("a") as file:
        file.write(json.dumps(what) + "\n")


def _name(item: pytest.Item) -> str:
    owner = getattr(item, "cls", None)
    return f"{owner.__name__ if owner else ''}::{item.name}"


def pytest_configure() -> None:
    import jax._src.test_util as jtu

    # Tests for CPU are to run; to an unknown platform JAX's tests would answer by skipping.
    jtu._TEST_DUT._set("cpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    begun = set()
    if _record.exists():
        told = map(json.loads, _record.read_text().splitlines())
        begun = {line["begin"] for line in told if "begin" in line}
    only = set(Path(_only).read_text().splitlines()) if _only else None

    def selected(item: pytest.Item) -> bool:
        name = _name(item)
        return (
            zlib.crc32(name.encode()) % _modulus == _residue
            and item.name not in _left_out
            and (only is None or name in only)
        )

    wanted = [item for item in items if selected(item)]
    if not begun:
        _tell(collected=[_name(item) for item in wanted])
    kept = [item for item in wanted if _name(item) not in begun]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    _tell(begin=_name(item))
    return (yield)


_worst: dict[str, tuple[str, float, str]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """The worst of set-up, call and tear-down is what the test did; their times add up."""
    report: pytest.TestReport = yield
    name = _name(item)
    outcome, seconds, detail = _worst.get(name, ("passed", 0.0, ""))
    if report.outcome != "passed" and outcome != "failed":
        outcome, detail = report.outcome, _reason(report, call.excinfo)
    _worst[name] = outcome, seconds + report.duration, detail
    if report.when == "teardown":
        outcome, seconds, detail = _worst.pop(name)
        _tell(end=name, outcome=outcome, seconds=round(seconds, 3), detail=detail)
    return report


def _reason(report: pytest.TestReport, found: pytest.ExceptionInfo[BaseException] | None) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash else text
    causes = (
        []
        if found is None
        else [cause for cause in _causes(found.value) if cause is not found.value]
    )
    told = dict.fromkeys(f"{type(cause).__name__}: {cause}" for cause in causes)
    return "; ".join([*told, message])[:2000]


def _causes(error: BaseException) -> list[BaseException]:
    """What an error was raised from, or an error of several is made of: those that no other one caused."""
    below = [*getattr(error, "exceptions", ())] or [*filter(None, [error.__cause__])]
    return [cause for one in below for cause in _causes(one)] or [error]
