"""Ctrl-C, and other signals with handlers in Python, while the main thread is in the plugin."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from support.scripts import DROPPED, passes

PRELUDE = """
import os, signal, sys
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
n = len(jax.devices())
mesh = Mesh(np.array(jax.devices()), ("x",))
x = jax.device_put(np.arange(n * 4, dtype=np.float32).reshape(n, 4), NamedSharding(mesh, P("x")))
def mapped(f, out):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=out, check_vma=False))
psum = mapped(lambda v: lax.psum(v, "x"), P())
"""


@pytest.mark.parametrize("at_first", ["default_int_handler", "SIG_IGN"])
def test_a_signal_during_a_call_is_raised_behind_it(at_first: str) -> None:
    """What the call gives is whole: the function that it calls back sends the signal to its own process.

    A shell's background jobs ignore it ``at_first``.
    """
    out = passes(
        f"import signal\nsignal.signal(signal.SIGINT, signal.{at_first})"
        + PRELUDE
        + textwrap.dedent("""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def interrupt(v):
            signal.raise_signal(signal.SIGINT)
            return np.asarray(v) + 1
        f = jax.jit(lambda v: jax.pure_callback(interrupt, jax.ShapeDtypeStruct((), jnp.float32), v))
        seen = 0
        for turn in range(20):
            try:
                f(float(turn)).block_until_ready()
                for _ in range(100): pass
            except KeyboardInterrupt:
                seen += 1
        print(seen)
        """),
        devices=1,
    )
    assert out.split() == ["20"]


def test_signals_at_any_moment_end_nothing_but_what_they_interrupt() -> None:
    out = passes(
        PRELUDE
        + textwrap.dedent("""
        class Interrupt(BaseException): pass
        def handler(*_):
            signal.setitimer(signal.ITIMER_REAL, 0.3)  # Python drops what is raised in a destructor
            raise Interrupt
        signal.signal(signal.SIGALRM, handler)
        total = np.arange(n * 4).reshape(n, 4).sum(0)
        loop = mapped(lambda v: lax.fori_loop(0, 20, lambda i, c: lax.pmean(c, "x") + jnp.sin(c), v), P("x"))
        donate = jax.jit(lambda v: v * 1.5, donate_argnums=0)
        def work(turn, kept):
            if turn % 3 == 0: np.asarray(psum(x))
            elif turn % 3 == 1: loop(x).block_until_ready()
            else:
                kept = donate(kept)
                np.asarray(kept[0, 0])
            return kept
        for turn in range(3): work(turn, x + 0)
        seen = 0
        for turn in range(60):
            try:
                kept = x + 0
                signal.setitimer(signal.ITIMER_REAL, 0.0005 * (1 + turn))
                while True: kept = work(turn, kept)
            except Interrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
                seen += 1
            np.testing.assert_array_equal(np.asarray(psum(x))[0], total)
        print(seen)
        """),
        devices=4,
    )
    assert out.split() == ["60"]


# A shell's background jobs, and what they start, ignore Ctrl-C.
ENDLESS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import jax, jax.numpy as jnp
from jax import lax
f = jax.jit(lambda x: lax.while_loop(lambda c: c.sum() >= 0, lambda c: jnp.abs(jnp.tanh(c @ c)), x))
x = jnp.ones((size, size))
f = f.lower(x).compile()  # a signal must not come while JAX traces
"""


def _interrupted(script: str, again: bool) -> tuple[int, str]:
    """Exit status and errors of a script that gets Ctrl-C once it says that it runs, maybe more than once."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(DROPPED)}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**env, "JAX_PLATFORMS": "stretto", "STRETTO_GRACE": "0.5"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "running\n"
        for _ in range(200 if again else 1):
            process.send_signal(signal.SIGINT)
            try:
                _, errors = process.communicate(timeout=0.3 if again else 60)
            except subprocess.TimeoutExpired:
                continue
            return process.returncode, errors
        raise AssertionError("it runs on")
    finally:
        process.kill()


def test_a_loop_without_end_is_left_where_nobody_catches_ctrl_c() -> None:
    running = "y = f(x)\nprint('running', flush=True)\ny.block_until_ready()"
    status, errors = _interrupted("size = 300" + ENDLESS + running, again=False)
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert errors.endswith("still running 0.5 s (STRETTO_GRACE) after Ctrl-C\n")


@pytest.mark.thorough
def test_the_third_ctrl_c_ends_a_process_whose_main_thread_does_not_come_back() -> None:
    """So small a loop runs in the thread that calls it."""
    calling = """
    says = ["running"]
    while True:
        try:
            if says: print(says.pop(), flush=True)
            f(x)
        except KeyboardInterrupt: pass
    """
    status, errors = _interrupted("size = 1" + ENDLESS + textwrap.dedent(calling), again=True)
    assert (status, errors) == (-signal.SIGINT, ""), errors


@pytest.mark.quick("1")
@pytest.mark.parametrize("native", ["1", "0"])
def test_after_ctrl_c_the_devices_can_be_used_again(native: str) -> None:
    """A loop without end over several devices is ended; what is short goes on to its end.

    A shell's background jobs ignore the signal at first.
    """
    out = passes(
        f"import os, signal\nos.environ |= dict(STRETTO_NATIVE={native!r}, STRETTO_GRACE='0.5')\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        + PRELUDE
        + textwrap.dedent("""
        from threading import Timer
        endless = mapped(lambda v: lax.while_loop(
            lambda c: lax.psum(c, "x").sum() >= 0, lambda c: lax.psum(c, "x") * 0, v), P("x"))
        running = endless(x)
        Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            running.block_until_ready()
        except KeyboardInterrupt:
            print("interrupted")
        after = psum(x)  # behind it, and begun after the interrupt
        print(np.array_equal(np.asarray(after), np.asarray(x).sum(0, keepdims=True)))
        try:
            running.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            print("CANCELLED" in str(error), "STRETTO_GRACE" in str(error))
        """),
        devices=4,
    )
    assert out.split() == ["interrupted", "True", "True", "True"]


def test_a_loop_without_collectives_on_several_devices_is_left() -> None:
    """XLA takes it for cheap, and runs it in the thread that calls: that must not be the main one."""
    out = passes(
        "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        + PRELUDE
        + textwrap.dedent("""
        from threading import Timer
        endless = mapped(
            lambda v: lax.while_loop(lambda c: c.sum() >= 0, lambda c: jnp.abs(jnp.tanh(c)), v), P("x")
        ).lower(x).compile()
        Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            endless(x).block_until_ready()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        os._exit(0)
        """),
        devices=8,
    )
    assert out.split() == ["interrupted"]
