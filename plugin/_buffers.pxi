# Buffers: values in memories. Part of `_capi`.

@cython.final
cdef class ArrayType:
    """A tensor type as C wants it: code, dimensions, row-major order of dimensions, bytes.

    Made once for each type and order: buffers point into it. ``order`` is the layout that JAX knows, its
    dimensions from minor to major; empty for row-major ones.
    """

    cdef readonly object type
    cdef readonly tuple order
    cdef int code
    cdef size_t rank
    cdef int64_t* dimensions
    cdef int64_t* minor_to_major
    cdef size_t nbytes

    def __cinit__(self, type, tuple order=()):
        self.type, self.order = interned(type), order
        self.code = _abi.BUFFER_TYPES[type.dtype]
        self.rank, self.nbytes = len(type.shape), type.nbytes
        # One block for both; malloc(0) may give null, which jaxlib would not mind.
        self.dimensions = <int64_t*>malloc(2 * sizeof(int64_t) * (self.rank + 1))
        if self.dimensions == NULL:
            raise MemoryError
        self.minor_to_major = self.dimensions + self.rank
        for i, extent in enumerate(type.shape):
            self.dimensions[i] = extent
            self.minor_to_major[i] = self.rank - 1 - i

    def __dealloc__(self):
        free(self.dimensions)


cdef struct buffer_t:
    void* owner
    int type
    size_t rank
    const int64_t* dimensions
    const int64_t* minor_to_major
    size_t nbytes
    void* device
    void* memory
    bint deleted
    bint ready  # known to be computed, without error
    int questions  # that wait for an answer (`ask`)
    bint released  # destroyed by jaxlib meanwhile
    unsigned char made_by  # number of the executable (`waited`)


cdef tuple weakly(list things):
    """Weak references to what holds arrays."""
    cdef tuple references = tuple([PyWeakref_NewRef(thing, None) for thing in things])
    for reference in references:
        untrack(reference)
    return references


cdef bint was_given(object content, size_t position) except -1:
    """Whether a device's array has been donated. Asking costs less than waiting for it, which raises."""
    cdef object is_deleted
    if type(content) is not list:
        return False
    is_deleted = getattr(content[position], "is_deleted", None)  # as jaxlib's arrays have it
    return callable(is_deleted) and is_deleted() is True


@cython.final
cdef class Outputs:
    """What one run gave one device. To jaxlib all of it is ready once all is, as with runtimes whose runs end as
    a whole: one event serves all buffers, where each had its own.

    ``parts`` are weak references: nothing here keeps an array alive. They are buffers, or promises of the device at
    this ``position`` of a program, which buffers hold; buffers that have taken their part out of one are ``taken``.
    ``issued`` is as for `Event`. ``alike``: they are of one run of XLA, which ends as a whole, so that one of them
    tells of all.
    """

    cdef tuple parts
    cdef list taken
    cdef object engine
    cdef size_t position
    cdef bint alike
    cdef readonly object issued
    cdef Event event

    is_deleted = False

    def __cinit__(self, tuple parts not None, issued, bint alike, engine, size_t position):
        self.parts, self.alike, self.engine, self.position = parts, alike, engine, position
        self.issued, self.event, self.taken = issued, None, []

    cdef int takes(self, Buffer buffer) except -1:
        """A buffer holds its part by itself from now on."""
        if self.parts is not None:
            self.taken.append(PyWeakref_NewRef(buffer, None))
        return 0

    cdef object part(self, reference):
        """What a reference refers to; None if that has been given up, or given to a later run."""
        cdef object part = reference()
        if type(part) is Buffer:
            return None if (<Buffer>part).c.deleted else part
        return None if part is not None and was_given(part.content, self.position) else part

    cdef bint is_part_ready(self, part) except -1:
        if type(part) is Buffer:
            return (<Buffer>part).is_ready()
        return part.is_ready(self.engine, self.position)

    cdef int block_part(self, part) except -1:
        if type(part) is Buffer:
            (<Buffer>part).block()
        else:
            part.block(self.engine, self.position)
        return 0

    cdef Event ready(self):
        """The event for all buffers being computed."""
        if self.event is None:
            self.event = Event((self,))
        return self.event

    def is_ready(self):
        """Whether there is nothing to wait for."""
        cdef tuple parts = self.parts
        if parts is None:
            return True
        if self.issued is not None and not self.issued.done:
            return False
        for reference in (*self.taken, *parts):
            part = self.part(reference)
            if part is None:
                continue
            if not self.is_part_ready(part):
                return False
            if self.alike:
                break
        return True

    def block(self):
        """Wait until all is computed. Raises the first error."""
        cdef tuple parts = self.parts
        cdef object failure = None
        if parts is None:
            return
        for reference in (*self.taken, *parts):
            part = self.part(reference)
            if part is None:
                continue
            try:
                self.block_part(part)
                if self.alike:
                    break
            except Exception as error:
                # Donated to a later run: that array is gone, and this run was not at fault. The value may not
                # know yet, where that run is being started at this moment.
                if failure is None and self.part(reference) is not None and "deleted" not in str(error):
                    failure = error
        if failure is not None:
            raise failure
        self.parts, self.taken = None, []  # and so it stays

    def on_ready(self, callback):
        """Have ``callback(error)`` called soon after all is computed: a thread waits for what is issued."""
        if self.issued is not None and not self.issued.done:
            self.issued.add_callback(lambda: self.on_ready(callback))
        elif self.is_ready():
            self.tell(callback)
        else:
            run_elsewhere(lambda: self.tell(callback))

    cdef int tell(self, callback) except -1:
        cdef object failure = None
        try:
            self.block()
        except Exception as error:
            failure = error
        callback(failure)
        return 0


cdef inline void untrack(object thing) noexcept:
    """Spare the garbage collector something that is part of no cycle, of which each run makes many."""
    if PyObject_GC_IsTracked(thing):
        PyObject_GC_UnTrack(<void*>thing)


# Of jaxlib's arrays, all of which are of one type: that type and its functions, looked up once.
cdef type array_type = None
cdef object array_is_ready = None, array_block = None


cdef int look_up(object array) except -1:
    global array_type, array_is_ready, array_block
    array_is_ready, array_block = type(array).is_ready, type(array).block_until_ready
    array_type = type(array)
    return 0


cdef inline bint is_ready(object array) except -1:
    """Of one of jaxlib's arrays."""
    if type(array) is not array_type:
        look_up(array)
    return array_is_ready(array) is True


# Not tracked by the garbage collector: a step of training makes a thousand, and none is part of a cycle (what it
# refers to are arrays, values and what lives as long as the client).
@cython.no_gc
@cython.final
cdef class Buffer(Handle):
    """A value in a memory.

    The value is row-major, and to jaxlib so is every buffer. Whoever asks for the address of one that has
    another layout to JAX gets that of a copy, which is kept in ``reordered``. A buffer holds the engine's array, or
    the ``Promise`` of a program's output, of whose devices it is the one at ``position``; or a ``Value``, which is
    made of these when somebody asks for it, and holds a promise in its place: what other devices have is not to stay
    for one that has its part. ``promised`` refers to a promise that others hold. It holds none once it was deleted or
    donated. ``outputs`` are those of the run that gave it, if it gave several.
    """

    cdef buffer_t c
    cdef object array
    cdef object value
    cdef object promise
    cdef object promised
    cdef size_t position
    cdef readonly ArrayType array_type
    cdef readonly Memory memory
    cdef readonly int external_references
    cdef bint shared  # its array is that of other buffers too, so that no run may write to it
    cdef public object reordered
    cdef object lent
    cdef Outputs outputs

    def __cinit__(self):
        self.c.owner = <void*>self
        self.pointer = &self.c
        self.c.deleted = self.c.ready = self.shared = False

    cdef inline void set(self, object value, object array, ArrayType type, Memory memory) noexcept:
        self.value, self.array = value, array
        self.lies(type, memory)

    cdef inline void set_promised(self, object promise, size_t position, ArrayType type, Memory memory) noexcept:
        self.promise, self.position = promise, position
        self.lies(type, memory)

    cdef inline void lies(self, ArrayType type, Memory memory) noexcept:
        self.array_type, self.memory = type, memory
        self.c.type, self.c.rank, self.c.nbytes = type.code, type.rank, type.nbytes
        self.c.dimensions, self.c.minor_to_major = type.dimensions, type.minor_to_major
        self.c.device, self.c.memory = memory.c.device, memory.pointer

    @property
    def is_deleted(self):
        return self.c.deleted

    cdef object alive(self):
        if self.c.deleted:
            raise ValueError("the buffer has been deleted or donated")
        if self.value is None:
            self.value = make_value(self.array, self.promise, self.position, self.array_type.type, self.memory)
            if self.array is None and self.promise is not None:
                self.promised, self.promise = PyWeakref_NewRef(self.promise, None), None
                if self.outputs is not None:
                    self.outputs.takes(self)
        return self.value

    cdef inline object whole(self):
        """The promise of all devices' parts, of which this is one, as long as somebody holds it."""
        if self.promise is not None:
            return self.promise
        return self.promised() if self.promised is not None else None

    def live_value(self):
        """The value. Raises ``ValueError`` if the buffer was deleted or donated."""
        return self.alive()

    cdef object issued_array(self):
        """The engine's array, or None if it is not there yet or will never be."""
        if self.array is None and not self.c.deleted:
            if self.value is None and not self.promise.event.done:
                return None
            try:
                self.array = self.alive().issued()
            except Exception:
                return None
        return self.array

    def is_ready(self):
        """Whether there is nothing to wait for; so it is with what was given up."""
        cdef object array = self.array, value = self.value, promise = self.promise
        if value is not None:
            return value.is_ready()
        if array is not None and type(array) is array_type:
            return array_is_ready(array)
        if array is not None:
            return self.memory.device.client.engine.is_ready(array)
        return promise is None or promise.is_ready(self.memory.device.client.engine, self.position)

    def block(self):
        """Wait until it is computed. Raises the error of its run."""
        cdef object array = self.array, value = self.value, promise = self.promise
        if value is not None:
            value.block()
        elif array is not None:
            self.memory.device.client.engine.block(array)
        elif promise is not None:
            promise.block(self.memory.device.client.engine, self.position)

    def delete(self):
        """Give up the value. Its memory is freed when its last user is done. It may be called again: jaxlib has the
        buffer of an array on one device twice."""
        if self.external_references and not self.c.deleted:
            self.lent = (self.value, self.array, self.promise, self.reordered)
        self.c.deleted = True
        self.value = self.array = self.promise = self.promised = self.reordered = self.outputs = None

    def add_external_reference(self):
        """Its memory is in use outside of JAX: it stays, even if the buffer is deleted."""
        self.alive()
        self.external_references += 1

    def drop_external_reference(self):
        """Raises ``ValueError`` if there is none."""
        if self.external_references < 1:
            raise ValueError("the buffer has no external references")
        self.external_references -= 1
        if not self.external_references:
            self.lent = None

    cdef bint is_computed(self):
        """Whether the engine's array, which must be there, is computed and no error: errors are its event's to
        tell."""
        engine = self.memory.device.client.engine
        try:
            if not engine.is_ready(self.array):
                return False
            engine.block(self.array)
            return True
        except Exception:
            return False

    def ready_event(self):
        """Pointer, owned by the caller, to an event for the value being computed."""
        cdef Event event
        if self.c.deleted:
            event = Event()
            event.complete(ValueError("the buffer has been deleted or donated"))
            return give(event)
        if self.outputs is not None:
            event = self.outputs.ready()
            if not event.poll():
                return give(event)
            self.outputs = None
            if event.c.error == NULL:
                self.c.ready = True
                return <size_t>&always_ready
        if self.value is None and self.array is not None and self.is_computed():
            self.c.ready = True
            return <size_t>&always_ready
        event = Event((self.alive(),))
        if event.poll() and event.c.error == NULL:
            self.c.ready = True
            return <size_t>&always_ready
        return give(event)


# Makes the ``Value`` of (engine array or None, its promise otherwise, position, type, memory); and the type of (code, shape). Set by `install`.
cdef object make_value = None
cdef object tensor_type = None

# By element type, then dimensions: the `ArrayType` of dense arrays that came from the host, its NumPy shape and
# dtype. No more than `KNOWN_TYPES` of them.
cdef dict dense_types = {}
cdef int from_host = names.index("PJRT_Client_BufferFromHostBuffer")
cdef int ZERO_COPY = _abi.ZERO_COPY
cdef size_t ALIGNMENT = _ALIGNMENT
cdef enum:
    FEW_BYTES = 1024
    LONG_COPY = 65536  # bytes, in whose time other threads can do something
    FEW_DIMENSIONS = 8
    KNOWN_TYPES = 4096
    KNOWN_SCALARS = 256  # of a memory

SMALL_BYTES = FEW_BYTES  # that are copied sooner than aligned


cdef void* buffer_from_host(void* a) noexcept nogil:
    cdef void* error = NULL
    come_in()
    if not gone():
        with gil:
            error = call_from_host(<PJRT_Client_BufferFromHostBuffer_Args*>a)
    go_out()
    return error


cdef void* call_from_host(PJRT_Client_BufferFromHostBuffer_Args* args) noexcept:
    """Dense arrays are copied here or by the engine, or, where it can use them in place, lent to it; the handler
    sees the others."""
    cdef stretto_pending pending
    cdef error_t* error = NULL
    cdef bint done = False
    if (
        args.device_layout == NULL and args.num_dims <= FEW_DIMENSIONS and args.data != NULL
        and (args.memory != NULL or (args.device != NULL and (<device_t*>args.device).default_memory != NULL))
    ):
        save(&pending)
        try:
            done = take_dense(args)
        except BaseException as exception:
            error = error_of(exception)
        restore(&pending)
        if done or error != NULL:
            return error
    return call_handler(from_host, args)


cdef bint take_dense(PJRT_Client_BufferFromHostBuffer_Args* args) except -1:
    """Whether the array is dense; then the caller has its buffer."""
    cdef const int64_t* dimensions = <const int64_t*>args.dims
    cdef const int64_t* strides = <const int64_t*>args.byte_strides
    cdef Memory memory
    cdef ArrayType type
    cdef Buffer buffer
    cdef Event done = None
    cdef bytes key = (<char*>dimensions)[:args.num_dims * sizeof(int64_t)] if args.num_dims else b""
    cdef dict of_type = dense_types.get(args.type)
    cdef tuple found = of_type.get(key) if of_type is not None else None
    cdef object host, client, put
    cdef int64_t step
    cdef uint64_t bits = 0
    cdef size_t i
    if found is None:
        found = dense_type(args.type, tuple([dimensions[i] for i in range(args.num_dims)]), key)
    type = <ArrayType>found[0]
    if type is None:
        return False
    if args.num_byte_strides:
        step = <int64_t>found[2].itemsize
        for i in reversed(range(args.num_dims)):
            if strides[i] != step and dimensions[i] != 1:
                return False
            step *= dimensions[i]
    memory = (
        <Memory>(<handle_t*>args.memory).owner if args.memory != NULL
        else <Memory>(<handle_t*>(<device_t*>args.device).default_memory).owner
    )
    client = memory.device.client
    if args.num_dims == 0 and type.nbytes <= sizeof(bits) and client.shares_scalars:
        memcpy(&bits, <void*>args.data, type.nbytes)
        buffer = scalar(client, found, bits, memory)
        args.done_with_host_buffer = &always_ready
        Py_INCREF(buffer)
        args.buffer = buffer.pointer
        return True
    put = client.engine.put
    if args.host_buffer_semantics == ZERO_COPY and type.nbytes > FEW_BYTES and (
        <size_t>args.data % ALIGNMENT == 0 or client.unaligned
    ):
        # The caller learns that it is over when the engine drops the array.
        done = Event()
        host = ndarray(found[1], found[2], HostMemory(<size_t>args.data, type.nbytes, done))
    elif client.put_copy is not None:
        put = client.put_copy
        host = ndarray(found[1], found[2], HostMemory(<size_t>args.data, type.nbytes))
    elif type.nbytes <= FEW_BYTES:
        host = PyBytes_FromStringAndSize(<char*>args.data, type.nbytes)
        host = ndarray(found[1], found[2], host).copy()
    else:
        host = ndarray(found[1], found[2], copied(args.data, type.nbytes))
    buffer = Buffer.__new__(Buffer)
    buffer.set(None, put(host, type.type, memory.device.c.local_hardware_id), type, memory)
    if client.jax_arrays and is_ready(buffer.array):
        buffer.c.ready = True  # what comes from the host has no error, and whoever asks need not ask Python
    if done is None:
        args.done_with_host_buffer = &always_ready
    else:
        Py_INCREF(done)
        args.done_with_host_buffer = done.pointer
    Py_INCREF(buffer)
    args.buffer = buffer.pointer
    return True


cdef Buffer scalar(client, tuple found, uint64_t bits, Memory memory):
    """A buffer for a number with these bits, of one of the `dense_types`. Python's numbers come anew with every call,
    mostly the same ones: a memory has one array for all buffers of one. A run that is donated one gets a copy."""
    cdef ArrayType type = <ArrayType>found[0]
    cdef Buffer buffer = Buffer.__new__(Buffer)
    cdef tuple key = (type.code, bits)
    cdef object array = memory.scalars.get(key), host
    if array is None:
        host = ndarray(found[1], found[2], HostMemory(<size_t>&bits, type.nbytes))
        array = client.put_copy(host, type.type, memory.device.c.local_hardware_id)
        client.engine.block(array)
        if len(memory.scalars) >= KNOWN_SCALARS:
            memory.scalars.clear()
        memory.scalars[key] = array
    buffer.set(None, array, type, memory)
    buffer.shared = buffer.c.ready = True
    return buffer


cdef tuple dense_type(int code, tuple shape, bytes key):
    """What is known of a type; without an `ArrayType` where the handler must see its arrays."""
    cdef dict of_type
    cdef object type = tensor_type(code, shape)
    cdef bint plain = type.nbytes > 0 and type.element.bits >= 8
    cdef tuple found = (ArrayType(type) if plain else None, type.shape, type.numpy)
    if sum(map(len, dense_types.values())) < KNOWN_TYPES:
        of_type = dense_types.setdefault(code, {})
        of_type[key] = found
    return found


def make_buffer(value, ArrayType type not None, Memory memory not None):
    """A buffer for a value of this type."""
    cdef Buffer buffer = Buffer.__new__(Buffer)
    buffer.set(value, None, type, memory)
    return buffer


cdef void* buffer_element_type(void* a) noexcept nogil:
    cdef PJRT_Buffer_ElementType_Args* args = <PJRT_Buffer_ElementType_Args*>a
    args.type = (<buffer_t*>args.buffer).type
    return NULL


cdef void* buffer_dimensions(void* a) noexcept nogil:
    """Also UnpaddedDimensions, whose arguments lie in the same places: no dimension is dynamic."""
    cdef PJRT_Buffer_Dimensions_Args* args = <PJRT_Buffer_Dimensions_Args*>a
    cdef buffer_t* buffer = <buffer_t*>args.buffer
    args.dims, args.num_dims = <void*>buffer.dimensions, buffer.rank
    return NULL


cdef void* buffer_dynamic_dimensions(void* a) noexcept nogil:
    cdef PJRT_Buffer_DynamicDimensionIndices_Args* args = <PJRT_Buffer_DynamicDimensionIndices_Args*>a
    args.dynamic_dim_indices, args.num_dynamic_dims = NULL, 0
    return NULL


cdef void* buffer_memory_layout(void* a) noexcept nogil:
    cdef PJRT_Buffer_GetMemoryLayout_Args* args = <PJRT_Buffer_GetMemoryLayout_Args*>a
    cdef buffer_t* buffer = <buffer_t*>args.buffer
    memset(&args.layout, 0, sizeof(args.layout))
    args.layout.struct_size = sizeof(args.layout)
    args.layout.layout.tiled.struct_size = sizeof(args.layout.layout.tiled)
    args.layout.layout.tiled.minor_to_major = <void*>buffer.minor_to_major
    args.layout.layout.tiled.minor_to_major_size = buffer.rank
    args.layout.type = 0  # tiled
    return NULL


cdef void* buffer_size(void* a) noexcept nogil:
    cdef PJRT_Buffer_OnDeviceSizeInBytes_Args* args = <PJRT_Buffer_OnDeviceSizeInBytes_Args*>a
    args.on_device_size_in_bytes = (<buffer_t*>args.buffer).nbytes
    return NULL


cdef void* buffer_device(void* a) noexcept nogil:
    cdef PJRT_Buffer_Device_Args* args = <PJRT_Buffer_Device_Args*>a
    args.device = (<buffer_t*>args.buffer).device
    return NULL


cdef void* buffer_memory(void* a) noexcept nogil:
    cdef PJRT_Buffer_Memory_Args* args = <PJRT_Buffer_Memory_Args*>a
    args.memory = (<buffer_t*>args.buffer).memory
    return NULL


cdef void* buffer_is_on_cpu(void* a) noexcept nogil:
    cdef PJRT_Buffer_IsOnCpu_Args* args = <PJRT_Buffer_IsOnCpu_Args*>a
    args.is_on_cpu = (<device_t*>(<buffer_t*>args.buffer).device).on_host
    return NULL


cdef void* buffer_is_deleted(void* a) noexcept nogil:
    cdef PJRT_Buffer_IsDeleted_Args* args = <PJRT_Buffer_IsDeleted_Args*>a
    args.is_deleted = (<buffer_t*>args.buffer).deleted
    return NULL


cdef void* buffer_ready_event(void* a) noexcept nogil:
    cdef PJRT_Buffer_ReadyEvent_Args* args = <PJRT_Buffer_ReadyEvent_Args*>a
    cdef buffer_t* buffer = <buffer_t*>args.buffer
    waited[buffer.made_by] = True
    if gone() or (buffer.ready and not buffer.deleted):
        args.event = &always_ready
        return NULL
    args.event = ask(buffer)
    if args.event != NULL:
        return NULL
    with gil:  # nobody answers, or there is no memory
        return make_ready_event(buffer, args)


cdef void* make_ready_event(buffer_t* buffer, PJRT_Buffer_ReadyEvent_Args* args) noexcept:
    cdef stretto_pending pending
    cdef error_t* error = NULL
    save(&pending)
    try:
        args.event = <void*><size_t>(<Buffer>buffer.owner).ready_event()
    except BaseException as exception:
        error = error_of(exception)
    restore(&pending)
    return error


@cython.final
cdef class OwnMemory:
    """Memory that an engine can use in place, and that is given back when nobody uses it any more."""

    cdef void* data
    cdef Py_ssize_t size

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.size, 1, flags)

    def __dealloc__(self):
        free(self.data)


cdef OwnMemory copied(const void* data, size_t size):
    cdef OwnMemory memory = OwnMemory.__new__(OwnMemory)
    if posix_memalign(&memory.data, ALIGNMENT, size):
        memory.data = NULL  # which may be anything then
        raise MemoryError(f"no memory for an array of {size} bytes from the host")
    memory.size = size
    if size < LONG_COPY:
        memcpy(memory.data, data, size)
    else:
        with nogil:
            memcpy(memory.data, data, size)
    return memory


@cython.no_gc_clear
@cython.final
cdef class HostMemory:
    """Memory of the caller, lent for reading. ``done``, if any, completes when nobody uses it any more."""

    cdef void* data
    cdef Py_ssize_t size
    cdef Event done

    def __cinit__(self, size_t data, Py_ssize_t size, Event done=None):
        self.data, self.size, self.done = <void*>data, size, done

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.size, 1, flags)

    def __dealloc__(self):
        cdef stretto_pending pending
        if self.done is not None:
            save(&pending)
            self.done.complete()
            restore(&pending)
