"""The checks of the engine protocol, in a process of their own: ``python -m stretto.conformance.protocol``.

Arguments: the engine, as STRETTO_ENGINE has it; on how many devices; seconds for each check; their names.
Writes a JSON object a line to standard output: when the engine is there, when a check begins and when it
ends. A check that does not end in time ends the process, with the stacks of all threads on standard error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from stretto.engine_check import Unsupported, checks_of
from stretto.runtime.engines.engine import Engine, create_engine
from stretto.runtime.errors import StrettoError


def check(
    factory: Callable[[int], Engine],
    devices: int,
    names: Sequence[str],
    seconds: float,
    say: Callable[[dict[str, Any]], None],
) -> None:
    """Make these checks, and tell what becomes of them. ``devices``: 0 for two, or one where there are
    no more."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        checks = checks_of(factory, devices=devices or 2)
    except (StrettoError, LookupError):
        if devices:
            raise
        checks = checks_of(factory, devices=1)
    say({"made": True})
    for name in names:
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
    engine, devices, seconds, *names = sys.argv[1:]
    back = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine prints does not mix with it

    def say(line: dict[str, Any]) -> None:
        back.write(json.dumps(line) + "\n")

    check(partial(create_engine, engine), int(devices), names, float(seconds), say)


if __name__ == "__main__":
    main()
