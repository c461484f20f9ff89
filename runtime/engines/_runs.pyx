# cython: language_level=3, boundscheck=False, wraparound=False
"""The run of a segment on one device, as C calls it: a frame of Python's would take as long as a small part of it."""

cimport cython


cdef class Runs:
    """Runs executables of jaxlib, whose names `tests/runtime/test_engines.py` pins.

    ``_by_device``: the executable of each device, None where it is not loaded. ``_handlers``: what makes arrays of
    its results. The subclass loads (``_load(ordinal)``) and tells errors (``_tell(error)`` raises another one).
    """

    cdef public list _by_device
    cdef public list _handlers

    @cython.binding(False)
    def run(self, ordinal, list inputs):
        """Results on a device. See `stretto.runtime.engines.engine.LoadedSegment`."""
        executable = self._by_device[ordinal]
        if executable is None:
            executable = self._load(ordinal)
        try:
            return executable.execute_sharded(inputs).consume_with_handlers(self._handlers[ordinal])
        except Exception as error:
            self._tell(error)
            raise
