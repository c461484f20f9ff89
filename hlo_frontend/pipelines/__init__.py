"""Interleaving: a pipeline in which every device has several chunks of layers, from one in which it has one.

`interleave` finds loops in which microbatches go once through the devices, each of which runs a loop over its
own layers, and rewrites them so that they go round R times, through 1/R of the layers each time: the pipeline
fills and drains R times as fast. That the loop is such a pipeline is proved (`recognize`), by the same
analysis that proves which transfers are read (`passes.valid`); a loop for which it is not stays as it is
written, with the reason.

The package is optional, and `interleave` is all that the rest of stretto knows of it: a serialized module in,
one out, with an `Interleaved` for each loop. `compile` imports it where more than one chunk is asked for.
"""

from .driver import interleave as interleave
