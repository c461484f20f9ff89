"""One rank of `test_joined`: the rank of the number given is killed, the others wait for it and tell."""

from __future__ import annotations

import os
import signal
import sys

from support.shield import behind_a_shield

behind_a_shield(__file__, *sys.argv[1:])

import jax  # noqa: E402
import numpy as np  # noqa: E402

mesh = jax.make_mesh((2,), ("x",))
total = jax.jit(
    jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
)
try:
    total(np.ones(3)).block_until_ready()  # later runs compile nothing
    if jax.process_index() == int(sys.argv[1]):
        # Maybe before the other one has read what this one sent.
        os.kill(os.getpid(), signal.SIGKILL)
    total(np.ones(3)).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    print("caught", "died" in str(error), flush=True)
