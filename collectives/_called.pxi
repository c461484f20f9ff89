# Collectives that code on a GPU calls itself: the handler behind the custom calls of a `Called`'s sites. XLA calls it
# on the host, on whatever thread puts the device's code onto its stream; it puts the collective onto the same stream,
# and is back when it is there. So the GPU keeps the order, and the host waits only for what the code itself reads, as
# a loop does that ends by what it computes.
#
# Context and operands are in the GPU's memory, where a handler cannot look: a run is found by `current`. One process
# has one device that runs such code, and one run of it at a time (`Gpus.lock`).

cdef enum:
    # Where a place is: at an address, in an operand or a result of the call. Python has it in bits 60 and above.
    _AT = 0
    _OPERAND = 1
    _RESULT = 2
    _END_SITE = -1
    _NOT_READY = 600  # CUDA_ERROR_NOT_READY
    _ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE

# What is done before and behind NCCL's calls. A copy is of rows, the pitches are from row to row.
CLEARS = 0
COPIES = 1

cdef extern from *:
    """
    typedef struct {  /* CUDA_MEMCPY2D */
        size_t source_x, source_y; int source_kind; void* source_host; uintptr_t source; void* source_array;
        size_t source_pitch, target_x, target_y; int target_kind; void* target_host; uintptr_t target;
        void* target_array; size_t target_pitch, width, height;
    } rows_t;
    """
    ctypedef struct rows_t:
        int source_kind, target_kind
        uintptr_t source, target
        size_t source_pitch, target_pitch, width, height

ctypedef int (*clears)(uintptr_t, unsigned char, size_t, uintptr_t) noexcept nogil
ctypedef int (*copies)(uintptr_t, uintptr_t, size_t, uintptr_t) noexcept nogil
ctypedef int (*copies_rows)(rows_t*, uintptr_t) noexcept nogil
ctypedef int (*records)(uintptr_t, uintptr_t) noexcept nogil
ctypedef int (*about_one)(uintptr_t) noexcept nogil

cdef struct place_t:
    int where, index
    uintptr_t offset

cdef struct step_t:
    int kind
    place_t target, source
    size_t target_pitch, source_pitch, width, height

cdef struct part_t:
    call_t call  # but for its addresses, its stream and its context
    place_t source, target

cdef struct called_site_t:
    int num_before, num_parts, num_after
    step_t* before
    step_t* after
    part_t* parts
    int64_t calls
    char* name

cdef struct called_row_t:
    int32_t site
    double began, ended

cdef struct called_t:
    launches_t* launches
    uintptr_t context, event, stream
    clears clear
    copies copy
    copies_rows copy_rows
    records record
    about_one query, synchronize
    called_site_t* sites
    int num_sites
    int ended, calling, failed
    int site  # the last one called, and when it was
    double began, seconds
    int64_t executed
    char failure[1024]
    called_row_t* rows  # NULL unless somebody watches
    int64_t capacity, num_rows, dropped

cdef called_t* current = NULL
cdef double FOREVER = 1e300  # seconds
cdef uintptr_t found = 0  # the stream of the last run of `tells_stream`


cdef void* stream_of(ffi_frame* frame, uintptr_t* stream) noexcept nogil:
    """The stream on which the code that calls runs. Gives XLA's error, or NULL."""
    cdef ffi_stream_args args
    cdef void* error
    args.size, args.next, args.context, args.stream = sizeof(args), NULL, frame.context, NULL
    error = frame.api.stream_get(&args)
    stream[0] = <uintptr_t>args.stream
    return error


cdef void* tells_stream(ffi_frame* frame) noexcept nogil:
    """The handler of a custom call that only tells its stream."""
    if is_question(frame) or frame.stage != FFI_STAGE_EXECUTE:
        return NULL
    return stream_of(frame, &found)


def stream_handler() -> object:
    """The address of a handler that keeps the stream on which it is called, for `stream_found`; as `handler`."""
    return PyCapsule_New(<void*>&tells_stream, NULL, NULL)


def stream_found() -> int:
    """The stream that was kept last; 0 if none was, since this was asked last."""
    global found
    cdef uintptr_t stream = found
    found = 0
    return stream


cdef uintptr_t address_of(place_t* place, ffi_frame* frame) noexcept nogil:
    if place.where == _OPERAND:  # behind the context and the chain
        return <uintptr_t>(<ffi_buffer*>frame.arguments.items[2 + place.index]).data + place.offset
    if place.where == _RESULT:  # behind the chain
        return <uintptr_t>(<ffi_buffer*>frame.results.items[1 + place.index]).data + place.offset
    return place.offset


cdef void fails(called_t* run, const char* text) noexcept nogil:
    """The run fails by this; the first reason counts."""
    if launches_take(&run.failed, 0, 1):
        snprintf(run.failure, sizeof(run.failure), b"%s", text)
        launches_be(&run.failed, 2)


cdef void* failed(called_t* run, ffi_frame* frame) noexcept nogil:
    if launches_state(&run.failed) == 2:
        return new_error(frame.api, run.failure)
    return new_error(frame.api, b"the job has failed")


cdef bint take_steps(called_t* run, step_t* steps, int count, uintptr_t stream, ffi_frame* frame) noexcept nogil:
    """Put copies onto the stream. Whether all went well."""
    cdef int k, error
    cdef step_t* step
    cdef rows_t rows
    cdef char text[200]
    for k in range(count):
        step = &steps[k]
        if step.kind == 0:
            error = run.clear(address_of(&step.target, frame), 0, step.width, stream)
        elif step.height == 1:
            error = run.copy(address_of(&step.target, frame), address_of(&step.source, frame), step.width, stream)
        else:
            memset(&rows, 0, sizeof(rows))
            rows.source_kind = rows.target_kind = _ON_DEVICE
            rows.source, rows.target = address_of(&step.source, frame), address_of(&step.target, frame)
            rows.source_pitch, rows.target_pitch = step.source_pitch, step.target_pitch
            rows.width, rows.height = step.width, step.height
            error = run.copy_rows(&rows, stream)
        if error:
            snprintf(text, sizeof(text), b"%s: CUDA's error %d in a copy", run.sites[run.site].name, error)
            fails(run, text)
            return False
    return True


cdef bint call_parts(called_t* run, called_site_t* site, uintptr_t stream, ffi_frame* frame) noexcept nogil:
    """Call NCCL and wait until it has put the collective onto the stream. Whether it has."""
    cdef launches_t* l = run.launches
    cdef int k
    cdef call_t* c
    cdef char text[200]
    if not site.num_parts:
        return True
    if not has_room(l, site.num_parts):
        fails(run, b"no memory for calls of NCCL")
        return False
    for k in range(site.num_parts):
        c = &l.calls[k]
        c[0] = site.parts[k].call
        c.context, c.stream = run.context, stream
        c.source = address_of(&site.parts[k].source, frame)
        c.target = address_of(&site.parts[k].target, frame)
    begin(l, site.num_parts, _BEGUN)
    launch(l)
    await_settled(l, FOREVER)  # once the communicators are given up, it is settled
    if l.failed != _NOTHING:
        snprintf(text, sizeof(text), b"%s: NCCL's error %d", site.name, l.error)
        fails(run, text)
    return launches_state(&run.failed) == 0 and not launches_state(&l.stopped)


cdef void* called_by_code(ffi_frame* frame) noexcept nogil:
    """The handler. Arguments: the context, the chain, the operands. Results: the chain, the results."""
    cdef called_t* run = current
    cdef called_site_t* site
    cdef called_row_t* row
    cdef uintptr_t stream
    cdef void* error
    cdef int64_t number
    cdef bint went_well
    if is_question(frame) or frame.stage != FFI_STAGE_EXECUTE:
        return NULL
    if run == NULL:
        return new_error(frame.api, b"code that calls collectives runs without its program")
    number = (<int64_t*>(<ffi_scalar*>frame.attributes.items[0]).value)[0]
    if number == _END_SITE:
        launches_be(&run.ended, 1)
        return NULL
    if launches_state(&run.failed) or launches_state(&run.launches.stopped):
        return failed(run, frame)
    stream = run.stream
    if stream == 0:
        error = stream_of(frame, &stream)
        if error != NULL:
            return error
    site = &run.sites[number]
    run.site, run.began = <int>number, now()
    launches_be(&run.calling, 1)
    run.executed += 1
    site.calls += 1
    run.launches.use(run.context)
    went_well = (
        take_steps(run, site.before, site.num_before, stream, frame)
        and call_parts(run, site, stream, frame)
        and take_steps(run, site.after, site.num_after, stream, frame)
    )
    if went_well:
        run.record(run.event, stream)
        if run.stream:  # the code runs on the host, and reads the results
            run.synchronize(stream)
    launches_be(&run.calling, 0)
    run.seconds += now() - run.began
    if run.rows != NULL:
        if run.num_rows < run.capacity:
            row = &run.rows[run.num_rows]
            row.site, row.began, row.ended = <int32_t>number, run.began, now()
            run.num_rows += 1
        else:
            run.dropped += 1
    return NULL if went_well else failed(run, frame)


def handler() -> object:
    """The handler's address in a capsule, as ``register_custom_call_target`` of jax's CUDA plugin takes it."""
    return PyCapsule_New(<void*>&called_by_code, NULL, NULL)


cdef class Called:
    """The sites of one region of a program, on the one device of this process, as `_native.Table` is of devices
    whose memory is the host's.

    ``functions``: addresses of the driver's, in the order of ``NAMES``. ``context``, ``event``: CUDA's, of the
    device. ``stream``: where the code runs on the host, the stream on which its collectives go, awaited each; 0: XLA
    says on which stream it runs.
    """

    NAMES = (
        "cuMemsetD8Async",
        "cuMemcpyAsync",
        "cuMemcpy2DAsync_v2",
        "cuEventRecord",
        "cuEventQuery",
        "cuStreamSynchronize",
    )

    cdef called_t run
    cdef Launches _launches
    cdef list _names

    def __cinit__(self, Launches launches, list functions, uintptr_t context, uintptr_t event, uintptr_t stream=0):
        memset(&self.run, 0, sizeof(self.run))
        self._launches, self._names = launches, []
        self.run.launches = launches._all
        self.run.context, self.run.event, self.run.stream = context, event, stream
        self.run.clear = <clears><uintptr_t>functions[0]
        self.run.copy = <copies><uintptr_t>functions[1]
        self.run.copy_rows = <copies_rows><uintptr_t>functions[2]
        self.run.record = <records><uintptr_t>functions[3]
        self.run.query = <about_one><uintptr_t>functions[4]
        self.run.synchronize = <about_one><uintptr_t>functions[5]

    def add(self, list before, list calls, list after, str name) -> None:
        """Describe the next site. ``before``, ``after``: ``(CLEARS, target, bytes)``, or ``(COPIES, target, its pitch,
        source, its pitch, width, height)``. ``calls``: as of `Launches.put`, without the stream. Addresses are
        those of `place`. ``name``: for messages."""
        cdef called_t* run = &self.run
        cdef called_site_t* site
        cdef called_site_t* sites = <called_site_t*>calloc(run.num_sites + 1, sizeof(called_site_t))
        cdef part_t* part
        memcpy(sites, run.sites, run.num_sites * sizeof(called_site_t))
        free(run.sites)
        run.sites = sites
        site = &sites[run.num_sites]
        run.num_sites += 1
        site.before, site.num_before = self._steps(before), len(before)
        site.after, site.num_after = self._steps(after), len(after)
        site.parts, site.num_parts = <part_t*>calloc(len(calls) + 1, sizeof(part_t)), len(calls)
        for k, (kind, source, target, count, dtype, which, communicator) in enumerate(calls):
            part = &site.parts[k]
            part.call.kind, part.call.count, part.call.dtype, part.call.which = kind, count, dtype, which
            part.call.communicator = communicator
            put_place(&part.source, source)
            put_place(&part.target, target)
        encoded = name.encode()
        self._names.append(encoded)
        site.name = <char*>encoded

    cdef step_t* _steps(self, list given):
        cdef step_t* steps = <step_t*>calloc(len(given) + 1, sizeof(step_t))
        for k, one in enumerate(given):
            steps[k].kind = one[0]
            if one[0] == CLEARS:
                _, target, width = one
                steps[k].width = width
            else:
                _, target, target_pitch, source, source_pitch, width, height = one
                put_place(&steps[k].source, source)
                steps[k].target_pitch, steps[k].source_pitch = target_pitch, source_pitch
                steps[k].width, steps[k].height = width, height
            put_place(&steps[k].target, target)
        return steps

    @property
    def address(self) -> int:
        """What stands for it in a context. Nobody reads it there."""
        return <uintptr_t>&self.run

    def begin(self, bint watched=False, double until=0.0) -> None:
        """The device is about to run, and no other code that calls collectives until `end`. ``watched``: rows are
        kept of what is called. ``until`` says nothing here: no run is in a hurry."""
        global current
        cdef called_t* run = &self.run
        run.failure[0] = 0
        run.ended = run.calling = run.failed = 0
        run.executed = run.num_rows = run.dropped = 0
        run.seconds = 0.0
        if watched and run.rows == NULL:
            run.capacity = 1 << 16
            run.rows = <called_row_t*>calloc(run.capacity, sizeof(called_row_t))
        elif not watched and run.rows != NULL:
            free(run.rows)
            run.rows = NULL
        for k in range(run.num_sites):
            run.sites[k].calls = 0
        current = run

    def end(self) -> None:
        """The device has called all that it calls, or will not."""
        global current
        if current == &self.run:
            current = NULL

    def wait(self, double seconds) -> bool:
        """Wait until all collectives are on the stream, or one has failed, for so long at most; whether it is so."""
        cdef called_t* run = &self.run
        cdef double until = now() + seconds
        cdef bint over
        with nogil:
            while True:
                over = launches_state(&run.ended) or launches_state(&run.failed) == 2
                if over or now() > until:
                    break
                stretto_sleep(5 * SHORTEST)
        return over

    @property
    def executed(self) -> int:
        """How many collectives were called since `begin`."""
        return self.run.executed

    @property
    def seconds(self) -> float:
        """How long it took to put them onto the stream."""
        return self.run.seconds

    def waiting(self) -> tuple | None:
        """The site that is under way on the GPU, and since when it was called on the clock of ``time.monotonic``."""
        cdef called_t* run = &self.run
        cdef int error = 0
        if not run.executed:
            return None
        if not launches_state(&run.calling):
            with nogil:
                error = run.query(run.event)
            if error != _NOT_READY:
                return None
        return run.site, run.began

    def calls(self) -> list:
        """For each site how often it was called since `begin`."""
        return [self.run.sites[k].calls for k in range(self.run.num_sites)]

    def rows(self) -> tuple:
        """``(site, group, began, ended)`` of each call, in seconds of ``perf_counter``: of putting it onto the stream;
        and how many were dropped."""
        cdef called_row_t* row
        listed = []
        for k in range(self.run.num_rows):
            row = &self.run.rows[k]
            listed.append((row.site, 0, row.began, row.ended))
        return listed, self.run.dropped

    def abort(self, str reason) -> None:
        """Have calls fail with this message, until the next `begin`."""
        cdef bytes message = reason.encode()
        fails(&self.run, message)

    @property
    def failure(self) -> str:
        """Why calls failed, empty if none did."""
        return self.run.failure.decode(errors="replace") if launches_state(&self.run.failed) == 2 else ""

    def __dealloc__(self):
        cdef called_t* run = &self.run
        self.end()
        for k in range(run.num_sites):
            free(run.sites[k].before)
            free(run.sites[k].after)
            free(run.sites[k].parts)
        free(run.sites)
        free(run.rows)


cdef void put_place(place_t* to, object address):
    to.where, to.index, to.offset = address >> 60, (address >> 44) & 0xFFFF, address & ((1 << 44) - 1)
    if to.where == _AT:
        to.offset = address


def place(bint result, int64_t index) -> int:
    """The address that stands for an operand or a result of a call, to which up to 16 TiB may be added."""
    return <int64_t>(2 if result else 1) << 60 | index << 44
