# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The C face of the plugin: the table of the PJRT C API, and the handles that it hands out.

No policy lives here. An entry of the table either answers in C, from a struct that does not change while
its handle lives, or takes the GIL and calls one Python handler with the address of its arguments.

Invariants:

- Every entry returns quietly, NULL, once the interpreter is going away: destructors of C++ call in then.
- An entry that enters Python saves the error indicator and restores it: jaxlib's destructors call in
  while an exception is on its way.
- A handle is a pointer to a struct inside a Python object; the struct begins with the address of that object.
  What a caller must destroy holds a reference; devices, memories and topologies belong to their client.
- A callback of the caller is called with the GIL released and with no lock held.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.list cimport PyList_GET_ITEM
from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport int32_t, int64_t, intptr_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from . import abi as _abi

cdef extern from *:
    """
    #if PY_VERSION_HEX >= 0x030D0000
    #define stretto_gone() (!Py_IsInitialized() || Py_IsFinalizing())
    #else
    #define stretto_gone() (!Py_IsInitialized() || _Py_IsFinalizing())
    #endif

    #if PY_VERSION_HEX >= 0x030C0000
    typedef struct { PyObject* raised; } stretto_pending;
    static inline void stretto_save(stretto_pending* p) { p->raised = PyErr_GetRaisedException(); }
    static inline void stretto_restore(stretto_pending* p) { PyErr_SetRaisedException(p->raised); }
    #else
    typedef struct { PyObject *type, *value, *trace; } stretto_pending;
    static inline void stretto_save(stretto_pending* p) {
        PyErr_Fetch(&p->type, &p->value, &p->trace);
    }
    static inline void stretto_restore(stretto_pending* p) {
        PyErr_Restore(p->type, p->value, p->trace);
    }
    #endif

    static const void* stretto_table = NULL;
    #if defined(_WIN32)
    __declspec(dllexport)
    #else
    __attribute__((visibility("default")))
    #endif
    const void* GetPjrtApi(void) { return stretto_table; }
    """
    ctypedef struct stretto_pending:
        pass
    bint gone "stretto_gone"() noexcept nogil
    void save "stretto_save"(stretto_pending*) noexcept
    void restore "stretto_restore"(stretto_pending*) noexcept
    const void* exported_table "stretto_table"
    void PyErr_SetInterrupt()

cdef extern from "Python.h":
    # With the GIL: an object as it lies in memory, for fields that never change.
    const char* PyBytes_AS_STRING(object) noexcept
    Py_ssize_t PyBytes_GET_SIZE(object) noexcept

include "_pjrt_abi.pxi"

# ------------------------------------------------------------------------------------------- errors

cdef struct error_t:
    int code
    size_t size
    char* message


cdef error_t* new_error(int code, const char* message, size_t size) noexcept nogil:
    cdef error_t* error = <error_t*>malloc(sizeof(error_t) + size + 1)
    if error == NULL:
        return NULL
    error.code, error.size = code, size
    error.message = <char*>error + sizeof(error_t)
    if size:
        memcpy(error.message, message, size)
    error.message[size] = 0
    return error


cdef error_t* copy_error(const error_t* error) noexcept nogil:
    return NULL if error == NULL else new_error(error.code, error.message, error.size)


# Turns an exception into (code, message as bytes); set by `install`.
cdef object describe = None


cdef error_t* error_of(object exception) noexcept:
    """The error for an exception. Ctrl-C is an error to jaxlib and still interrupts the program."""
    cdef bytes text
    cdef int code
    try:
        if isinstance(exception, KeyboardInterrupt):
            PyErr_SetInterrupt()
        code, text = describe(exception)
        return new_error(code, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
    except BaseException:
        return new_error(13, b"stretto: an error that cannot be described", 42)


cdef void* error_destroy(void* a) noexcept nogil:
    free((<PJRT_Error_Destroy_Args*>a).error)
    return NULL


cdef void* error_message(void* a) noexcept nogil:
    cdef PJRT_Error_Message_Args* args = <PJRT_Error_Message_Args*>a
    cdef error_t* error = <error_t*>args.error
    args.message, args.message_size = error.message, error.size
    return NULL


cdef void* error_get_code(void* a) noexcept nogil:
    cdef PJRT_Error_GetCode_Args* args = <PJRT_Error_GetCode_Args*>a
    args.code = (<error_t*>args.error).code
    return NULL


# ------------------------------------------------------------------------------------ Python handlers

cdef list handlers = []
cdef tuple names = _abi.FUNCTIONS


cdef void* dispatch(int number, void* args) noexcept nogil:
    if gone():
        return NULL
    with gil:
        return call_handler(number, args)


cdef void* call_handler(int number, void* args) noexcept:
    cdef stretto_pending pending
    cdef error_t* error = NULL
    save(&pending)
    try:
        handler = handlers[number]
        if handler is None:
            raise NotImplementedError(f"stretto does not implement {names[number]}")
        handler(<size_t>args)
    except BaseException as exception:
        error = error_of(exception)
    restore(&pending)
    return error


# ------------------------------------------------------------------------------------------ handles

cdef struct handle_t:
    void* owner


cdef class Handle:
    """An object that jaxlib holds by a pointer."""

    cdef void* pointer
    cdef handle_t plain
    cdef object __weakref__

    def __cinit__(self, *args, **kwargs):
        self.plain.owner = <void*>self
        self.pointer = &self.plain


def lend(Handle handle not None):
    """The pointer to a handle that is kept alive by other means."""
    return <size_t>handle.pointer


def give(Handle handle not None):
    """The pointer to a handle, with a reference that its Destroy function drops."""
    Py_INCREF(handle)
    return <size_t>handle.pointer


def take(pointer):
    """The object of a pointer that came from `lend` or `give`. Raises ``ValueError`` for null."""
    if not pointer:
        raise ValueError("null handle")
    return <object>(<handle_t*><size_t>pointer).owner


cdef inline void drop(void* handle) noexcept:
    cdef stretto_pending pending
    save(&pending)
    Py_DECREF(<object>(<handle_t*>handle).owner)
    restore(&pending)


cdef void* destroy(void* a) noexcept nogil:
    """Destroy of any handle: each of these functions has the handle as its only argument."""
    cdef void* handle = (<PJRT_Buffer_Destroy_Args*>a).buffer
    if handle != NULL and not gone():
        with gil:
            drop(handle)
    return NULL


def deleter():
    """Address of ``void (*)(void* handle)`` that drops what `give` has given."""
    return <size_t>&delete_handle


cdef void delete_handle(void* handle) noexcept nogil:
    if handle != NULL and not gone():
        with gil:
            drop(handle)


@cython.final
cdef class Bytes(Handle):
    """Bytes that jaxlib holds until it calls their deleter."""

    cdef readonly bytes data

    def __init__(self, bytes data not None):
        self.data = data

    @property
    def address(self):
        return <size_t>PyBytes_AS_STRING(self.data)


# ------------------------------------------------------------------------------------------- events

ctypedef void (*on_ready_t)(void* error, void* user_arg) noexcept nogil

cdef struct event_t:
    void* owner  # null for the one event that is always ready
    bint ready
    error_t* error

cdef event_t always_ready
always_ready.owner = NULL
always_ready.ready = True
always_ready.error = NULL


@cython.final
cdef class Event(Handle):
    """Something that will be done. Made of a value, or completed by `complete`."""

    cdef event_t c
    cdef object value
    cdef list callbacks

    def __cinit__(self, value=None):
        self.c.owner = <void*>self
        self.c.error = NULL
        self.c.ready = False
        self.pointer = &self.c
        self.value = value
        self.callbacks = None

    def __dealloc__(self):
        free(self.c.error)

    def complete(self, error=None):
        """The work is done, or has failed with this exception. Callbacks are called from here."""
        cdef list callbacks
        if self.c.ready:
            return
        if error is not None:
            self.c.error = error_of(error)
        self.c.ready = True
        self.value = None
        callbacks, self.callbacks = self.callbacks, None
        if callbacks is not None:
            for callback, argument in callbacks:
                call_back(<on_ready_t><size_t>callback, copy_error(self.c.error), <void*><size_t>argument)

    cdef bint poll(self) except -1:
        """Whether it is done; a value that is computed completes its event."""
        if not self.c.ready and self.value is not None and self.value.is_ready():
            self.settle()
        return self.c.ready

    cdef int settle(self) except -1:
        """Wait for the value, and be done."""
        try:
            self.value.block()
        except Exception as error:
            self.complete(error)
        else:
            self.complete()
        return 0

    cdef void* hand_out(self) except NULL:
        """Pointer to it or, if it is done without error, to the event that always is."""
        if self.poll() and self.c.error == NULL:
            return &always_ready
        Py_INCREF(self)
        return self.pointer

    def is_ready(self):
        return self.poll()

    def add_callback(self, size_t callback, size_t argument):
        if self.poll():
            call_back(<on_ready_t>callback, copy_error(self.c.error), <void*>argument)
            return
        if self.callbacks is None:
            self.callbacks = [(callback, argument)]
            if self.value is not None:
                self.value.on_ready(self.complete)
        else:
            self.callbacks.append((callback, argument))

    def wait(self):
        """Block until it is done. Does not raise the error."""
        if self.poll():
            return
        if self.value is not None:
            self.settle()
            return
        import threading

        done = threading.Event()
        self.when_done(done.set)
        done.wait()

    def when_done(self, function):
        """Call ``function()`` once it is done."""
        Waiter(function).attach(self)


cdef class Waiter:
    """A Python function as a callback of an event."""

    cdef object function

    def __cinit__(self, function):
        self.function = function

    def attach(self, Event event):
        Py_INCREF(self)
        event.add_callback(<size_t>&run_waiter, <size_t><void*>self)


cdef void run_waiter(void* error, void* waiter) noexcept nogil:
    free(error)
    with gil:
        try:
            (<Waiter>waiter).function()
        finally:
            Py_DECREF(<Waiter>waiter)


cdef void call_back(on_ready_t callback, error_t* error, void* argument) noexcept:
    with nogil:
        callback(error, argument)


def ready_event():
    """The pointer to the event that is ready and never fails; its Destroy does nothing."""
    return <size_t>&always_ready


def event_at(pointer):
    """The `Event` of a pointer, or None for the one that is always ready."""
    cdef event_t* event = <event_t*><size_t>pointer
    return None if event.owner == NULL else <object>event.owner


cdef void* event_destroy(void* a) noexcept nogil:
    cdef event_t* event = <event_t*>(<PJRT_Event_Destroy_Args*>a).event
    if event != NULL and event.owner != NULL and not gone():
        with gil:
            drop(event)
    return NULL


cdef void* event_is_ready(void* a) noexcept nogil:
    cdef PJRT_Event_IsReady_Args* args = <PJRT_Event_IsReady_Args*>a
    cdef event_t* event = <event_t*>args.event
    if event.ready:
        args.is_ready = True
        return NULL
    args.is_ready = False
    if gone():
        return NULL
    with gil:
        return poll_event(event, args)


cdef void* poll_event(event_t* event, PJRT_Event_IsReady_Args* args) noexcept:
    cdef stretto_pending pending
    cdef error_t* error = NULL
    save(&pending)
    try:
        args.is_ready = (<Event>event.owner).poll()
    except BaseException as exception:
        error = error_of(exception)
    restore(&pending)
    return error


cdef void* event_error(void* a) noexcept nogil:
    return copy_error((<event_t*>(<PJRT_Event_Error_Args*>a).event).error)


cdef void* event_await(void* a) noexcept nogil:
    cdef event_t* event = <event_t*>(<PJRT_Event_Await_Args*>a).event
    if not event.ready:
        if gone():
            return NULL
        with gil:
            return await_event(event)
    return copy_error(event.error)


cdef void* await_event(event_t* event) noexcept:
    cdef stretto_pending pending
    cdef error_t* error = NULL
    save(&pending)
    try:
        (<Event>event.owner).wait()
        error = copy_error(event.error)
    except BaseException as exception:
        error = error_of(exception)
    restore(&pending)
    return error


cdef void* event_on_ready(void* a) noexcept nogil:
    cdef PJRT_Event_OnReady_Args* args = <PJRT_Event_OnReady_Args*>a
    cdef event_t* event = <event_t*>args.event
    if event.ready:
        (<on_ready_t>args.callback)(copy_error(event.error), args.user_arg)
        return NULL
    if gone():
        return NULL
    with gil:
        return register_callback(event, args)


cdef void* register_callback(event_t* event, PJRT_Event_OnReady_Args* args) noexcept:
    cdef stretto_pending pending
    cdef error_t* error = NULL
    save(&pending)
    try:
        (<Event>event.owner).add_callback(<size_t>args.callback, <size_t>args.user_arg)
    except BaseException as exception:
        error = error_of(exception)
    restore(&pending)
    return error


# ------------------------------------------------------------------------------- devices and memories

cdef struct text_t:
    const char* data
    size_t size

cdef struct memory_t:
    void* owner
    int id
    int kind_id
    text_t kind
    text_t debug_string
    text_t to_string
    void* device

cdef struct device_t:
    void* owner
    int id
    int process_index
    int local_hardware_id
    bint addressable
    text_t kind
    text_t debug_string
    text_t to_string
    void** memories
    size_t num_memories
    void* default_memory
    const void* attributes
    size_t num_attributes


cdef text_t text_of(bytes text):
    cdef text_t result
    result.data, result.size = PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text)
    return result


cdef class Device(Handle):
    """A device of the world; also its own description. ``local_hardware_id`` is -1 on other processes."""

    cdef device_t c
    cdef tuple keep
    cdef readonly tuple memories
    cdef readonly str name
    cdef public object client

    def __cinit__(
        self, int id, int process_index, int local_hardware_id, str kind, str debug_string, str name,
        attributes,
    ):
        texts = (kind.encode(), debug_string.encode(), name.encode())
        self.keep = (texts, attributes)
        self.name = name
        self.c.owner = <void*>self
        self.pointer = &self.c
        self.c.id, self.c.process_index, self.c.local_hardware_id = id, process_index, local_hardware_id
        self.c.addressable = local_hardware_id >= 0
        self.c.kind, self.c.debug_string = text_of(texts[0]), text_of(texts[1])
        self.c.to_string = text_of(texts[2])
        self.c.attributes = <const void*><size_t>attributes.address
        self.c.num_attributes = attributes.count
        self.c.memories, self.c.num_memories, self.c.default_memory = NULL, 0, NULL
        self.memories = ()

    def __dealloc__(self):
        free(self.c.memories)

    def attach(self, tuple memories not None):
        """Set the memories, the default one first. To be called once."""
        cdef Memory memory
        self.memories = memories
        self.c.memories = <void**>malloc(sizeof(void*) * len(memories))
        for i, memory in enumerate(memories):
            self.c.memories[i] = memory.pointer
            memory.c.device = self.pointer
        self.c.num_memories = len(memories)
        self.c.default_memory = self.c.memories[0]

    @property
    def id(self):
        return self.c.id

    @property
    def process_index(self):
        return self.c.process_index

    @property
    def ordinal(self):
        return self.c.local_hardware_id


cdef class Memory(Handle):
    """A memory of one addressable device."""

    cdef memory_t c
    cdef tuple keep
    cdef readonly Device device
    cdef readonly str kind

    def __cinit__(self, int id, int kind_id, str kind, str debug_string, str name, Device device):
        texts = (kind.encode(), debug_string.encode(), name.encode())
        self.keep, self.kind, self.device = texts, kind, device
        self.c.owner = <void*>self
        self.pointer = &self.c
        self.c.id, self.c.kind_id, self.c.device = id, kind_id, device.pointer
        self.c.kind, self.c.debug_string = text_of(texts[0]), text_of(texts[1])
        self.c.to_string = text_of(texts[2])

    @property
    def id(self):
        return self.c.id


cdef void* description_id(void* a) noexcept nogil:
    cdef PJRT_DeviceDescription_Id_Args* args = <PJRT_DeviceDescription_Id_Args*>a
    args.id = (<device_t*>args.device_description).id
    return NULL


cdef void* description_process_index(void* a) noexcept nogil:
    cdef PJRT_DeviceDescription_ProcessIndex_Args* args = <PJRT_DeviceDescription_ProcessIndex_Args*>a
    args.process_index = (<device_t*>args.device_description).process_index
    return NULL


cdef void* description_attributes(void* a) noexcept nogil:
    cdef PJRT_DeviceDescription_Attributes_Args* args = <PJRT_DeviceDescription_Attributes_Args*>a
    cdef device_t* device = <device_t*>args.device_description
    args.attributes, args.num_attributes = <void*>device.attributes, device.num_attributes
    return NULL


cdef void* description_kind(void* a) noexcept nogil:
    cdef PJRT_DeviceDescription_Kind_Args* args = <PJRT_DeviceDescription_Kind_Args*>a
    cdef device_t* device = <device_t*>args.device_description
    args.device_kind, args.device_kind_size = device.kind.data, device.kind.size
    return NULL


cdef void* description_debug_string(void* a) noexcept nogil:
    cdef PJRT_DeviceDescription_DebugString_Args* args = <PJRT_DeviceDescription_DebugString_Args*>a
    cdef device_t* device = <device_t*>args.device_description
    args.debug_string, args.debug_string_size = device.debug_string.data, device.debug_string.size
    return NULL


cdef void* description_to_string(void* a) noexcept nogil:
    cdef PJRT_DeviceDescription_ToString_Args* args = <PJRT_DeviceDescription_ToString_Args*>a
    cdef device_t* device = <device_t*>args.device_description
    args.to_string, args.to_string_size = device.to_string.data, device.to_string.size
    return NULL


cdef void* device_get_description(void* a) noexcept nogil:
    cdef PJRT_Device_GetDescription_Args* args = <PJRT_Device_GetDescription_Args*>a
    args.device_description = args.device
    return NULL


cdef void* device_is_addressable(void* a) noexcept nogil:
    cdef PJRT_Device_IsAddressable_Args* args = <PJRT_Device_IsAddressable_Args*>a
    args.is_addressable = (<device_t*>args.device).addressable
    return NULL


cdef void* device_local_hardware_id(void* a) noexcept nogil:
    cdef PJRT_Device_LocalHardwareId_Args* args = <PJRT_Device_LocalHardwareId_Args*>a
    args.local_hardware_id = (<device_t*>args.device).local_hardware_id
    return NULL


cdef void* device_addressable_memories(void* a) noexcept nogil:
    cdef PJRT_Device_AddressableMemories_Args* args = <PJRT_Device_AddressableMemories_Args*>a
    cdef device_t* device = <device_t*>args.device
    args.memories, args.num_memories = <void*>device.memories, device.num_memories
    return NULL


cdef void* memory_id(void* a) noexcept nogil:
    cdef PJRT_Memory_Id_Args* args = <PJRT_Memory_Id_Args*>a
    args.id = (<memory_t*>args.memory).id
    return NULL


cdef void* memory_kind(void* a) noexcept nogil:
    cdef PJRT_Memory_Kind_Args* args = <PJRT_Memory_Kind_Args*>a
    cdef memory_t* memory = <memory_t*>args.memory
    args.kind, args.kind_size = memory.kind.data, memory.kind.size
    return NULL


cdef void* memory_kind_id(void* a) noexcept nogil:
    cdef PJRT_Memory_Kind_Id_Args* args = <PJRT_Memory_Kind_Id_Args*>a
    args.kind_id = (<memory_t*>args.memory).kind_id
    return NULL


cdef void* memory_debug_string(void* a) noexcept nogil:
    cdef PJRT_Memory_DebugString_Args* args = <PJRT_Memory_DebugString_Args*>a
    cdef memory_t* memory = <memory_t*>args.memory
    args.debug_string, args.debug_string_size = memory.debug_string.data, memory.debug_string.size
    return NULL


cdef void* memory_to_string(void* a) noexcept nogil:
    cdef PJRT_Memory_ToString_Args* args = <PJRT_Memory_ToString_Args*>a
    cdef memory_t* memory = <memory_t*>args.memory
    args.to_string, args.to_string_size = memory.to_string.data, memory.to_string.size
    return NULL


cdef void* memory_addressable_by_devices(void* a) noexcept nogil:
    cdef PJRT_Memory_AddressableByDevices_Args* args = <PJRT_Memory_AddressableByDevices_Args*>a
    args.devices, args.num_devices = <void*>&(<memory_t*>args.memory).device, 1
    return NULL


# ------------------------------------------------------------------------------------------ buffers

@cython.final
cdef class ArrayType:
    """A tensor type as C wants it: code, dimensions, row-major order of dimensions, bytes.

    Made once for each type: buffers point into it.
    """

    cdef readonly object type
    cdef int code
    cdef size_t rank
    cdef int64_t* dimensions
    cdef int64_t* minor_to_major
    cdef size_t nbytes

    def __cinit__(self, type):
        self.type = type
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


@cython.final
cdef class Buffer(Handle):
    """A value in a memory.

    It holds a ``Value``, or the engine's array alone, from which the ``Value`` is made when somebody
    asks for it; neither once the buffer was deleted or donated.
    """

    cdef buffer_t c
    cdef object array
    cdef object value
    cdef readonly ArrayType array_type
    cdef readonly Memory memory
    cdef readonly int external_references
    cdef object lent

    def __cinit__(self):
        self.c.owner = <void*>self
        self.pointer = &self.c
        self.c.deleted = self.c.ready = False

    cdef inline void set(self, object value, object array, ArrayType type, Memory memory) noexcept:
        self.value, self.array, self.array_type, self.memory = value, array, type, memory
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
            self.value = make_value(self.array, self.array_type.type, self.memory)
        return self.value

    def live_value(self):
        """The value. Raises ``ValueError`` if the buffer was deleted or donated."""
        return self.alive()

    cdef object issued_array(self):
        """The engine's array, or None if it is not there yet or will never be."""
        if self.array is None and not self.c.deleted and self.value.is_ready():
            try:
                self.array = self.value.array()
            except Exception:
                return None
        return self.array

    def delete(self):
        """Give up the value. Its memory is freed when its last user is done."""
        self.c.deleted = True
        if self.external_references:
            self.lent = (self.value, self.array)
        self.value = self.array = None

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

    def ready_event(self):
        """Pointer, owned by the caller, to an event for the value being computed."""
        cdef Event event
        if self.c.deleted:
            event = Event()
            event.complete(ValueError("the buffer has been deleted or donated"))
            return give(event)
        event = Event(self.alive())
        if event.poll() and event.c.error == NULL:
            self.c.ready = True
            return <size_t>&always_ready
        return give(event)


# Makes the ``Value`` of (engine array, type, memory); set by `install`.
cdef object make_value = None


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
    (<PJRT_Buffer_IsOnCpu_Args*>a).is_on_cpu = True
    return NULL


cdef void* buffer_is_deleted(void* a) noexcept nogil:
    cdef PJRT_Buffer_IsDeleted_Args* args = <PJRT_Buffer_IsDeleted_Args*>a
    args.is_deleted = (<buffer_t*>args.buffer).deleted
    return NULL


cdef void* buffer_ready_event(void* a) noexcept nogil:
    cdef PJRT_Buffer_ReadyEvent_Args* args = <PJRT_Buffer_ReadyEvent_Args*>a
    cdef buffer_t* buffer = <buffer_t*>args.buffer
    if gone() or (buffer.ready and not buffer.deleted):
        args.event = &always_ready
        return NULL
    with gil:
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


# -------------------------------------------------------------------------------------- executables

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


cdef void* completion(list outputs, issued) except NULL:
    """Event, owned by the caller, for the end of a run that gave these values on one device.

    ``issued`` is the run's own event, or None if all of it was issued by the time it returned.
    """
    cdef Event event
    if outputs:
        event = Event(outputs[len(outputs) - 1])
    elif issued is None:
        return &always_ready
    else:
        event = Event()
        issued.add_callback(lambda: event.complete(issued.error))
    return event.hand_out()


cdef class LoadedExecutable(Handle):
    """A program ready to run on the local devices among its own; its subclass in Python has the details."""

    cdef loaded_t c
    cdef object run
    cdef object copy
    cdef object single
    cdef object engine
    cdef list output_types
    cdef list output_memories
    cdef tuple donated
    cdef tuple devices
    cdef size_t num_parameters

    def __cinit__(self, *args, **kwargs):
        self.c.owner = <void*>self
        self.c.deleted = False
        self.pointer = &self.c

    def prepare(
        self, run, copy, single, engine, size_t num_parameters, tuple donated not None,
        list output_types not None, list output_memories not None, tuple devices not None,
    ):
        """What `Execute` needs.

        ``run(arguments)`` takes a list of values for each local device and gives such lists of results, and
        an event that is set once the run has been issued, or None. ``single(ordinal, arrays)`` is the
        engine's way to do the same for one device, with arrays that are there, or None. ``copy(value)``
        copies a value; ``donated`` are the parameters that a run consumes; ``output_memories`` has a
        list for each of ``devices``, the local ones in the order of the arguments.
        """
        self.run, self.copy, self.engine, self.num_parameters = run, copy, engine, num_parameters
        self.single = single if len(devices) == 1 and not donated else None
        self.donated, self.devices = donated, devices
        self.output_types, self.output_memories = output_types, output_memories

    @property
    def is_deleted(self):
        return self.c.deleted

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

    cdef int execute(self, PJRT_LoadedExecutable_Execute_Args* args) except -1:
        self.check(args)
        if self.single is None or not self.execute_single(args):
            self.execute_program(args)
        return 0

    cdef bint execute_single(self, PJRT_LoadedExecutable_Execute_Args* args) except -1:
        """The short way, for one segment on one device. False if an argument is not there yet."""
        cdef void** handles = (<void***>args.argument_lists)[0]
        cdef void** out = (<void***>args.output_lists)[0]
        cdef list row = [], memories = <list>PyList_GET_ITEM(self.output_memories, 0), arrays
        cdef size_t i
        cdef object array
        cdef Device device = <Device>self.devices[0]
        for i in range(args.num_args):
            array = (<Buffer>(<handle_t*>handles[i]).owner).issued_array()
            if array is None:
                return False
            row.append(array)
        arrays = self.single(device.c.local_hardware_id, row)
        for i in range(<size_t>len(arrays)):
            out[i] = self.output(None, <object>PyList_GET_ITEM(arrays, i), i, memories)
        if args.device_complete_events != NULL:
            (<void**>args.device_complete_events)[0] = (
                self.array_event(<Buffer>(<handle_t*>out[len(arrays) - 1]).owner)
                if arrays
                else &always_ready
            )
        return True

    cdef void* array_event(self, Buffer buffer) except NULL:
        """Event, owned by the caller, for the array of a buffer; cheap if it is computed."""
        cdef Event event
        if self.engine.is_ready(buffer.array):
            try:
                self.engine.block(buffer.array)
                buffer.c.ready = True
                return &always_ready
            except Exception as error:
                event = Event()
                event.complete(error)
        else:
            event = Event(buffer.alive())
        return event.hand_out()

    cdef inline void* output(self, value, array, size_t i, list memories) except NULL:
        cdef Buffer buffer = Buffer.__new__(Buffer)
        buffer.set(
            value,
            array,
            <ArrayType>PyList_GET_ITEM(self.output_types, i),
            <Memory>PyList_GET_ITEM(memories, i),
        )
        Py_INCREF(buffer)
        return buffer.pointer

    cdef int execute_program(self, PJRT_LoadedExecutable_Execute_Args* args) except -1:
        cdef size_t d, i
        cdef list row, arguments, results, outputs, memories
        cdef object value, issued
        cdef Buffer buffer
        cdef void** handles
        cdef PJRT_ExecuteOptions* options = <PJRT_ExecuteOptions*>args.options
        arguments = []
        for d in range(args.num_devices):
            handles = (<void***>args.argument_lists)[d]
            row = []
            for i in range(args.num_args):
                row.append((<Buffer>(<handle_t*>handles[i]).owner).alive())
            for i in self.donated:
                buffer = <Buffer>(<handle_t*>handles[i]).owner
                if buffer.external_references or not self.may_donate(options, i):
                    row[i] = self.copy(buffer.value)
            arguments.append(row)
        results, issued = self.run(arguments)
        for d in range(args.num_devices):
            handles = (<void***>args.argument_lists)[d]
            for i in self.donated:
                if self.may_donate(options, i):
                    (<Buffer>(<handle_t*>handles[i]).owner).delete()
            outputs = <list>PyList_GET_ITEM(results, d)
            memories = <list>PyList_GET_ITEM(self.output_memories, d)
            for i in range(<size_t>len(outputs)):
                value = <object>PyList_GET_ITEM(outputs, i)
                (<void***>args.output_lists)[d][i] = self.output(value, None, i, memories)
            if args.device_complete_events != NULL:
                (<void**>args.device_complete_events)[d] = completion(outputs, issued)
        return 0


cdef void* execute(void* a) noexcept nogil:
    cdef PJRT_LoadedExecutable_Execute_Args* args = <PJRT_LoadedExecutable_Execute_Args*>a
    if gone():
        return new_error(1, b"the interpreter is going away", 29)
    with gil:
        return run_executable(args)


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


# -------------------------------------------------------------------------------------------- table

cdef PJRT_Api api
memset(&api, 0, sizeof(api))
api.struct_size = sizeof(api)
api.pjrt_api_version.struct_size = sizeof(api.pjrt_api_version)
api.pjrt_api_version.major_version = _abi.MAJOR
api.pjrt_api_version.minor_version = _abi.MINOR
fill(&api)
api.PJRT_Error_Destroy = error_destroy
api.PJRT_Error_Message = error_message
api.PJRT_Error_GetCode = error_get_code
api.PJRT_Event_Destroy = event_destroy
api.PJRT_Event_IsReady = event_is_ready
api.PJRT_Event_Error = event_error
api.PJRT_Event_Await = event_await
api.PJRT_Event_OnReady = event_on_ready
api.PJRT_DeviceDescription_Id = description_id
api.PJRT_DeviceDescription_ProcessIndex = description_process_index
api.PJRT_DeviceDescription_Attributes = description_attributes
api.PJRT_DeviceDescription_Kind = description_kind
api.PJRT_DeviceDescription_DebugString = description_debug_string
api.PJRT_DeviceDescription_ToString = description_to_string
api.PJRT_Device_GetDescription = device_get_description
api.PJRT_Device_IsAddressable = device_is_addressable
api.PJRT_Device_LocalHardwareId = device_local_hardware_id
api.PJRT_Device_AddressableMemories = device_addressable_memories
api.PJRT_Device_DefaultMemory = device_default_memory
api.PJRT_Memory_Id = memory_id
api.PJRT_Memory_Kind = memory_kind
api.PJRT_Memory_Kind_Id = memory_kind_id
api.PJRT_Memory_DebugString = memory_debug_string
api.PJRT_Memory_ToString = memory_to_string
api.PJRT_Memory_AddressableByDevices = memory_addressable_by_devices
api.PJRT_Buffer_ElementType = buffer_element_type
api.PJRT_Buffer_Dimensions = buffer_dimensions
api.PJRT_Buffer_UnpaddedDimensions = buffer_dimensions
api.PJRT_Buffer_DynamicDimensionIndices = buffer_dynamic_dimensions
api.PJRT_Buffer_GetMemoryLayout = buffer_memory_layout
api.PJRT_Buffer_OnDeviceSizeInBytes = buffer_size
api.PJRT_Buffer_Device = buffer_device
api.PJRT_Buffer_Memory = buffer_memory
api.PJRT_Buffer_IsOnCpu = buffer_is_on_cpu
api.PJRT_Buffer_IsDeleted = buffer_is_deleted
api.PJRT_Buffer_ReadyEvent = buffer_ready_event
api.PJRT_Executable_NumReplicas = executable_num_replicas
api.PJRT_Executable_NumPartitions = executable_num_partitions
api.PJRT_Executable_NumOutputs = executable_num_outputs
api.PJRT_LoadedExecutable_IsDeleted = loaded_is_deleted
api.PJRT_LoadedExecutable_Execute = execute
api.PJRT_Client_Destroy = destroy
api.PJRT_Executable_Destroy = destroy
api.PJRT_LoadedExecutable_Destroy = destroy
api.PJRT_Buffer_Destroy = destroy
api.PJRT_TopologyDescription_Destroy = destroy
api.PJRT_ExecuteContext_Destroy = destroy
api.PJRT_AsyncHostToDeviceTransferManager_Destroy = destroy
api.PJRT_AsyncTrackingEvent_Destroy = destroy
exported_table = &api


def install(list functions not None, describe_exception, value_of_array):
    """Set the handlers, in the order of ``abi.FUNCTIONS``, and what the C face asks of Python.

    A handler takes the address of its arguments; None stands for a function that is not implemented.
    ``describe_exception(exception)`` gives a status code and a message as bytes;
    ``value_of_array(array, type, memory)`` the ``Value`` of an engine's array.
    """
    global handlers, describe, make_value
    if len(functions) != len(names):
        raise ValueError(f"{len(functions)} handlers for {len(names)} functions")
    handlers, describe, make_value = functions, describe_exception, value_of_array


def capsule():
    """The table, as JAX takes it from a plugin that lives in the process."""
    return PyCapsule_New(<void*>&api, b"pjrt_c_api", NULL)


def table_address():
    """Address of the table."""
    return <size_t>&api
