"""Interleaving: rewrites pipelines so that every device has several chunks of layers instead of one.

`interleave` finds loops in which microbatches go once through the devices, each of which runs a loop over its
own layers. It rewrites them so that microbatches go round R times, through 1/R of the layers each time: the
pipeline fills and drains R times as fast. Before that, it proves that the loop is such a pipeline
(`recognize`), by the same analysis that proves which transfers are read (`passes.valid`). A loop without that
proof stays as it is written, and the reason is reported.

The package is optional, and `interleave` is its only entry: it takes a serialized module, and gives another
one with an `Interleaved` for each loop. `compile` imports it only if more than one chunk is asked for.
"""

from .driver import interleave as interleave
from .driver import scheduled as scheduled
