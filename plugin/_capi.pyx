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
- What jaxlib calls with a lock of its own held never takes the GIL (`_answers.pxi` says what that is).
- Threads that still compute when Python ends rest in the entries that take long (`_ends.pxi`).
- A callback of the caller is called with the GIL released and with no lock held.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_New, PyList_SET_ITEM
from cpython.pycapsule cimport PyCapsule_New
from cpython.pythread cimport (
    NOWAIT_LOCK,
    WAIT_LOCK,
    PyThread_acquire_lock,
    PyThread_allocate_lock,
    PyThread_free_lock,
    PyThread_release_lock,
    PyThread_type_lock,
)
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from cpython.tuple cimport PyTuple_GET_ITEM
from cpython.weakref cimport PyWeakref_CheckRef, PyWeakref_NewRef
from libc.math cimport NAN
from libc.stdint cimport int32_t, int64_t, intptr_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset
from posix.stdlib cimport posix_memalign

from time import perf_counter as _perf_counter

from numpy import ndarray

from stretto.collectives.memory import ALIGNMENT as _ALIGNMENT
from stretto.collectives.types import interned
from stretto.runtime.recording import rows as _rows
from stretto.runtime.recording import trace_file as _trace_file
from stretto.runtime.engines.engine import counted as _counted
from stretto.runtime.execution import compute as _compute
from stretto.runtime.execution.execution import Issued as _Issued

from . import abi as _abi

include "_signals.pxi"

cdef extern from *:
    """
    #if PY_VERSION_HEX >= 0x030D0000
    #define stretto_gone() (!Py_IsInitialized() || Py_IsFinalizing())
    #else
    #define stretto_gone() (!Py_IsInitialized() || _Py_IsFinalizing())
    #endif

    #if PY_VERSION_HEX >= 0x030C0000
    typedef struct { PyObject* raised; int entered; } stretto_pending;
    static inline void stretto_save(stretto_pending* p) {
        p->raised = PyErr_GetRaisedException();
        p->entered = stretto_enter();
    }
    static inline void stretto_restore(stretto_pending* p) {
        stretto_leave(p->entered);
        PyErr_SetRaisedException(p->raised);
    }
    #else
    typedef struct { PyObject *type, *value, *trace; int entered; } stretto_pending;
    static inline void stretto_save(stretto_pending* p) {
        PyErr_Fetch(&p->type, &p->value, &p->trace);
        p->entered = stretto_enter();
    }
    static inline void stretto_restore(stretto_pending* p) {
        stretto_leave(p->entered);
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
        int entered
    bint gone "stretto_gone"() noexcept nogil
    void save "stretto_save"(stretto_pending*) noexcept
    void restore "stretto_restore"(stretto_pending*) noexcept
    const void* exported_table "stretto_table"
    void PyErr_SetInterrupt()

include "_ends.pxi"

cdef extern from "Python.h":
    void* PyGILState_GetThisThreadState() noexcept nogil
    int Py_AddPendingCall(int (*)(void*) noexcept, void*) noexcept nogil
    # With the GIL: an object as it lies in memory, for fields that never change.
    const char* PyBytes_AS_STRING(object) noexcept
    Py_ssize_t PyBytes_GET_SIZE(object) noexcept
    bint PyObject_GC_IsTracked(object) noexcept
    void PyObject_GC_UnTrack(void*) noexcept

include "_pjrt_abi.pxi"

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
    cdef error_t* error
    cdef bint interrupted = isinstance(exception, KeyboardInterrupt)
    try:
        code, text = describe(exception)
        error = new_error(code, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
    except BaseException as another:
        interrupted = interrupted or isinstance(another, KeyboardInterrupt)
        error = new_error(13, b"stretto: an error that cannot be described", 42)
    if interrupted:
        PyErr_SetInterrupt()  # last: the next function in Python that is entered raises it
    return error


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


cdef list handlers = []
cdef tuple names = _abi.ALL_FUNCTIONS


cdef void* dispatch(int number, void* args) noexcept nogil:
    cdef void* error = NULL
    come_in()
    if not gone():
        with gil:
            error = call_handler(number, args)
    go_out()
    return error


cdef int create_client = names.index("PJRT_Client_Create")


cdef void* call_handler(int number, void* args) noexcept:
    cdef stretto_pending pending
    cdef error_t* error = NULL
    cdef int depth
    save(&pending)
    if pending.entered:
        hold_signals()
    # This may wait for other processes, and jaxlib passes its errors on.
    depth = open_signals(pending.entered if number == create_client else 0)
    try:
        handler = handlers[number]
        if handler is None:
            raise NotImplementedError(f"stretto does not implement {names[number]}")
        handler(<size_t>args)
    except BaseException as exception:
        error = error_of(exception)
    close_signals(depth)
    restore(&pending)
    return error


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


cdef int drop_pending(void* handle) noexcept:
    drop(handle)
    return 0


cdef void release(void* handle) noexcept nogil:
    """Drop a handle's reference, on whatever thread.

    A thread of C++ that Python does not know must not wait for the GIL here: it may let go of an executable
    while Python ends, which ends threads that wait, and in a destructor of C++ that aborts the process. It
    leaves the reference to the main thread, unless that has too many to drop already.
    """
    if gone():
        return
    if PyGILState_GetThisThreadState() == NULL and Py_AddPendingCall(drop_pending, handle) == 0:
        return
    with gil:
        drop(handle)


cdef void* destroy(void* a) noexcept nogil:
    """Destroy of any handle: each of these functions has the handle as its only argument."""
    cdef void* handle = (<PJRT_Buffer_Destroy_Args*>a).buffer
    if handle != NULL:
        release(handle)
    return NULL


def deleter():
    """Address of ``void (*)(void* handle)`` that drops what `give` has given."""
    return <size_t>&delete_handle


cdef void delete_handle(void* handle) noexcept nogil:
    if handle != NULL:
        release(handle)


@cython.final
cdef class Bytes(Handle):
    """Bytes that jaxlib holds until it calls their deleter."""

    cdef readonly bytes data

    def __init__(self, bytes data not None):
        self.data = data

    @property
    def address(self):
        return <size_t>PyBytes_AS_STRING(self.data)


include "_events.pxi"
include "_devices.pxi"
include "_buffers.pxi"
include "_answers.pxi"
include "_rows.pxi"
include "_executables.pxi"
include "_profiler.pxi"

cdef PJRT_Api api
memset(&api, 0, sizeof(api))
api.struct_size = sizeof(api)
api.pjrt_api_version.struct_size = sizeof(api.pjrt_api_version)
api.pjrt_api_version.major_version = _abi.MAJOR
api.pjrt_api_version.minor_version = _abi.MINOR
fill(&api)
fill_extensions(&api)
add_profiler(&api)
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
api.PJRT_Client_BufferFromHostBuffer = buffer_from_host
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
api.PJRT_Buffer_Destroy = buffer_destroy
api.PJRT_TopologyDescription_Destroy = destroy
api.PJRT_ExecuteContext_Destroy = destroy
api.PJRT_AsyncHostToDeviceTransferManager_Destroy = destroy
api.PJRT_AsyncTrackingEvent_Destroy = destroy
exported_table = &api


def install(
    list functions not None, describe_exception, value_of, type_of, tell_event_later, run_on_a_thread
):
    """Set the handlers, in the order of ``abi.ALL_FUNCTIONS``, and what the C face asks of Python.

    A handler takes the address of its arguments; None stands for a function that is not implemented.
    ``describe_exception(exception)`` gives a status code and a message as bytes;
    ``value_of(array, promise, position, type, memory)`` the ``Value`` of an engine's array, or of what is promised;
    ``type_of(code, shape)`` the type of an array of a PJRT_Buffer_Type; ``tell_event_later(event)``
    has an event completed when its values are computed; ``run_on_a_thread(function)`` calls a function
    that may wait.
    """
    global handlers, describe, make_value, tensor_type, tell_later, run_elsewhere
    if len(functions) != len(names):
        raise ValueError(f"{len(functions)} handlers for {len(names)} functions")
    handlers, describe = functions, describe_exception
    make_value, tensor_type = value_of, type_of
    tell_later, run_elsewhere = tell_event_later, run_on_a_thread


def capsule():
    """The table, as JAX takes it from a plugin that lives in the process."""
    return PyCapsule_New(<void*>&api, b"pjrt_c_api", NULL)


def table_address():
    """Address of the table."""
    return <size_t>&api
