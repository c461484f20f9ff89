# cython: language_level=3
"""Functions of the CUDA driver that enqueue or ask, called by their addresses: lists of calls at once.

`ctypes` takes about a microsecond for a call, and a collective needs ten of them on the walk's thread. All let go of
the GIL: a call waits where a stream's queue is full, and for another thread that loads code or takes memory, which may
wait for all streams; what these wait for may need Python. A list of calls lets go of it once, so other threads take it
once.
"""

from libc.stdint cimport uint32_t, uintptr_t

# What a call of a list begins with; then its arguments, in this order:
RECORD = 0  # event, stream
WAIT = 1  # stream, event
COPY = 2  # target, source, bytes, stream
WRITE_NUMBER = 3  # stream, address, number

cdef enum:
    MOST = 64

ctypedef int (*asks)(uintptr_t) noexcept nogil
ctypedef int (*records)(uintptr_t, uintptr_t) noexcept nogil
ctypedef int (*waits)(uintptr_t, uintptr_t, unsigned int) noexcept nogil
ctypedef int (*copies)(uintptr_t, uintptr_t, size_t, uintptr_t) noexcept nogil
ctypedef int (*writes_number)(uintptr_t, uintptr_t, uint32_t, unsigned int) noexcept nogil

cdef struct call_t:
    int kind
    uintptr_t first, second, third, fourth


cdef class Calls:
    """The functions, by their addresses, in the order of ``NAMES``. All of them give the driver's error code."""

    NAMES = (
        "cuCtxSetCurrent",
        "cuEventQuery",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyAsync",
        "cuStreamWriteValue32_v2",
    )
    # Of the kinds of calls, in the order of their numbers.
    KINDS = NAMES[2:]

    cdef asks _set_current, _query
    cdef records _record
    cdef waits _wait
    cdef copies _copy
    cdef writes_number _write_number

    def __init__(self, uintptr_t set_current, uintptr_t query, uintptr_t record, uintptr_t wait, uintptr_t copy,
                 uintptr_t write_number):
        self._set_current = <asks>set_current
        self._query = <asks>query
        self._record = <records>record
        self._wait = <waits>wait
        self._copy = <copies>copy
        self._write_number = <writes_number>write_number

    def set_current(self, uintptr_t context) -> int:
        cdef int error
        with nogil:
            error = self._set_current(context)
        return error

    def query(self, uintptr_t event) -> int:
        cdef int error
        with nogil:
            error = self._query(event)
        return error

    def run(self, uintptr_t context, list calls):
        """Make calls about a context, in their order. None, or the kind and the error of the first that failed:
        what follows it is not called."""
        cdef call_t many[MOST]
        cdef int error = 0, filled = 0, done = 0
        cdef tuple one
        for one in calls:
            many[filled].kind = one[0]
            many[filled].first = one[1]
            many[filled].second = one[2]
            if many[filled].kind >= 2:
                many[filled].third = one[3]
                if many[filled].kind == 2:
                    many[filled].fourth = one[4]
            filled += 1
            if filled == MOST:
                with nogil:
                    done = self._make(context, many, filled, &error)
                if error:
                    return (many[done].kind if done >= 0 else -1), error
                filled = 0
        with nogil:
            done = self._make(context, many, filled, &error)
        if error:
            return (many[done].kind if done >= 0 else -1), error
        return None

    cdef int _make(self, uintptr_t context, call_t* calls, int count, int* error) noexcept nogil:
        """Gives the number of the one that failed, -1 for the context, if ``error`` says that one has."""
        cdef int k
        cdef call_t* c
        if context:
            error[0] = self._set_current(context)
            if error[0]:
                return -1
        for k in range(count):
            c = calls + k
            if c.kind == 0:
                error[0] = self._record(c.first, c.second)
            elif c.kind == 1:
                error[0] = self._wait(c.first, c.second, 0)
            elif c.kind == 2:
                error[0] = self._copy(c.first, c.second, c.third, c.fourth)
            else:
                error[0] = self._write_number(c.first, c.second, <uint32_t>c.third, 0)
            if error[0]:
                return k
        return 0
