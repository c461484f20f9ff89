# Rows of a trace, appended without Python objects: what `stretto.runtime.recording.rows` defines. Part of `_capi`.
#
# Threads take turns by the GIL: what happens between two calls of Python is not interrupted. The engine's
# `is_ready` and the end of an array are such calls, behind which all is looked at again.

include "_clock.pxi"

cdef enum:
    ROW = 7
    # Bytes of a chunk, the first since rows were taken and others. Multiples of both records' sizes.
    SMALL = 28 * 1008
    LARGE = 260 * 1008
    KEPT = 8  # large chunks

cdef packed struct call_t:
    uint32_t program
    uint16_t segment
    uint16_t ordinal
    double begin
    double end

assert sizeof(call_t) == _trace_file.CALL.size and 1008 % (ROW * sizeof(double)) == 1008 % sizeof(call_t) == 0

cdef double SEGMENT = _trace_file.Kind.SEGMENT
cdef double LEFT_OUT = _trace_file.Kind.LEFT_OUT
cdef double COLLECTIVE = _trace_file.Kind.COLLECTIVE
cdef double AWAITED = _trace_file.Kind.AWAITED
cdef double PROGRAM = _trace_file.Kind.PROGRAM
cdef int64_t SET_UNIT = _trace_file.SET_UNIT
cdef double ALL_ACTIVE = _trace_file.ALL_ACTIVE
cdef int64_t EXACT = _rows.EXACT
cdef int64_t EVERY = _rows.EVERY


cdef struct running_t:
    double program
    double segment
    double began
    PyObject* output  # a reference; None if it has none


cdef struct queue_t:
    running_t* ring
    uint64_t capacity  # a power of two
    uint64_t ended  # how many segments have, on this device
    uint64_t handed  # and how many were handed over
    double looked


cdef inline bint is_watched(int64_t stops, int64_t index) noexcept:
    return stops < EXACT or (stops + index) % EVERY == 0


@cython.final
cdef class Chunks:
    """Records of one size as they come, one after the other.

    Chunks of memory are used again: a large allocation has glibc tidy up after thousands of small ones.
    """

    cdef bytearray chunk
    cdef char* data
    cdef size_t used
    cdef size_t size
    cdef list full
    cdef list unused

    def __cinit__(self):
        self.full, self.unused = [], []
        self.begin(bytearray(SMALL))

    cdef int begin(self, bytearray chunk) except -1:
        self.chunk, self.data = chunk, PyByteArray_AS_STRING(chunk)
        self.used, self.size = 0, PyByteArray_GET_SIZE(chunk)
        return 0

    cdef inline void* room(self, size_t size) except NULL:
        """For another record, of this size."""
        cdef void* place
        if self.used == self.size:
            self.go_on()
        place = self.data + self.used
        self.used += size
        return place

    cdef int go_on(self) except -1:
        cdef bytearray chunk = self.unused.pop() if self.unused else bytearray(LARGE)
        self.full.append(self.chunk)
        self.begin(chunk)
        return 0

    cdef list take(self):
        """The chunks since the last call as views, to be given back to `reuse`."""
        cdef list full, empty = []
        cdef bytearray last, chunk
        cdef size_t used
        if not self.used and not self.full:
            return empty
        chunk = self.unused.pop() if self.unused else bytearray(SMALL)
        full, self.full, last, used = self.full, empty, self.chunk, self.used
        self.begin(chunk)
        full = [memoryview(chunk) for chunk in full]
        full.append(memoryview(last)[:used])
        return full

    cdef int reuse(self, list views) except -1:
        for view in views:
            self.unused.append(view.obj)
            view.release()
        del self.unused[:-KEPT]
        return 0


@cython.final
cdef class Rows:
    """See `stretto.runtime.recording.rows.Rows`."""

    cdef object is_ready
    cdef object watch
    cdef object number_of
    cdef object clock
    cdef double least
    cdef dict walks
    cdef int64_t moving
    cdef bint standing
    cdef size_t num_devices
    cdef queue_t* queues
    cdef uint64_t running  # on all devices
    cdef PyThread_type_lock settling
    cdef Py_ssize_t blocking_device
    cdef uint64_t blocking
    cdef clock_t counted
    cdef Chunks events
    cdef Chunks calls

    def __cinit__(self, is_ready, size_t local_devices, watch, number_of, double least=_rows.LEAST, clock=None):
        self.is_ready, self.watch, self.number_of, self.least = is_ready, watch, number_of, least
        self.walks, self.events, self.calls = {}, Chunks(), Chunks()
        self.blocking_device = -1
        self.settling = PyThread_allocate_lock()
        self.queues = <queue_t*>malloc((local_devices + 1) * sizeof(queue_t))
        if self.queues == NULL or self.settling == NULL:
            raise MemoryError
        memset(self.queues, 0, (local_devices + 1) * sizeof(queue_t))
        self.num_devices = local_devices
        if clock is None:
            before, read, after = _perf_counter(), monotonic(), _perf_counter()
            clock = None if before <= read <= after else _perf_counter
            self.counted.counted = has_counter()
        self.clock = clock

    def __dealloc__(self):
        cdef size_t i
        cdef queue_t* queue
        for i in range(self.num_devices):
            queue = &self.queues[i]
            while queue.ended != queue.handed:
                Py_DECREF(<object>queue.ring[queue.ended & (queue.capacity - 1)].output)
                queue.ended += 1
            free(queue.ring)
        free(self.queues)
        if self.settling != NULL:
            PyThread_free_lock(self.settling)

    cdef inline double now(self) except? -1.0:
        return clock_now(&self.counted) if self.clock is None else self.clock()

    cdef inline int put(
        self, double kind, double program, double number, double where, double begin, double end, double extra
    ) except -1:
        cdef double* row = <double*>self.events.room(ROW * sizeof(double))
        row[0], row[1], row[2], row[3], row[4], row[5], row[6] = kind, program, number, where, begin, end, extra
        return 0

    cdef inline int put_call(self, double program, double segment, size_t ordinal, double begin) except -1:
        cdef double end = self.now()
        cdef call_t* call = <call_t*>self.calls.room(sizeof(call_t))
        call.program, call.segment, call.ordinal = <uint32_t><int64_t>program, <uint16_t>segment, <uint16_t>ordinal
        call.begin, call.end = begin, end
        return 0

    def drain(self, write):
        cdef list events = self.events.take(), calls = self.calls.take()
        try:
            if events or calls:
                write(events, calls)
        finally:
            self.events.reuse(events)
            self.calls.reuse(calls)

    def take(self):
        cdef list taken = [b"", b""]

        def keep(events, calls):
            taken[0], taken[1] = b"".join(events), b"".join(calls)

        self.drain(keep)
        return tuple(taken)

    def program(self, double number):
        return ProgramRows(self, number)

    def segment(self, ProgramRows program not None, double index, Py_ssize_t smallest):
        return SegmentRows(self, program, index, smallest)

    def collective(self, double program, int64_t index, double stream, Py_ssize_t local):
        return CollectiveRows(self, program, index, stream, local)

    cdef queue_t* queue(self, size_t ordinal) except NULL:
        if ordinal >= self.num_devices:
            raise IndexError(f"device {ordinal} of {self.num_devices}")
        return &self.queues[ordinal]

    def last(self, size_t ordinal):
        cdef queue_t* queue = self.queue(ordinal)
        if queue.ended == queue.handed:
            return None
        output = <object>queue.ring[(queue.handed - 1) & (queue.capacity - 1)].output
        return queue.handed - 1, output

    def block_on(self, Py_ssize_t ordinal, uint64_t number):
        self.blocking_device, self.blocking = ordinal, number

    def settle(self, size_t ordinal, int64_t ended=-1):
        self.queue(ordinal)
        self.settle_device(ordinal, ended + 1, False, True)

    cdef int look(self, bint exact) except -1:
        cdef size_t i
        for i in range(self.num_devices):
            if self.queues[i].ended != self.queues[i].handed:
                self.settle_device(i, 0, exact, False)
        return 0

    cdef int settle_device(self, size_t ordinal, uint64_t known, bint exact, bint patient) except -1:
        """``known``: how many are known to have ended."""
        cdef queue_t* queue = &self.queues[ordinal]
        cdef running_t last
        cdef double now, looked
        cdef object output
        cdef bint found = False
        if not PyThread_acquire_lock(self.settling, NOWAIT_LOCK):
            if not patient:
                return 0
            with nogil:
                PyThread_acquire_lock(self.settling, WAIT_LOCK)
        try:
            now = self.now()
            while queue.ended != queue.handed:
                output = <object>queue.ring[queue.ended & (queue.capacity - 1)].output
                if queue.ended >= known and not self.has_ended(output):
                    break
                if found:
                    self.put(SEGMENT, last.program, last.segment, ordinal, last.began, NAN, 0.0)
                last = queue.ring[queue.ended & (queue.capacity - 1)]
                queue.ended += 1
                self.running -= 1
                found = True
                Py_DECREF(<object>last.output)
                output = None
            looked, queue.looked = queue.looked, now
            if found:
                if exact or (self.blocking_device == <Py_ssize_t>ordinal and self.blocking == queue.ended - 1):
                    looked = now
                elif looked < last.began:
                    looked = last.began
                self.put(SEGMENT, last.program, last.segment, ordinal, last.began, now, now - looked)
        finally:
            PyThread_release_lock(self.settling)
        return 0

    cdef bint has_ended(self, output) except -1:
        if output is None:
            return True
        try:
            return self.is_ready(output)
        except Exception:  # donated meanwhile
            return True

    cdef int begin(self, double program, double segment, size_t ordinal, double began, output) except -1:
        """A segment was handed over."""
        cdef queue_t* queue = self.queue(ordinal)
        cdef running_t* at
        if queue.ended != queue.handed and began - queue.looked > self.least:
            self.settle_device(ordinal, 0, False, False)
        if queue.handed - queue.ended == queue.capacity and not self.grow(queue):
            raise MemoryError
        at = &queue.ring[queue.handed & (queue.capacity - 1)]
        at.program, at.segment, at.began, at.output = program, segment, began, <PyObject*>output
        Py_INCREF(output)
        queue.handed += 1
        self.running += 1
        return 0

    cdef bint grow(self, queue_t* queue) noexcept:
        cdef uint64_t i, capacity = 2 * queue.capacity if queue.capacity else 16
        cdef running_t* ring = <running_t*>malloc(capacity * sizeof(running_t))
        if ring == NULL:
            return False
        for i in range(queue.ended, queue.handed):
            ring[i & (capacity - 1)] = queue.ring[i & (queue.capacity - 1)]
        free(queue.ring)
        queue.ring, queue.capacity = ring, capacity
        return True


@cython.final
cdef class ProgramRows:
    cdef Rows rows
    cdef double number
    cdef int64_t stops
    # Of the run that was begun first and has not ended: `Rows.walks` has the others.
    cdef int64_t run
    cdef double begun

    def __cinit__(self, Rows rows not None, double number):
        self.rows, self.number, self.stops, self.run = rows, number, 0, -1

    @cython.binding(False)
    def started(self, int64_t run):
        if self.run < 0:
            self.run, self.begun = run, self.rows.now()
        else:
            self.rows.walks[run] = self.rows.now()

    @cython.binding(False)
    def finished(self, int64_t run, error):
        cdef double now = self.rows.now(), begun
        if self.run == run:
            begun, self.run = self.begun, -1
        else:
            begun = self.rows.walks.pop(run, now)
        self.rows.put(PROGRAM, self.number, run, 0.0, begun, now, error is not None)
        self.ends()

    cdef int ends(self) except -1:
        cdef int64_t stops
        if self.rows.running:
            self.rows.look(False)
            stops, self.stops = self.stops, self.stops + 1
            if is_watched(stops, 0):
                self.rows.watch()
        return 0


@cython.final
cdef class SegmentRows:
    cdef Rows rows
    cdef ProgramRows program
    cdef double index
    cdef Py_ssize_t smallest

    def __cinit__(self, Rows rows not None, ProgramRows program not None, double index, Py_ssize_t smallest):
        self.rows, self.program, self.index, self.smallest = rows, program, index, smallest

    cdef inline int handed_at(self, size_t ordinal, double began, outputs) except -1:
        return self.rows.begin(
            self.program.number, self.index, ordinal, began, outputs[self.smallest] if outputs else None
        )

    cdef bint called_at(self, next_run, size_t ordinal, double began, outputs) except -1:
        """Whether it is over. ``next_run`` is asked for the number of those that are not."""
        cdef Rows rows = self.rows
        cdef queue_t* queue = rows.queue(ordinal)
        cdef double number = self.program.number
        if queue.ended == queue.handed and (not outputs or rows.has_ended(outputs[self.smallest])):
            rows.put_call(number, self.index, ordinal, began)
            return True
        self.handed_at(ordinal, began, outputs)
        rows.put(PROGRAM, number, next_run(), 1.0, began, rows.now(), 0.0)
        self.program.ends()
        return False

    @cython.binding(False)
    def handed(self, size_t ordinal, double began, outputs):
        self.handed_at(ordinal, began, outputs)

    @cython.binding(False)
    def ran(self, double ordinal, double began, double ended):
        self.rows.put(SEGMENT, self.program.number, self.index, ordinal, began, ended, 0.0)

    @cython.binding(False)
    def left_out(self, double ordinal):
        cdef double now = self.rows.now()
        self.rows.put(LEFT_OUT, self.program.number, self.index, ordinal, now, now, 0.0)

    @cython.binding(False)
    def called(self, run, size_t ordinal, double began, outputs):
        self.called_at(lambda: run, ordinal, began, outputs)

    def around_run(self, run):
        return WatchedRun(self, run).run

    def around_call(self, run, next_run):
        return WatchedCall(self, run, next_run)


@cython.final
cdef class WatchedRun:
    """A segment's ``run``, every call of which is told."""

    cdef SegmentRows rows
    cdef object inner

    def __cinit__(self, SegmentRows rows not None, inner):
        self.rows, self.inner = rows, inner

    @cython.binding(False)
    def run(self, ordinal, arrays):
        cdef double began = self.rows.rows.now()
        cdef object outputs = self.inner(ordinal, arrays)
        self.rows.handed_at(ordinal, began, outputs)
        return outputs


@cython.final
cdef class WatchedCall:
    """The ``run`` of a segment that is all of its program, every call of which is told."""

    cdef SegmentRows rows
    cdef object inner
    cdef object next_run

    def __cinit__(self, SegmentRows rows not None, inner, next_run):
        self.rows, self.inner, self.next_run = rows, inner, next_run

    def __call__(self, ordinal, arrays):
        cdef bint over = False
        return self.call(ordinal, arrays, &over)

    cdef object call(self, ordinal, arrays, bint* over):
        """``over`` is set if the outputs are known to be computed, or to have failed."""
        cdef double began = self.rows.rows.now()
        cdef object outputs
        try:
            outputs = self.inner(ordinal, arrays)
        except BaseException as error:
            number = self.next_run()
            self.rows.program.started(number)
            self.rows.program.finished(number, error)
            raise
        over[0] = self.rows.called_at(self.next_run, ordinal, began, outputs)
        return outputs


@cython.final
cdef class CollectiveRows:
    cdef Rows rows
    cdef double program
    cdef int64_t index
    cdef double stream
    cdef Py_ssize_t local
    cdef bint moving
    cdef int64_t stops

    def __cinit__(self, Rows rows not None, double program, int64_t index, double stream, Py_ssize_t local):
        self.rows, self.program, self.index, self.stream, self.local = rows, program, index, stream, local
        self.moving, self.stops = False, 0

    @cython.binding(False)
    def started(self):
        cdef Rows rows = self.rows
        if not self.moving:
            self.moving = True
            rows.moving += 1
        if rows.running:
            rows.look(True)
            if rows.standing:
                rows.watch()

    @cython.binding(False)
    def ran(self, double began, active, skip, ended=None):
        cdef Rows rows = self.rows
        cdef double extra = ALL_ACTIVE, now = rows.now() if ended is None else ended
        if self.moving:
            self.moving = False
            rows.moving -= 1
        if len(active) != self.local:
            extra = sum([1 << p for p in active]) % SET_UNIT
        if skip:
            extra += SET_UNIT * (1.0 + rows.number_of(skip))
        rows.put(COLLECTIVE, self.program, self.index, self.stream, began, now, extra)

    @cython.binding(False)
    def awaiting(self):
        cdef Rows rows = self.rows
        cdef int64_t stops
        if rows.running:
            stops, self.stops = self.stops, self.stops + 1
            if is_watched(stops, self.index):
                rows.standing = True
                if rows.moving:
                    rows.look(False)
                    rows.watch()

    @cython.binding(False)
    def awaited(self, double queued, double began):
        cdef Rows rows = self.rows
        cdef double now = rows.now()
        rows.standing = False
        rows.put(AWAITED, self.program, self.index, self.stream, began, now, began - queued)
        if now - began > rows.least and rows.running:
            rows.look(False)
