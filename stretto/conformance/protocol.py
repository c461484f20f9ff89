"""The checks of the engine protocol, in a process of their own: ``python -m stretto.conformance.protocol``.

Arguments: the engine, as STRETTO_ENGINE has it; a pattern of cases; how many of those to leave out; seconds
for each. Writes a JSON object a line to standard output: first all names, then one when a check begins and
one when it ends. A check that does not end in time ends the process, with the stacks of all threads on
standard error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from stretto.engine_check import Unsupported, checks_of
from stretto.runtime.engines.engine import Engine, create_engine
from stretto.runtime.errors import StrettoError

from .pattern import fits


def check(
    factory: Callable[[int], Engine],
    only: str,
    skip: int,
    seconds: float,
    say: Callable[[dict[str, Any]], None],
) -> None:
    """Make the checks that the pattern chooses, the first ``skip`` excepted, and tell what becomes of
    them."""
    try:
        checks = checks_of(factory)
    except (StrettoError, LookupError):  # a runtime that has one device
        checks = checks_of(factory, devices=1)
    names = [name for name in checks if fits(f"protocol/{name}", only)]
    say({"names": names})
    for name in names[skip:]:
        say({"begins": name})
        began, status, text = time.perf_counter(), "PASS", ""
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            checks[name]()
        except Unsupported as error:
            status, text = "UNSUPPORTED", str(error)
        except AssertionError as error:
            status, text = "FAIL", str(error)
        except Exception:
            status, text = "FAIL", traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        took = round(time.perf_counter() - began, 3)
        say({"ends": name, "status": status, "text": text, "seconds": took})


def main() -> None:
    engine, only, skip, seconds = sys.argv[1:]
    back = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine prints does not mix with it

    def say(line: dict[str, Any]) -> None:
        back.write(json.dumps(line) + "\n")

    check(partial(create_engine, engine), only, int(skip), float(seconds), say)


if __name__ == "__main__":
    main()
