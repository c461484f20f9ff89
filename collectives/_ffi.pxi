# XLA's FFI, as handlers of custom calls use it (``xla/ffi/api/c_api.h``, version 0.1 or later, which XLA keeps
# compatible): fields in their order; sizes tell XLA which ones are known. A test compares them with jaxlib's header.

cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>

    typedef struct { size_t size; int32_t type; void* next; } ffi_extension;
    typedef struct { size_t size; void* next; int32_t major, minor; } ffi_version;
    typedef struct { size_t size; ffi_version version; uint32_t traits; int64_t state; } ffi_metadata;
    typedef struct { ffi_extension base; ffi_metadata* metadata; } ffi_metadata_extension;
    typedef struct { size_t size; void* next; int32_t dtype; void* data; int64_t rank; int64_t* dims; } ffi_buffer;
    typedef struct { size_t size; void* next; int64_t count; int32_t* types; void** items; } ffi_list;
    typedef struct { size_t size; void* next; int64_t count; int32_t* types; void** names; void** items; } ffi_attributes;
    typedef struct { int32_t dtype; void* value; } ffi_scalar;
    typedef struct { size_t size; void* next; const char* message; int32_t code; } ffi_error_args;
    typedef struct { size_t size; void* next; void* future; } ffi_future_args;
    typedef struct { size_t size; void* next; void* future; void* error; } ffi_future_error_args;
    typedef struct { size_t size; void* next; void* context; void* stream; } ffi_stream_args;
    typedef struct {
        size_t size; void* next; ffi_version version; void* internal;
        void* (*error_create)(ffi_error_args*);
        void *error_message; void (*error_destroy)(ffi_future_args*);
        void* handler_register;
        void* (*stream_get)(ffi_stream_args*);
        void *type_register, *context_get, *state_set, *state_get;
        void *memory_allocate, *memory_free, *pool_schedule, *pool_size;
        void* (*future_create)(ffi_future_args*);
        void* (*future_set_available)(ffi_future_args*);
        void* (*future_set_error)(ffi_future_error_args*);
    } ffi_api;
    typedef struct {
        size_t size; ffi_extension* extension; const ffi_api* api; void* context; int32_t stage;
        ffi_list arguments; ffi_list results; ffi_attributes attributes; void* future;
    } ffi_frame;

    enum { FFI_EXTENSION_METADATA = 1, FFI_STAGE_EXECUTE = 3, FFI_INTERNAL = 13 };
    """
    ctypedef struct ffi_extension:
        int32_t type
    ctypedef struct ffi_version:
        int32_t major
        int32_t minor
    ctypedef struct ffi_metadata:
        size_t size
        ffi_version version
        uint32_t traits
        int64_t state
    ctypedef struct ffi_metadata_extension:
        ffi_metadata* metadata
    ctypedef struct ffi_buffer:
        void* data
    ctypedef struct ffi_list:
        int64_t count
        void** items
    ctypedef struct ffi_attributes:
        int64_t count
        void** items
    ctypedef struct ffi_scalar:
        void* value
    ctypedef struct ffi_error_args:
        size_t size
        void* next
        const char* message
        int32_t code
    ctypedef struct ffi_future_args:
        size_t size
        void* next
        void* future
    ctypedef struct ffi_future_error_args:
        size_t size
        void* next
        void* future
        void* error
    ctypedef struct ffi_stream_args:
        size_t size
        void* next
        void* context
        void* stream
    ctypedef struct ffi_api:
        void* (*stream_get)(ffi_stream_args*) noexcept nogil
        void* (*error_create)(ffi_error_args*) noexcept nogil
        void (*error_destroy)(ffi_future_args*) noexcept nogil
        void* (*future_create)(ffi_future_args*) noexcept nogil
        void* (*future_set_available)(ffi_future_args*) noexcept nogil
        void* (*future_set_error)(ffi_future_error_args*) noexcept nogil
    ctypedef struct ffi_frame:
        ffi_extension* extension
        const ffi_api* api
        void* context
        int32_t stage
        ffi_list arguments
        ffi_list results
        ffi_attributes attributes
        void* future
    const int FFI_EXTENSION_METADATA, FFI_STAGE_EXECUTE, FFI_INTERNAL


cdef void* new_error(const ffi_api* api, const char* message) noexcept nogil:
    cdef ffi_error_args args
    memset(&args, 0, sizeof(args))
    args.size, args.message, args.code = sizeof(args), message, FFI_INTERNAL
    return api.error_create(&args)


cdef void drop_error(const ffi_api* api, void* error) noexcept nogil:
    cdef ffi_future_args args  # of the same form
    if error != NULL:
        args.size, args.next, args.future = sizeof(args), NULL, error
        api.error_destroy(&args)


cdef bint is_question(ffi_frame* frame) noexcept nogil:
    """Whether XLA asks for the version that a handler is written for, which is answered."""
    cdef ffi_metadata_extension* asked
    if frame.extension == NULL or frame.extension.type != FFI_EXTENSION_METADATA:
        return False
    asked = <ffi_metadata_extension*>frame.extension
    asked.metadata.version.major, asked.metadata.version.minor = 0, 1
    asked.metadata.traits = 0
    if asked.metadata.size >= sizeof(ffi_metadata):  # older ones have no state
        asked.metadata.state = 0
    return True
