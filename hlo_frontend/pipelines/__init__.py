"""Interleaving: a pipeline in which every device has several chunks of layers, from one in which it has one.

`apply` finds loops in which microbatches go once through the devices, each of which runs a loop over its own
layers, and rewrites them so that they go round R times, through 1/R of the layers each time: the pipeline
fills and drains R times as fast. That the loop is such a pipeline is proved (`recognize`), by the same
analysis that proves which transfers are read (`passes.valid`); a loop for which it is not stays as it is
written, with the reason.
"""

from .driver import Interleaved, apply

__all__ = ["Interleaved", "apply"]
