"""``pytest -p stretto.conformance --stretto-engine=ENGINE``: the cases of `stretto conform`, a test each.

They are named ``stretto::GROUP/NAME`` and come after the tests that pytest finds; ``-k`` chooses among
them. What is absent is skipped. Programs run together, as in `stretto conform`: the first waits for all.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from . import cases

_VERDICTS = pytest.StashKey["Verdicts"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stretto", "conformance of an engine")
    group.addoption(
        "--stretto-engine", metavar="ENGINE", help="run the cases of `stretto conform ENGINE`"
    )
    group.addoption("--stretto-ranks", type=int, default=1, metavar="N", help="on N processes (1)")
    group.addoption(
        "--stretto-devices",
        type=int,
        default=0,
        metavar="N",
        help="that the engine has in each process, where these are fewer than programs want",
    )
    group.addoption(
        "--stretto-only", default="*", metavar="PATTERN", help="cases by name, as `--only` there"
    )


class Verdicts:
    """What becomes of cases, which run when the first of them is asked for."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.chosen: list[str] = []
        self.known: dict[str, cases.Verdict] = {}
        self.coming: Iterator[cases.Verdict] | None = None

    def __getitem__(self, name: str) -> cases.Verdict:
        if self.coming is None:
            option = self.config.getoption
            self.coming = cases.conform(
                option("--stretto-engine"),
                self.chosen,
                option("--stretto-ranks"),
                option("--stretto-devices"),
            )
        while name not in self.known:
            verdict = next(self.coming)
            self.known[verdict.name] = verdict
        return self.known[name]


class Failed(Exception):
    """What a case says, without a traceback of ours."""


class Case(pytest.Item):
    """One case."""

    def __init__(self, *, verdicts: Verdicts, **more: Any) -> None:
        super().__init__(**more)
        self.verdicts = verdicts

    def runtest(self) -> None:
        verdict = self.verdicts[self.name]
        if verdict.status == cases.UNSUPPORTED:
            pytest.skip(verdict.reason())
        if verdict.status == cases.FAIL:
            raise Failed(verdict.text)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, Failed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        return "stretto", None, self.name


class Cases(pytest.Collector):
    """Where they are in pytest's tree."""

    def collect(self) -> Iterator[Case]:
        verdicts = self.session.stash[_VERDICTS]
        option = self.config.getoption
        for name in cases.names_of(option("--stretto-ranks"), option("--stretto-only")):
            yield Case.from_parent(self, name=name, verdicts=verdicts)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The session has one thing more to collect."""
    report = yield
    if isinstance(collector, pytest.Session) and collector.config.getoption("--stretto-engine"):
        collector.stash[_VERDICTS] = Verdicts(collector.config)
        report.result.append(Cases.from_parent(collector, name="stretto", nodeid="stretto"))
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Only what is left after all have chosen is run."""
    if _VERDICTS in session.stash:
        chosen = [item.name for item in session.items if isinstance(item, Case)]
        session.stash[_VERDICTS].chosen = chosen
