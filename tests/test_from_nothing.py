"""docs/from_nothing.py: it runs, its programs equal JAX's CPU backend, and what it cannot do it names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "from_nothing.py"
PRELUDE = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); from from_nothing import *\n"


def run(*arguments: str) -> str:
    """A child process: the number of devices is set before JAX is imported."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_runs_as_a_script() -> None:
    out = run(str(SCRIPT))
    assert out.count("equal to JAX's CPU backend") == 4
    steps = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    # In the first program compute runs between the start and the wait.
    assert steps[:5] == ["run", "start", "run", "wait", "equal"]


OTHERS = {
    "max": """
@sharded(P("x"), P("x"), out=P())
def f(a, b):
    return lax.pmax(a, "x"), lax.psum((a, b.astype(jnp.int32)), "x")
compare(f, (np.arange(8, dtype=np.int32), floats(6)))
""",
    "sort": """
@sharded(P("x"), out=P("x"))
def f(a):
    s, t = lax.sort((lax.all_gather(a, "x", tiled=True), jnp.arange(8)), num_keys=1)
    return lax.ppermute(t, "x", [(1, 0)]) + lax.cond(s[0] > 0, lambda: 1, lambda: 2)
compare(f, (floats(8),))
""",
    "no collective": 'compare(sharded(P("x"), out=P("x"))(jnp.sin), (floats(8),))',
}


@pytest.mark.quick("max")
@pytest.mark.parametrize("name", OTHERS)
def test_other_programs(name: str) -> None:
    run("-c", PRELUDE + OTHERS[name])


def test_what_is_not_handled_is_named() -> None:
    run(
        "-c",
        PRELUDE
        + """
for body, name in (
    (lambda a: lax.fori_loop(0, 3, lambda i, c: lax.ppermute(c, "x", [(0, 1)]), a), "while"),
    (lambda a: lax.all_to_all(a, "x", 0, 0, tiled=True), "all-to-all"),
):
    try:
        compare(sharded(P("x"), out=P("x"))(body), (floats(8),))
    except Unsupported as error:
        assert str(error).startswith(name), error
    else:
        raise AssertionError(name)
""",
    )


def test_a_device_that_does_not_come_is_named() -> None:
    run(
        "-c",
        PRELUDE
        + """
try:
    Rendezvous(timeout=0.01).meet(0, "psum.3", (0, 1), 0, [])
except TimeoutError as error:
    assert "psum.3" in str(error) and "[1]" in str(error), error
else:
    raise AssertionError
""",
    )
