"""The stream of CUDA's on which XLA's client runs what it computes on a device.

jaxlib does not tell it. XLA tells it to custom calls: so a program of one custom call, whose function
only keeps it (`collectives/_called.pxi`), is run once on each device.
"""

from __future__ import annotations

from collections.abc import Callable

from stretto.collectives.called_on_gpus import stream_found, stream_handler

TARGET = "stretto_compute_stream"
MODULE = f"""module @stream {{
  func.func public @main() -> tensor<i32> {{
    %0 = stablehlo.custom_call @{TARGET}() {{api_version = 4 : i32, has_side_effect = true}}
        : () -> tensor<i32>
    return %0 : tensor<i32>
  }}
}}"""
handler = stream_handler


def find(run: Callable[[], object]) -> int:
    """The stream on which ``run()`` runs `MODULE`."""
    stream_found()
    run()
    stream = stream_found()
    assert stream, "XLA has not called it"
    return stream
