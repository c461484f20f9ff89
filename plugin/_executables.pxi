# Executables and running them. Part of `_capi`.

cdef struct executable_t:
    void* owner
    size_t num_replicas
    size_t num_partitions
    size_t num_outputs

cdef struct loaded_t:
    void* owner
    bint deleted


cdef class Executable(Handle):
    """What is known of a compiled program; its subclass in Python has the details."""

    cdef executable_t c

    def __cinit__(self, *args, **kwargs):
        self.c.owner = <void*>self
        self.c.num_replicas = self.c.num_partitions = self.c.num_outputs = 0
        self.pointer = &self.c

    def set_counts(self, size_t replicas, size_t partitions, size_t outputs):
        self.c.num_replicas, self.c.num_partitions, self.c.num_outputs = replicas, partitions, outputs


# Seconds for which a caller looks whether what it has begun is computed: what it takes to be told by other threads.
cdef double SOON = 150e-6
cdef size_t executables = 0  # that were made


cdef class LoadedExecutable(Handle):
    """A program ready to run on the local devices among its own; its subclass in Python has the details."""

    cdef loaded_t c
    cdef object run
    cdef object copy
    cdef object join
    cdef object single
    cdef object apart
    # What ``single`` takes, smoothed, and what is long: engines run in the thread that calls what they take for cheap.
    cdef double seconds
    cdef double long
    cdef unsigned char number  # in `waited`
    cdef size_t missed, rests  # how often in a row, and for how many calls yet: see `decide_to_look`
    cdef bint looks  # whether this call does
    cdef double until  # when it gives up; 0 while it has not begun
    cdef object engine
    cdef list output_types
    cdef list output_memories
    cdef tuple donated
    cdef bytearray donates  # by parameter, whether it is donated
    cdef bint consumes  # whether `single` would need what is donated to be its own
    cdef tuple devices
    cdef size_t num_parameters
    cdef bint has_callbacks
    cdef bint jax_arrays  # the engine's arrays are jaxlib's
    cdef bint on_host  # the engine computes in the host's memory
    cdef bint whole  # its runs end as a whole
    cdef bint cannot_fail  # its `single`, given arrays that are computed
    cdef bint alike  # what ``run`` gives a device
    cdef size_t smallest  # output, the cheapest to hold on to until the run is over

    def __cinit__(self, *args, **kwargs):
        self.c.owner = <void*>self
        self.c.deleted = False
        self.pointer = &self.c

    def prepare(
        self, run, copy, single, apart, engine, bint has_callbacks, size_t num_parameters,
        tuple donated not None, list output_types not None, list output_memories not None, tuple devices not None,
        bint cannot_fail=False, bint ends_as_one=False, join=None, bint consumes=True,
    ):
        """What `Execute` needs.

        ``run(arguments, awaited)`` takes for each parameter a list of values, one for each local device, or a promise of
        all of them, and gives a promise for each result, and an event that is set once the run has been issued (with
        callbacks: has called), or None. ``awaited``: whether what an earlier run gave was waited for.
        ``single(ordinal, arrays)`` is the engine's way to do the same for one device, with arrays that are
        there, or None. It may give None, which asks for ``run``, or
        `Issued`. ``cannot_fail``: a call of it gives no array with an error, if no argument has one, and only
        then. ``apart(single, rows)`` calls it for all devices, given the arrays of each, on several threads; or is None.
        ``ends_as_one``: what ``run`` gives a device is of one segment.
        ``join(type, arrays)`` makes a promise of the arrays that are given for a parameter, which spares later runs
        something; or is None.
        ``copy(value)`` copies a value; ``donated`` are the parameters that a run consumes; if not ``consumes``, `single`
        leaves them as they are, and they are deleted once it has been called;
        ``output_memories`` has a list for each of ``devices``, the local ones in the order of the arguments.
        """
        global executables
        self.run, self.copy, self.engine, self.num_parameters = run, copy, engine, num_parameters
        self.donated, self.devices, self.has_callbacks = donated, devices, has_callbacks
        self.consumes = consumes
        self.donates = bytearray(num_parameters)
        for i in donated:
            self.donates[i] = True
        self.jax_arrays = getattr(engine, "jax_arrays", False)
        self.on_host = getattr(engine, "host_memory", False)
        self.missed = self.rests = 0
        executables += 1
        self.number = executables & 255
        waited[self.number] = False  # what another one with this number gave
        self.cannot_fail = cannot_fail
        self.whole = self.jax_arrays or getattr(engine, "ends_as_one", False)
        self.alike = ends_as_one and self.whole
        self.apart, self.seconds, self.long = apart, 0.0, _compute.LONG
        self.join = join
        self.use_single(single)
        self.output_types, self.output_memories = output_types, output_memories
        self.smallest = 0
        for i in range(len(output_types)):
            if (<ArrayType>output_types[i]).nbytes <= (<ArrayType>output_types[self.smallest]).nbytes:
                self.smallest = i

    @property
    def is_deleted(self):
        return self.c.deleted

    def use_single(self, single):
        """Another ``single`` from now on, or none."""
        self.single = single if self.devices and not (self.donated and self.consumes) else None

    def delete(self):
        self.c.deleted = True
        self.run = self.single = None

    cdef bint may_donate(self, PJRT_ExecuteOptions* options, size_t parameter) noexcept:
        cdef const int64_t* kept
        cdef size_t i
        if options == NULL:
            return True
        kept = <const int64_t*>options.non_donatable_input_indices
        for i in range(options.num_non_donatable_input_indices):
            if kept[i] == <int64_t>parameter:
                return False
        return True

    cdef int check(self, PJRT_LoadedExecutable_Execute_Args* args) except -1:
        if self.c.deleted:
            raise ValueError("the executable has been deleted")
        if args.num_devices != <size_t>len(self.devices):
            raise ValueError(
                f"called with arguments for {args.num_devices} devices; "
                f"the program has {len(self.devices)} on this process"
            )
        if args.num_devices and args.num_args != self.num_parameters:
            raise ValueError(f"called with {args.num_args} arguments; it takes {self.num_parameters}")
        if args.execute_device != NULL and (
            len(self.devices) != 1 or (<Device>self.devices[0]).pointer != args.execute_device
        ):
            raise NotImplementedError(
                "stretto runs a program on all of its devices at once, not on one of them"
            )
        if args.options != NULL and (
            (<PJRT_ExecuteOptions*>args.options).num_send_ops
            or (<PJRT_ExecuteOptions*>args.options).num_recv_ops
        ):
            raise NotImplementedError("stretto has no host callbacks by send and recv operations")
        return 0

    cdef int check_repeated(self, PJRT_LoadedExecutable_Execute_Args* args) except -1:
        """Raise ``ValueError`` if an argument is donated and is another argument too. A run would find it
        gone half way, and end the job."""
        cdef void** handles
        cdef list row
        cdef size_t d
        for d in range(args.num_devices):
            handles = (<void***>args.argument_lists)[d]
            row = [<object>(<handle_t*>handles[i]).owner for i in range(args.num_args)]
            if len(set(row)) == len(row):
                continue
            for i in self.donated:
                for j in range(len(row)):
                    if j != i and row[j] is row[i] and self.may_donate(<PJRT_ExecuteOptions*>args.options, i):
                        raise ValueError(
                            f"argument {i}, {row[i].array_type.type}, is donated and given as argument {j} too: donate "
                            "neither, or pass a copy as one of them"
                        )
        return 0

    cdef int execute(self, PJRT_LoadedExecutable_Execute_Args* args) except -1:
        self.check(args)
        if self.donated:
            self.check_repeated(args)
        if not self.execute_single(args):
            self.execute_program(args)
        elif self.donated:
            self.delete_donated(args, None)
        return 0

    cdef bint execute_single(self, PJRT_LoadedExecutable_Execute_Args* args) except -1:
        """The short way, for one segment. False if there is none, or an argument is not there."""
        cdef void** handles
        cdef list rows, row, results
        cdef size_t d, i
        cdef object given, array, single = self.single
        cdef Buffer buffer
        cdef bint over = False, computed = True
        if single is None:  # as in all programs that have no device here
            return False
        self.decide_to_look()
        rows = []
        for d in range(args.num_devices):
            handles, row = (<void***>args.argument_lists)[d], PyList_New(args.num_args)
            for i in range(args.num_args):
                buffer = <Buffer>(<handle_t*>handles[i]).owner
                array = buffer.issued_array()
                if array is None:
                    return False
                computed = computed and buffer.c.ready
                Py_INCREF(array)
                PyList_SET_ITEM(row, i, array)
            if args.num_devices > 1:
                rows.append(row)
        if args.num_devices > 1:
            results = self.run_on_all(single, rows)
            for d in range(args.num_devices):
                self.hand_out(args, d, <list>PyList_GET_ITEM(results, d), False, computed)
            return True
        if type(single) is WatchedCall:
            given = (<WatchedCall>single).call(self.ordinal(0), row, &over)
        else:
            given = single(self.ordinal(0), row)
        if given is None:
            return False
        if type(given) is _Issued:
            self.deliver(args, given.promises, given.event)
        else:
            self.hand_out(args, 0, <list>self.counted(given), over, computed)
        return True

    cdef inline int ordinal(self, size_t d) noexcept:
        return (<Device>PyTuple_GET_ITEM(self.devices, d)).c.local_hardware_id

    cdef inline list counted(self, given):
        """What a run gave. Raises an error unless it is an array for each result."""
        if type(given) is not list or len(<list>given) != len(self.output_types):
            _counted(given, len(self.output_types))
        return <list>given

    cdef list run_on_all(self, single, list rows):
        """What ``single``, which another thread may exchange meanwhile, gives on each of several devices: in turn,
        or on threads where the engine computes in the thread that calls, for long."""
        cdef list results
        cdef size_t d, n = len(rows)
        cdef double took, began
        if self.apart is not None and self.seconds > self.long:
            began = monotonic()
            results = self.apart(single, rows)
            took = (monotonic() - began) * min(<size_t>self.engine.callers, n)
        else:
            began = of_thread()  # the engine's threads, once woken up, may take the core meanwhile
            results = [single(self.ordinal(d), rows[d]) for d in range(n)]
            took = of_thread() - began
        for d in range(n):
            if self.counted(results[d]) and not self.engine.is_ready(results[d][0]):
                took = 0.0  # they compute it
        self.seconds += 0.25 * (took / n - self.seconds)
        return results

    cdef int hand_out(
        self, PJRT_LoadedExecutable_Execute_Args* args, size_t d, list arrays, bint over, bint computed
    ) except -1:
        """Hand out what `single` gave a device. ``over``: all of it is computed. ``computed``: so were all
        arguments, without error."""
        cdef void** out = (<void***>args.output_lists)[d]
        cdef list memories = <list>PyList_GET_ITEM(self.output_memories, d), made
        cdef size_t i, count = len(arrays)
        cdef void* event
        if count == 1:
            out[0] = self.output(<object>PyList_GET_ITEM(arrays, 0), 0, memories)
        else:
            made = []
            for i in range(count):
                out[i] = self.output(<object>PyList_GET_ITEM(arrays, i), i, memories)
                made.append(<object>(<handle_t*>out[i]).owner)
            if not over:
                self.group(made, Outputs(weakly(self.cheapest_first(made)), None, self.whole, self.engine, d))
        if args.device_complete_events == NULL:
            return 0
        if count == 0:
            (<void**>args.device_complete_events)[d] = &always_ready
            return 0
        event = self.array_event(
            <Buffer>(<handle_t*>out[self.smallest]).owner, over, computed and self.cannot_fail
        )
        (<void**>args.device_complete_events)[d] = event
        if event == &always_ready and (over or self.jax_arrays):
            for i in range(count):  # whoever asks for them need not ask Python
                (<buffer_t*>out[i]).ready = True
        if self.cannot_fail and not computed and (<buffer_t*>out[self.smallest]).ready:
            # No argument had an error, or the result had it.
            for i in range(args.num_args):
                (<buffer_t*>(<void***>args.argument_lists)[d][i]).ready = True
        return 0

    cdef void* array_event(self, Buffer buffer, bint over, bint has_no_error) except NULL:
        """Event, owned by the caller, for the array of a buffer; cheap if it is computed, or ``over``, most of
        all if it can have no error then."""
        cdef Event event
        cdef object array = buffer.array
        if over or self.is_soon_ready(array):
            try:
                if not has_no_error and not (self.jax_arrays and is_without_error(array)):
                    self.engine.block(array)
                buffer.c.ready = True
                return &always_ready
            except Exception as error:
                event = Event()
                event.complete(error)
        else:
            # A weak reference: an event is not to keep an array alive.
            event = Event((PyWeakref_NewRef(buffer, None),), True)
            Py_INCREF(event)
            return event.pointer
        return event.hand_out()

    cdef bint is_array_ready(self, array) except -1:
        # Methods of jaxlib's arrays are called without the engine's functions around them, which in a call of
        # a small program take as long as they do.
        return is_ready(array) if self.jax_arrays else self.engine.is_ready(array)

    cdef int decide_to_look(self) except -1:
        """Whether this call looks for a moment whether what it has begun is computed (`is_soon_ready`): if what the last
        one gave was waited for. Where one was not over in a moment, the next looks only after twice as many calls as
        the last time."""
        self.looks, self.until = False, 0.0
        if self.on_host and waited[self.number]:
            if self.rests:
                self.rests -= 1
            else:
                self.looks = True
        waited[self.number] = False
        return 0

    cdef bint is_soon_ready(self, array) except -1:
        """Whether an array is computed, after a moment in which an engine's threads may compute it, one for all devices
        of a call. Who asks later goes through three threads."""
        if self.is_array_ready(array):
            return True
        if not self.looks:
            return False
        if self.until == 0.0:
            self.until = monotonic() + SOON
        for n in range(2000):  # there are systems without that clock
            if self.is_array_ready(array):
                self.missed = 0
                return True
            if n % 8 == 7 and monotonic() >= self.until:
                break
        self.looks = False
        self.rests = <size_t>1 << self.missed
        self.missed = min(self.missed + 1, 6)
        return False

    cdef list cheapest_first(self, list made):
        """What a run gave, the smallest first: who waits asks it before the others, of which a step that trains
        is given most again, so that they are gone."""
        if self.smallest == 0:
            return made
        return [made[self.smallest], *made[: self.smallest], *made[self.smallest + 1 :]]

    cdef int group(self, list made, Outputs outputs) except -1:
        """Have buffers that one device was given be ready together."""
        for buffer in made:
            (<Buffer>buffer).outputs = outputs
        return 0

    cdef inline void* output(self, array, size_t i, list memories) except NULL:
        cdef Buffer buffer = Buffer.__new__(Buffer)
        buffer.set(
            None,
            array,
            <ArrayType>PyList_GET_ITEM(self.output_types, i),
            <Memory>PyList_GET_ITEM(memories, i),
        )
        buffer.c.made_by = self.number
        Py_INCREF(buffer)
        return buffer.pointer

    cdef object joined(self, void*** lists, size_t i, size_t count):
        """A promise of what is given for a parameter, which the last of its buffers keeps, and all find again; None if
        that cannot be made."""
        cdef list arrays = []
        cdef Buffer buffer
        cdef object array, promise, reference
        cdef size_t d
        for d in range(count):
            buffer = <Buffer>(<handle_t*>lists[d][i]).owner
            array = None if buffer.shared or buffer.promise is not None else buffer.issued_array()
            if array is None:
                return None
            arrays.append(array)
        promise = self.join((<Buffer>(<handle_t*>lists[0][i]).owner).array_type.type, arrays)
        reference = PyWeakref_NewRef(promise, None)
        for d in range(count):
            buffer = <Buffer>(<handle_t*>lists[d][i]).owner
            if not buffer.c.deleted:
                buffer.promised, buffer.position = reference, d
        if not buffer.c.deleted:
            buffer.promise = promise
        return promise

    cdef object column(self, PJRT_LoadedExecutable_Execute_Args* args, size_t i):
        """What is given for a parameter, on all devices."""
        cdef void*** lists = <void***>args.argument_lists
        cdef Buffer buffer = <Buffer>(<handle_t*>lists[0][i]).owner
        cdef object promise = buffer.whole(), value
        cdef bint donated = PyByteArray_AS_STRING(self.donates)[i] != 0
        cdef bint kept = donated and not self.may_donate(<PJRT_ExecuteOptions*>args.options, i)
        cdef size_t d
        cdef list values
        if promise is not None and not kept and not self.has_callbacks:
            for d in range(args.num_devices):
                buffer = <Buffer>(<handle_t*>lists[d][i]).owner
                if buffer.whole() is not promise or buffer.position != d or (donated and buffer.external_references):
                    break
            else:
                return promise
        elif self.join is not None and not donated:
            promise = self.joined(lists, i, args.num_devices)
            if promise is not None:
                return promise
        values = []
        for d in range(args.num_devices):
            buffer = <Buffer>(<handle_t*>lists[d][i]).owner
            value = buffer.alive()
            if donated and (kept or buffer.external_references or buffer.shared):
                value = self.copy(value)
            values.append(value)
        return values

    cdef int execute_program(self, PJRT_LoadedExecutable_Execute_Args* args) except -1:
        cdef size_t i
        cdef list columns = []
        cdef bint awaited = waited[self.number]
        waited[self.number] = False
        if args.num_devices:
            for i in range(args.num_args):
                columns.append(self.column(args, i))
        try:
            promises, issued = self.run(columns, awaited)
        except BaseException:
            # Of a function that it called, perhaps: then it has taken what is donated.
            self.delete_donated(args, columns)
            raise
        self.delete_donated(args, None)
        self.deliver(args, promises, issued)
        return 0

    cdef int delete_donated(self, PJRT_LoadedExecutable_Execute_Args* args, list columns) except -1:
        """Delete the buffers that are donated; with ``columns``, what was given to a run, those that it took."""
        cdef size_t d, i
        cdef Buffer buffer
        if args.num_devices == 0:
            return 0
        for i in self.donated:
            if not self.may_donate(<PJRT_ExecuteOptions*>args.options, i):
                continue
            if columns is not None and type(columns[i]) is not list:
                continue
            for d in range(args.num_devices):
                if columns is not None and not columns[i][d].is_deleted:
                    continue
                buffer = <Buffer>(<handle_t*>(<void***>args.argument_lists)[d][i]).owner
                if buffer.value is not None and not buffer.external_references:
                    buffer.value.delete()  # whoever waits for it is not to keep its memory
                buffer.delete()
        return 0

    cdef int deliver(self, PJRT_LoadedExecutable_Execute_Args* args, list promises, issued) except -1:
        """Hand out what ``run`` promised."""
        cdef size_t d, i, count = len(promises)
        cdef list memories
        cdef tuple parts = None
        cdef object promise
        cdef Buffer buffer
        cdef Outputs outputs = None
        cdef bint over = False  # on all devices
        cdef void* event
        if count and not (self.has_callbacks and issued is not None):
            parts = weakly(self.cheapest_first(promises))
        for d in range(args.num_devices):
            memories = <list>PyList_GET_ITEM(self.output_memories, d)
            if parts is not None:
                outputs = Outputs(parts, issued, self.alike, self.engine, d)
            for i in range(count):
                promise = <object>PyList_GET_ITEM(promises, i)
                if d == 0:
                    untrack(promise)
                buffer = Buffer.__new__(Buffer)
                buffer.set_promised(
                    promise, d, <ArrayType>PyList_GET_ITEM(self.output_types, i), <Memory>PyList_GET_ITEM(memories, i)
                )
                buffer.outputs = outputs
                buffer.c.made_by = self.number
                Py_INCREF(buffer)
                (<void***>args.output_lists)[d][i] = buffer.pointer
            if args.device_complete_events != NULL:
                event = &always_ready if over else self.completion(outputs, issued)
                (<void**>args.device_complete_events)[d] = event
                if event == &always_ready and outputs is not None:
                    if d == 0 and args.num_devices > 1:
                        over = all([part.is_joined for part in promises])
                    for i in range(count):
                        (<buffer_t*>(<void***>args.output_lists)[d][i]).ready = True
        return 0

    cdef void* completion(self, Outputs made, issued) except NULL:
        """Event, owned by the caller, for the end of a run that gave this on one device.

        ``issued`` is the run's own event, or None if all of it was issued by the time it returned. Where
        Python functions are called, what counts is that they have been, even if nobody wants the results.
        """
        cdef Event event
        if made is not None:
            event = Event((made,), True)
        elif issued is None:
            return &always_ready
        else:
            event = Event()
            issued.add_callback(lambda: event.complete(issued.error))
        return event.hand_out()


cdef inline bint is_without_error(object array) noexcept:
    """Of one of jaxlib's arrays that is ready. What the error is, the engine says."""
    try:
        if type(array) is not array_type:
            look_up(array)
        array_block(array)
        return True
    except Exception:
        return False


cdef void* execute(void* a) noexcept nogil:
    cdef PJRT_LoadedExecutable_Execute_Args* args = <PJRT_LoadedExecutable_Execute_Args*>a
    cdef void* error
    come_in()
    if gone():
        error = new_error(1, b"the interpreter is going away", 29)
    else:
        with gil:
            error = run_executable(args)
    go_out()
    return error


cdef void* run_executable(PJRT_LoadedExecutable_Execute_Args* args) noexcept:
    cdef stretto_pending pending
    cdef error_t* error = NULL
    save(&pending)
    try:
        (<LoadedExecutable>(<handle_t*>args.executable).owner).execute(args)
    except BaseException as exception:
        error = error_of(exception)
    restore(&pending)
    return error


cdef void* loaded_is_deleted(void* a) noexcept nogil:
    cdef PJRT_LoadedExecutable_IsDeleted_Args* args = <PJRT_LoadedExecutable_IsDeleted_Args*>a
    args.is_deleted = (<loaded_t*>args.executable).deleted
    return NULL


cdef void* executable_num_replicas(void* a) noexcept nogil:
    cdef PJRT_Executable_NumReplicas_Args* args = <PJRT_Executable_NumReplicas_Args*>a
    args.num_replicas = (<executable_t*>args.executable).num_replicas
    return NULL


cdef void* executable_num_partitions(void* a) noexcept nogil:
    cdef PJRT_Executable_NumPartitions_Args* args = <PJRT_Executable_NumPartitions_Args*>a
    args.num_partitions = (<executable_t*>args.executable).num_partitions
    return NULL


cdef void* executable_num_outputs(void* a) noexcept nogil:
    cdef PJRT_Executable_NumOutputs_Args* args = <PJRT_Executable_NumOutputs_Args*>a
    args.num_outputs = (<executable_t*>args.executable).num_outputs
    return NULL


cdef void* device_default_memory(void* a) noexcept nogil:
    cdef PJRT_Device_DefaultMemory_Args* args = <PJRT_Device_DefaultMemory_Args*>a
    cdef device_t* device = <device_t*>args.device
    if device.default_memory == NULL:
        return new_error(3, b"the device belongs to another process", 37)
    args.memory = device.default_memory
    return NULL
