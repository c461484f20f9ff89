# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Collectives that compiled code calls itself: the handler behind the custom calls of a `Table`'s sites.

A program, or a loop of it, that an engine got whole contains a custom call for each collective. XLA calls
`_arrive` there, on whatever thread runs the device. Devices meet in groups: all members but the last leave
their addresses and an unfinished future behind, which lets go of the thread; the last one moves the data and
finishes the others' futures, which runs the others up to where they wait next. No thread ever waits in here, so
no device waits for a thread that another one holds, and on few cores nobody needs to be woken up.

Where the members have much to compute between two collectives, their futures are finished by the threads of
a pool, one for each core (`start_helpers`), instead of one after the other.

Invariants:

- A table's fields change under its mutex only; futures are finished, and data is moved, without it. A group is
  used again only by members whose future is finished, so what the last member copied out of it holds.
- ``running`` counts devices that neither wait nor have ended. When it drops to 0 while some wait and no
  message is under way, nobody will ever come: all that wait fail at once, with what each of them waits for.
- A group that other processes are in has a `wire_t`, whose messages the last member that comes here posts. Where
  there is one device here, it waits for them where it is. Where there are more, they are left to the thread in
  `Table.wait`, which runs the members on when the messages have come: whoever comes in here still waits for nobody.
  So one thread at a time asks MPI for a wire's messages, and it needs no lock.
- A thread that must not block may run a device that is alone here, with a limit (`Table.hurry`). Where messages are
  late then, the handler gives the run up, and another thread runs the code once more (`Table.resume`): sites that have
  given their results give them again, and the one that was given up waits on for the messages that it has posted. So
  this is for code that calls each site once at most.
- The declarations of XLA's FFI (``xla/ffi/api/c_api.h``, version 0.1 or later, which XLA keeps compatible) have the
  fields used here in their order; sizes tell XLA which ones are known. A test compares them with jaxlib's header.
"""

from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset, strlen

cdef extern from *:
    """
    #include <pthread.h>
    #include <sched.h>
    #include <time.h>
    #include <stdint.h>
    #ifdef __linux__
    #include <sys/prctl.h>
    #endif

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
    typedef struct {
        size_t size; void* next; ffi_version version; void* internal;
        void* (*error_create)(ffi_error_args*);
        void *error_message; void (*error_destroy)(ffi_future_args*);
        void *handler_register, *stream_get, *type_register, *context_get, *state_set, *state_get;
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

    static double stretto_now(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    }

    /* Wait until a time of the clock of `stretto_now`; whether it has come. */
    static int stretto_wait(pthread_cond_t* condition, pthread_mutex_t* mutex, double until) {
        double left = until - stretto_now();
        struct timespec t;
        if (left <= 0) return 1;
        clock_gettime(CLOCK_REALTIME, &t);
        left += (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
        t.tv_sec = (time_t)left;
        t.tv_nsec = (long)((left - (double)t.tv_sec) * 1e9);
        pthread_cond_timedwait(condition, mutex, &t);
        return 0;
    }

    /* Until when this thread may wait for other processes' messages, on the clock of `stretto_now`; 0: for ever. */
    static __thread double stretto_until = 0.0;

    /* MPI's functions, by their addresses. Handles are integers or pointers, which calls pass alike. */
    typedef int (*mpi_message)(void*, int, uintptr_t, int, int, uintptr_t, void*);
    typedef int (*mpi_testall)(int, void*, int*, void*);

    """
    ctypedef int (*mpi_message)(void*, int, uintptr_t, int, int, uintptr_t, void*) noexcept nogil
    ctypedef int (*mpi_testall)(int, void*, int*, void*) noexcept nogil
    double until_then "stretto_until"
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
    ctypedef struct ffi_api:
        void* (*error_create)(ffi_error_args*) noexcept nogil
        void (*error_destroy)(ffi_future_args*) noexcept nogil
        void* (*future_create)(ffi_future_args*) noexcept nogil
        void* (*future_set_available)(ffi_future_args*) noexcept nogil
        void* (*future_set_error)(ffi_future_error_args*) noexcept nogil
    ctypedef struct ffi_frame:
        ffi_extension* extension
        const ffi_api* api
        int32_t stage
        ffi_list arguments
        ffi_list results
        ffi_attributes attributes
        void* future
    const int FFI_EXTENSION_METADATA, FFI_STAGE_EXECUTE, FFI_INTERNAL
    double now "stretto_now"() noexcept nogil

    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    ctypedef unsigned long pthread_t
    int pthread_mutex_init(pthread_mutex_t*, void*) noexcept nogil
    int pthread_mutex_lock(pthread_mutex_t*) noexcept nogil
    int pthread_mutex_trylock(pthread_mutex_t*) noexcept nogil
    int pthread_mutex_unlock(pthread_mutex_t*) noexcept nogil
    int pthread_mutex_destroy(pthread_mutex_t*) noexcept nogil
    int pthread_cond_init(pthread_cond_t*, void*) noexcept nogil
    int pthread_cond_signal(pthread_cond_t*) noexcept nogil
    int pthread_cond_destroy(pthread_cond_t*) noexcept nogil
    bint stretto_wait(pthread_cond_t*, pthread_mutex_t*, double until) noexcept nogil
    int pthread_cond_wait(pthread_cond_t*, pthread_mutex_t*) noexcept nogil
    int pthread_create(pthread_t*, void*, void* (*)(void*) noexcept nogil, void*) noexcept nogil
    int pthread_detach(pthread_t) noexcept nogil

# What a site does, see `perform`. The names are those of `stretto.collectives.ops.Kind`.
cdef enum:
    ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, TUPLE_ALL_TO_ALL, BROADCAST, PERMUTE

KINDS = {
    "all-reduce": ALL_REDUCE,
    "all-gather": ALL_GATHER,
    "reduce-scatter": REDUCE_SCATTER,
    "all-to-all": ALL_TO_ALL,
    "all-to-all of tuples": TUPLE_ALL_TO_ALL,
    "collective-broadcast": BROADCAST,
    "collective-permute": PERMUTE,
}

# The site that a device calls when it has come to the end.
cdef int64_t END = -1
# Seconds of compute between two collectives from which on devices are run side by side.
cdef double SIDE_BY_SIDE = 30e-6

ctypedef void (*fold_t)(void*, const void*, int64_t) noexcept nogil

cdef struct leaf_t:
    # Operands are seen as [outer][size of the group, where it is split][inner bytes].
    int64_t outer
    int64_t inner
    int64_t operand_bytes
    int64_t result_bytes
    int64_t item_bytes
    fold_t fold

# What is done with bytes of the stage, of operands and results: see `wires.Action`.
cdef enum:
    COPY, FOLD, ZERO

cdef enum:
    STAGE, OPERAND, RESULT

cdef struct place_t:
    int where
    int index
    int64_t offset

cdef struct action_t:
    int what
    place_t to
    place_t given
    int64_t nbytes
    int64_t rows
    int64_t to_step
    int64_t from_step
    int64_t item_bytes
    fold_t fold

cdef struct message_t:
    int peer
    int64_t offset
    int64_t nbytes

cdef struct round_t:
    int receives
    int messages  # receives come first
    int actions
    message_t* message
    action_t* action

# Of a group that several processes are in: what is done here. See `wires.Wire`.
cdef struct wire_t:
    char* stage
    int tag
    int before
    int rounds
    int after
    action_t* first
    round_t* round
    action_t* last
    int current  # round
    double began
    void* requests
    void* statuses

# How far a group with a wire has come, in code that calls each site once.
cdef enum:
    NOT_BEGUN, POSTED, GIVEN

cdef struct group_t:
    int size
    int arrived
    int came  # see above
    int64_t calls
    wire_t* wire  # NULL where all members are of this process
    int* members  # positions of devices
    int* sources  # of a permute: for each member the index of the one that sends to it, or -1
    void** operands  # [member][operand]
    void** results
    void** futures  # NULL for members that have not come

cdef struct site_t:
    int kind
    int operands
    int results
    leaf_t* leaves  # one for each operand; results run in parallel
    group_t* groups
    int num_groups
    int* group_of  # by position: the group, or -1
    int* index_of  # by position: the member
    double compute  # seconds that a member runs until it waits again, smoothed
    char* name

cdef struct row_t:
    int32_t site
    int32_t group
    double began
    double ended

cdef struct pending_t:
    int site
    int group

cdef struct table_t:
    pthread_mutex_t mutex
    pthread_cond_t over
    int devices
    int running
    int ended
    site_t* sites
    int num_sites
    char* failure  # NULL, or why all who come are turned away
    bint late  # the run was given up, to be resumed
    bint resumed
    const ffi_api* api
    uintptr_t comm  # MPI's communicator of the processes
    double patience  # seconds for which a wait keeps the core busy
    pending_t* pending  # groups whose messages are under way, for `Table.wait`
    int num_pending
    group_t* here  # in which the only device waits for messages, for those who look; `here_site` is its site
    int here_site
    int64_t executed  # sites that the first device came to
    double seconds  # in which messages were under way
    row_t* rows  # NULL unless somebody watches
    int64_t capacity
    int64_t num_rows
    int64_t dropped


# Reductions: out[i] = out[i] op in[i]. Integers wrap, so they are added and multiplied without a sign.

ctypedef fused unsigned_t:
    uint8_t
    uint16_t
    uint32_t
    uint64_t

ctypedef fused real_t:
    int8_t
    int16_t
    int32_t
    int64_t
    uint8_t
    uint16_t
    uint32_t
    uint64_t
    float
    double

ctypedef fused float_t:
    float
    double


cdef void fold_wrapping_add(unsigned_t* out, const unsigned_t* given, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] = <unsigned_t>(out[i] + given[i])


cdef void fold_wrapping_multiply(unsigned_t* out, const unsigned_t* given, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] = <unsigned_t>(<uint64_t>out[i] * <uint64_t>given[i])


cdef void fold_and(unsigned_t* out, const unsigned_t* given, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] = out[i] & given[i]


cdef void fold_or(unsigned_t* out, const unsigned_t* given, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] = out[i] | given[i]


cdef void fold_xor(unsigned_t* out, const unsigned_t* given, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] = out[i] ^ given[i]


cdef void fold_add(float_t* out, const float_t* given, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] = out[i] + given[i]


cdef void fold_multiply(float_t* out, const float_t* given, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] = out[i] * given[i]


cdef void fold_complex_multiply(float_t* out, const float_t* given, int64_t n) noexcept nogil:
    """``n`` pairs of real and imaginary part."""
    cdef int64_t i
    cdef float_t real, imaginary
    for i in range(n):
        real = out[2 * i] * given[2 * i] - out[2 * i + 1] * given[2 * i + 1]
        imaginary = out[2 * i] * given[2 * i + 1] + out[2 * i + 1] * given[2 * i]
        out[2 * i], out[2 * i + 1] = real, imaginary


cdef void fold_complex_add(float_t* out, const float_t* given, int64_t n) noexcept nogil:
    fold_add(out, given, 2 * n)


cdef void fold_minimum(real_t* out, const real_t* given, int64_t n) noexcept nogil:
    """NaN where either is NaN."""
    cdef int64_t i
    for i in range(n):
        if real_t is float or real_t is double:
            if out[i] == out[i] and not (out[i] <= given[i]):
                out[i] = given[i]
        else:
            if given[i] < out[i]:
                out[i] = given[i]


cdef void fold_maximum(real_t* out, const real_t* given, int64_t n) noexcept nogil:
    """NaN where either is NaN."""
    cdef int64_t i
    for i in range(n):
        if real_t is float or real_t is double:
            if out[i] == out[i] and not (out[i] >= given[i]):
                out[i] = given[i]
        else:
            if given[i] > out[i]:
                out[i] = given[i]


cdef dict _FOLDS = {}


cdef void _offer(str reduction, str dtypes, fold_t fold):
    for dtype in dtypes.split():
        _FOLDS[reduction, dtype] = <uintptr_t>fold


_offer("add", "s8 u8", <fold_t>fold_wrapping_add[uint8_t])
_offer("add", "s16 u16", <fold_t>fold_wrapping_add[uint16_t])
_offer("add", "s32 u32", <fold_t>fold_wrapping_add[uint32_t])
_offer("add", "s64 u64", <fold_t>fold_wrapping_add[uint64_t])
_offer("add", "f32", <fold_t>fold_add[float])
_offer("add", "f64", <fold_t>fold_add[double])
_offer("add", "c64", <fold_t>fold_complex_add[float])
_offer("add", "c128", <fold_t>fold_complex_add[double])
_offer("multiply", "s8 u8", <fold_t>fold_wrapping_multiply[uint8_t])
_offer("multiply", "s16 u16", <fold_t>fold_wrapping_multiply[uint16_t])
_offer("multiply", "s32 u32", <fold_t>fold_wrapping_multiply[uint32_t])
_offer("multiply", "s64 u64", <fold_t>fold_wrapping_multiply[uint64_t])
_offer("multiply", "f32", <fold_t>fold_multiply[float])
_offer("multiply", "f64", <fold_t>fold_multiply[double])
_offer("multiply", "c64", <fold_t>fold_complex_multiply[float])
_offer("multiply", "c128", <fold_t>fold_complex_multiply[double])
_offer("minimum", "s8", <fold_t>fold_minimum[int8_t])
_offer("minimum", "s16", <fold_t>fold_minimum[int16_t])
_offer("minimum", "s32", <fold_t>fold_minimum[int32_t])
_offer("minimum", "s64", <fold_t>fold_minimum[int64_t])
_offer("minimum", "u8", <fold_t>fold_minimum[uint8_t])
_offer("minimum", "u16", <fold_t>fold_minimum[uint16_t])
_offer("minimum", "u32", <fold_t>fold_minimum[uint32_t])
_offer("minimum", "u64", <fold_t>fold_minimum[uint64_t])
_offer("minimum", "f32", <fold_t>fold_minimum[float])
_offer("minimum", "f64", <fold_t>fold_minimum[double])
_offer("maximum", "s8", <fold_t>fold_maximum[int8_t])
_offer("maximum", "s16", <fold_t>fold_maximum[int16_t])
_offer("maximum", "s32", <fold_t>fold_maximum[int32_t])
_offer("maximum", "s64", <fold_t>fold_maximum[int64_t])
_offer("maximum", "u8", <fold_t>fold_maximum[uint8_t])
_offer("maximum", "u16", <fold_t>fold_maximum[uint16_t])
_offer("maximum", "u32", <fold_t>fold_maximum[uint32_t])
_offer("maximum", "u64", <fold_t>fold_maximum[uint64_t])
_offer("maximum", "f32", <fold_t>fold_maximum[float])
_offer("maximum", "f64", <fold_t>fold_maximum[double])
for _dtypes, _bits in (("s8 u8", 8), ("s16 u16", 16), ("s32 u32", 32), ("s64 u64", 64)):
    if _bits == 8:
        _offer("and", _dtypes, <fold_t>fold_and[uint8_t])
        _offer("or", _dtypes, <fold_t>fold_or[uint8_t])
        _offer("xor", _dtypes, <fold_t>fold_xor[uint8_t])
    elif _bits == 16:
        _offer("and", _dtypes, <fold_t>fold_and[uint16_t])
        _offer("or", _dtypes, <fold_t>fold_or[uint16_t])
        _offer("xor", _dtypes, <fold_t>fold_xor[uint16_t])
    elif _bits == 32:
        _offer("and", _dtypes, <fold_t>fold_and[uint32_t])
        _offer("or", _dtypes, <fold_t>fold_or[uint32_t])
        _offer("xor", _dtypes, <fold_t>fold_xor[uint32_t])
    else:
        _offer("and", _dtypes, <fold_t>fold_and[uint64_t])
        _offer("or", _dtypes, <fold_t>fold_or[uint64_t])
        _offer("xor", _dtypes, <fold_t>fold_xor[uint64_t])
# On pred, whose bytes are 0 and 1, sum and maximum are "any", product and minimum are "all".
for _reduction in ("add", "maximum", "or"):
    _offer(_reduction, "pred", <fold_t>fold_or[uint8_t])
for _reduction in ("multiply", "minimum", "and"):
    _offer(_reduction, "pred", <fold_t>fold_and[uint8_t])
_offer("xor", "pred", <fold_t>fold_xor[uint8_t])


def can_reduce(reduction: str, dtype: str) -> bool:
    """Whether there is a compiled reduction for arrays of this element type (HLO's names)."""
    return (reduction, dtype) in _FOLDS


# Moving data: the last member of a group does it for all.


cdef void perform(site_t* site, group_t* group) noexcept nogil:
    cdef int k, member, size = group.size, count = site.operands, results = site.results
    cdef leaf_t* leaf
    cdef char* first
    for k in range(count):
        leaf = &site.leaves[k]
        if site.kind == ALL_REDUCE:
            first = <char*>group.results[k]
            memcpy(first, group.operands[k], leaf.operand_bytes)
            for member in range(1, size):
                leaf.fold(first, group.operands[member * count + k], leaf.operand_bytes // leaf.item_bytes)
            for member in range(1, size):
                memcpy(group.results[member * results + k], first, leaf.operand_bytes)
        elif site.kind == ALL_GATHER:
            first = <char*>group.results[k]
            for member in range(size):
                copy_rows(
                    first + member * leaf.inner, size * leaf.inner,
                    <char*>group.operands[member * count + k], leaf.inner, leaf.inner, leaf.outer,
                )
            for member in range(1, size):
                memcpy(group.results[member * results + k], first, leaf.result_bytes)
        elif site.kind == REDUCE_SCATTER:
            for member in range(size):
                reduce_part(site, group, k, member)
        elif site.kind == ALL_TO_ALL:
            for member in range(size):
                exchange_part(site, group, k, member)
        elif site.kind == TUPLE_ALL_TO_ALL:
            for member in range(size):
                memcpy(
                    group.results[k * results + member], group.operands[member * count + k], leaf.operand_bytes
                )
        elif site.kind == BROADCAST:
            for member in range(size):
                memcpy(group.results[member * results + k], group.operands[k], leaf.operand_bytes)
        elif site.kind == PERMUTE:
            for member in range(size):
                if group.sources[member] < 0:
                    memset(group.results[member * results + k], 0, leaf.result_bytes)
                else:
                    memcpy(
                        group.results[member * results + k],
                        group.operands[group.sources[member] * count + k],
                        leaf.operand_bytes,
                    )


cdef inline void copy_rows(
    char* to, int64_t to_step, const char* given, int64_t step, int64_t nbytes, int64_t rows
) noexcept nogil:
    cdef int64_t row
    for row in range(rows):
        memcpy(to + row * to_step, given + row * step, nbytes)


cdef void reduce_part(site_t* site, group_t* group, int k, int member) noexcept nogil:
    """The part of a reduce-scatter that ``member`` gets."""
    cdef leaf_t* leaf = &site.leaves[k]
    cdef int other
    cdef int64_t row
    cdef char* to = <char*>group.results[member * site.results + k]
    cdef char* given
    for other in range(group.size):
        given = <char*>group.operands[other * site.operands + k] + member * leaf.inner
        if other == 0:
            copy_rows(to, leaf.inner, given, group.size * leaf.inner, leaf.inner, leaf.outer)
            continue
        for row in range(leaf.outer):
            leaf.fold(
                to + row * leaf.inner, given + row * group.size * leaf.inner, leaf.inner // leaf.item_bytes
            )


cdef void exchange_part(site_t* site, group_t* group, int k, int member) noexcept nogil:
    """What ``member`` of an all-to-all gets."""
    cdef leaf_t* leaf = &site.leaves[k]
    cdef int other
    cdef int64_t step = group.size * leaf.inner
    for other in range(group.size):
        copy_rows(
            <char*>group.results[member * site.results + k] + other * leaf.inner, step,
            <char*>group.operands[other * site.operands + k] + member * leaf.inner, step,
            leaf.inner, leaf.outer,
        )


# Futures and errors.


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


cdef void finish(const ffi_api* api, void* future) noexcept nogil:
    """Run the device behind a future, here, until it waits again or has ended."""
    cdef ffi_future_args args
    args.size, args.next, args.future = sizeof(args), NULL, future
    drop_error(api, api.future_set_available(&args))


cdef void fail(const ffi_api* api, void* future, const char* message) noexcept nogil:
    cdef ffi_future_error_args args
    args.size, args.next, args.future = sizeof(args), NULL, future
    args.error = new_error(api, message)
    drop_error(api, api.future_set_error(&args))


cdef void finish_timed(const ffi_api* api, void* future, site_t* site) noexcept nogil:
    cdef double began = now()
    finish(api, future)
    # Threads may write this at once: it is an estimate.
    site.compute += 0.125 * (now() - began - site.compute)


# Devices whose future is to be finished by whichever thread has time.

cdef struct ready_t:
    const ffi_api* api
    void* future
    site_t* site

cdef enum:
    QUEUE = 4096

cdef struct queue_t:
    pthread_mutex_t mutex
    pthread_cond_t filled
    ready_t items[QUEUE]
    int first
    int count
    int idle
    int helpers

cdef queue_t queue
memset(&queue, 0, sizeof(queue))
pthread_mutex_init(&queue.mutex, NULL)
pthread_cond_init(&queue.filled, NULL)


cdef void* help(void* unused) noexcept nogil:
    cdef ready_t item
    pthread_mutex_lock(&queue.mutex)
    while True:
        while queue.count == 0:
            queue.idle += 1
            pthread_cond_wait(&queue.filled, &queue.mutex)
            queue.idle -= 1
        item = queue.items[queue.first]
        queue.first = (queue.first + 1) % QUEUE
        queue.count -= 1
        pthread_mutex_unlock(&queue.mutex)
        finish_timed(item.api, item.future, item.site)
        pthread_mutex_lock(&queue.mutex)


def start_helpers(int count) -> None:
    """Have at least ``count`` threads that run devices side by side."""
    cdef pthread_t thread
    while queue.helpers < count:
        if pthread_create(&thread, NULL, &help, NULL) != 0:
            return
        pthread_detach(thread)
        queue.helpers += 1


cdef bint hand_over(const ffi_api* api, void* future, site_t* site) noexcept nogil:
    """Leave a device to the helpers; False where there are none, or too many are waiting."""
    cdef bint taken = False
    cdef ready_t* item
    pthread_mutex_lock(&queue.mutex)
    if queue.helpers > 0 and queue.count < QUEUE:
        item = &queue.items[(queue.first + queue.count) % QUEUE]
        item.api, item.future, item.site = api, future, site
        queue.count += 1
        taken = True
        if queue.idle > 0:
            pthread_cond_signal(&queue.filled)
    pthread_mutex_unlock(&queue.mutex)
    return taken


cdef bint take(ready_t* item) noexcept nogil:
    cdef bint found = False
    pthread_mutex_lock(&queue.mutex)
    if queue.count > 0:
        item[0] = queue.items[queue.first]
        queue.first = (queue.first + 1) % QUEUE
        queue.count -= 1
        found = True
    pthread_mutex_unlock(&queue.mutex)
    return found


cdef void release(const ffi_api* api, site_t* site, void** futures, int count) noexcept nogil:
    """Go on with these members; the caller's own goes on when this returns."""
    cdef int k
    cdef ready_t item
    if site.compute > SIDE_BY_SIDE and queue.helpers > 0:
        for k in range(count):
            if not hand_over(api, futures[k], site):
                finish_timed(api, futures[k], site)
        # The caller's own device is one more: it leaves the helpers their share.
        while queue.count > queue.helpers and take(&item):
            finish_timed(item.api, item.future, item.site)
        return
    for k in range(count):
        finish_timed(api, futures[k], site)


# The handler.

cdef enum:
    MESSAGE = 1024


cdef void* _arrive(ffi_frame* frame) noexcept nogil:
    cdef ffi_metadata_extension* asked
    if frame.extension != NULL and frame.extension.type == FFI_EXTENSION_METADATA:
        asked = <ffi_metadata_extension*>frame.extension
        asked.metadata.version.major, asked.metadata.version.minor = 0, 1
        asked.metadata.traits = 0
        if asked.metadata.size >= sizeof(ffi_metadata):  # older ones have no state
            asked.metadata.state = 0
        return NULL
    if frame.stage != FFI_STAGE_EXECUTE:
        return NULL
    cdef uint64_t* context = <uint64_t*>(<ffi_buffer*>frame.arguments.items[0]).data
    cdef table_t* table = <table_t*>context[0]
    cdef int position = <int>context[1]
    cdef int64_t number = (<int64_t*>(<ffi_scalar*>frame.attributes.items[0]).value)[0]
    table.api = frame.api
    if number == END:
        pthread_mutex_lock(&table.mutex)
        table.running -= 1
        table.ended += 1
        if table.ended == table.devices:
            pthread_cond_signal(&table.over)
        settle(table)  # unlocks
        return NULL
    return meet(table, &table.sites[number], <int>number, position, frame)


cdef void* meet(table_t* table, site_t* site, int number, int position, ffi_frame* frame) noexcept nogil:
    # Arguments: the context, the chain that keeps sites in order, the operands. Results: the chain, the results.
    cdef int which = site.group_of[position], k, index, size, other, state
    cdef double began
    cdef bint again
    cdef group_t* group
    cdef ffi_future_args args
    cdef void* error = NULL
    cdef void** futures
    cdef void* few[64]
    if position == 0:
        table.executed += 1
    if which < 0:
        if table.failure != NULL:
            return new_error(frame.api, table.failure)
        for k in range(site.results):
            memset(
                (<ffi_buffer*>frame.results.items[1 + k]).data, 0,
                site.leaves[k if k < site.operands else 0].result_bytes,
            )
        return NULL
    group, index = &site.groups[which], site.index_of[position]
    size = group.size
    pthread_mutex_lock(&table.mutex)
    if table.failure != NULL:
        pthread_mutex_unlock(&table.mutex)
        return new_error(frame.api, table.failure)
    for k in range(site.operands):
        group.operands[index * site.operands + k] = (<ffi_buffer*>frame.arguments.items[2 + k]).data
    for k in range(site.results):
        group.results[index * site.results + k] = (<ffi_buffer*>frame.results.items[1 + k]).data
    if group.arrived + 1 < size:
        args.size, args.next, args.future = sizeof(args), NULL, NULL
        error = frame.api.future_create(&args)
        if error != NULL:
            pthread_mutex_unlock(&table.mutex)
            return error
        frame.future = group.futures[index] = args.future
        group.arrived += 1
        table.running -= 1
        settle(table)  # unlocks
        return NULL
    if group.wire != NULL:
        pthread_mutex_unlock(&table.mutex)
        state = send_off(table, site, group)
        pthread_mutex_lock(&table.mutex)
        if state < 0 and table.failure == NULL:
            fail_all(table, MPI_FAILED)  # unlocks
            pthread_mutex_lock(&table.mutex)
        if table.failure != NULL:
            pthread_mutex_unlock(&table.mutex)
            return new_error(frame.api, table.failure)
        if state == LATE:
            table.late = True
            pthread_mutex_unlock(&table.mutex)
            return new_error(frame.api, b"other processes are late")
        if state == 0:
            return leave(table, number, which, index, frame)  # unlocks
    futures = &few[0]
    if size > 64:
        futures = <void**>calloc(size, sizeof(void*))
    k = 0
    for other in range(size):
        if other != index:
            futures[k] = group.futures[other]
            group.futures[other] = NULL
            k += 1
    group.arrived = 0
    again = table.resumed and group.came == GIVEN
    if not again:
        group.calls += 1
    group.came = GIVEN
    table.running += size - 1
    pthread_mutex_unlock(&table.mutex)
    began = now() if group.wire == NULL and table.rows != NULL else 0.0
    if group.wire == NULL:
        perform(site, group)
    else:
        act(group.wire.last, group.wire.after, group, group.wire)
        began = group.wire.began
        if not again:
            table.seconds += now() - began
    if table.rows != NULL and not again:
        note(table, number, which, began)
    release(frame.api, site, futures, size - 1)
    if futures != &few[0]:
        free(futures)
    return NULL


cdef int send_off(table_t* table, site_t* site, group_t* group) noexcept nogil:
    """All local members of a group have come: its messages can be sent. The state as of `poll`."""
    cdef wire_t* wire = group.wire
    cdef int state
    if table.resumed and group.came == GIVEN:
        return 1
    if not table.resumed or group.came != POSTED:
        wire.began = now()
        wire.current = 0
        act(wire.first, wire.before, group, wire)
        if post(table, wire) < 0:
            return -1
        group.came = POSTED
    if table.devices > 1:
        return poll(table, group)
    table.here_site, table.here = <int>(site - table.sites), group
    state = wait_here(table, group)
    table.here = NULL
    return state


cdef void* leave(table_t* table, int number, int which, int index, ffi_frame* frame) noexcept nogil:
    """Leave a group whose messages are under way, this device too. Called with the mutex, which it gives back."""
    cdef group_t* group = &table.sites[number].groups[which]
    cdef ffi_future_args args
    cdef void* error
    args.size, args.next, args.future = sizeof(args), NULL, NULL
    error = frame.api.future_create(&args)
    if error != NULL:
        pthread_mutex_unlock(&table.mutex)
        return error
    frame.future = group.futures[index] = args.future
    group.arrived += 1
    table.running -= 1
    table.pending[table.num_pending].site = number
    table.pending[table.num_pending].group = which
    table.num_pending += 1
    pthread_cond_signal(&table.over)
    pthread_mutex_unlock(&table.mutex)
    return NULL


# Messages between processes.

cdef struct mpi_t:
    mpi_message isend
    mpi_message irecv
    mpi_testall testall
    uintptr_t byte
    int request_bytes
    int status_bytes

cdef const char* MPI_FAILED = b"MPI failed in a collective that compiled code called"
cdef mpi_t mpi
memset(&mpi, 0, sizeof(mpi))

include "_giving_way.pxi"

# Polls between two looks at the clock; what `send_off` gives where the thread may wait no longer.
cdef enum:
    POLLS = 8
    LATE = 2
# As in `waiting`: a sleep is this part of the time waited so far, within these bounds in seconds.
cdef double PART = 0.1, LONGEST = 500e-6


def use_mpi(uintptr_t isend, uintptr_t irecv, uintptr_t testall, uintptr_t byte, int request_bytes, int status_bytes) -> None:
    """Addresses of MPI's functions, its handle of a byte, and the sizes of its requests and statuses."""
    mpi.isend, mpi.irecv, mpi.testall = <mpi_message>isend, <mpi_message>irecv, <mpi_testall>testall
    mpi.byte, mpi.request_bytes, mpi.status_bytes = byte, request_bytes, status_bytes


cdef inline char* at(place_t* place, group_t* group, wire_t* wire) noexcept nogil:
    if place.where == STAGE:
        return wire.stage + place.offset
    if place.where == OPERAND:
        return <char*>group.operands[place.index] + place.offset
    return <char*>group.results[place.index] + place.offset


cdef void act(action_t* actions, int count, group_t* group, wire_t* wire) noexcept nogil:
    cdef int k
    cdef int64_t row
    cdef action_t* action
    cdef char* to
    cdef char* given
    for k in range(count):
        action = &actions[k]
        to, given = at(&action.to, group, wire), at(&action.given, group, wire)
        if action.what == COPY:
            copy_rows(to, action.to_step, given, action.from_step, action.nbytes, action.rows)
        elif action.what == ZERO:
            memset(to, 0, action.nbytes)
        else:
            for row in range(action.rows):
                action.fold(
                    to + row * action.to_step, given + row * action.from_step,
                    action.nbytes // action.item_bytes,
                )


cdef int post(table_t* table, wire_t* wire) noexcept nogil:
    """Post the messages of the current round; negative where MPI refuses."""
    cdef round_t* round = &wire.round[wire.current]
    cdef message_t* message
    cdef mpi_message call
    cdef int k
    for k in range(round.messages):
        message = &round.message[k]
        call = mpi.irecv if k < round.receives else mpi.isend
        if call(
            wire.stage + message.offset, <int>message.nbytes, mpi.byte, message.peer, wire.tag, table.comm,
            <char*>wire.requests + k * mpi.request_bytes,
        ) != 0:
            return -1
    return 0


cdef int poll(table_t* table, group_t* group) noexcept nogil:
    """Go on with the rounds as far as messages have come: 1 after the last, 0 before, negative on failure."""
    cdef wire_t* wire = group.wire
    cdef round_t* round
    cdef int done = 0
    while wire.current < wire.rounds:
        round = &wire.round[wire.current]
        if round.messages > 0:
            if mpi.testall(round.messages, wire.requests, &done, wire.statuses) != 0:
                return -1
            if not done:
                return 0
        act(round.action, round.actions, group, wire)
        wire.current += 1
        if wire.current < wire.rounds and post(table, wire) < 0:
            return -1
    return 1


cdef int wait_here(table_t* table, group_t* group) noexcept nogil:
    cdef int k, state
    cdef double until = until_then
    while True:
        for k in range(POLLS):
            state = poll(table, group)
            if state != 0:
                return state
        if table.failure != NULL:
            return -1
        if until > 0.0 and now() > until:
            return LATE
        relax(table, group.wire.began)


cdef bint drive(table_t* table) noexcept nogil:
    """Poll all messages under way once, and run on whom they were for; whether there were any."""
    cdef pending_t item
    cdef site_t* site
    cdef group_t* group
    cdef int k = 0, state, m, count
    cdef bint moved = False
    cdef void** futures
    cdef const char* failure
    while True:
        pthread_mutex_lock(&table.mutex)
        if k >= table.num_pending or table.failure != NULL:
            pthread_mutex_unlock(&table.mutex)
            return moved
        item = table.pending[k]
        pthread_mutex_unlock(&table.mutex)
        site = &table.sites[item.site]
        group = &site.groups[item.group]
        state = poll(table, group)
        if state == 0:
            k += 1
            continue
        pthread_mutex_lock(&table.mutex)
        if table.failure != NULL or state < 0:
            if table.failure == NULL:
                fail_all(table, MPI_FAILED)  # unlocks
            else:
                pthread_mutex_unlock(&table.mutex)
            return True
        futures = <void**>calloc(group.size, sizeof(void*))
        for m in range(group.size):
            futures[m] = group.futures[m]
            group.futures[m] = NULL
        count = group.size
        table.num_pending -= 1
        table.pending[k] = table.pending[table.num_pending]
        table.running += count
        group.arrived = 0
        group.calls += 1
        pthread_mutex_unlock(&table.mutex)
        moved = True
        act(group.wire.last, group.wire.after, group, group.wire)
        table.seconds += now() - group.wire.began
        if table.rows != NULL:
            note(table, item.site, item.group, group.wire.began)
        release(table.api, site, futures, count)
        free(futures)
        k = 0


cdef void relax(table_t* table, double since) noexcept nogil:
    """What a wait does between polls: see `waiting`."""
    cdef double waited = now() - since
    if waited < table.patience:
        if table.patience < 1.0:
            give_way()
        return
    stretto_sleep(min(max(PART * waited, SHORTEST), LONGEST))


cdef void note(table_t* table, int site, int group, double began) noexcept nogil:
    cdef row_t* row
    pthread_mutex_lock(&table.mutex)
    if table.num_rows < table.capacity:
        row = &table.rows[table.num_rows]
        row.site, row.group, row.began, row.ended = site, group, began, now()
        table.num_rows += 1
    else:
        table.dropped += 1
    pthread_mutex_unlock(&table.mutex)


cdef void settle(table_t* table) noexcept nogil:
    """Unlock the table. If devices wait and none runs, tell them that nobody will come."""
    cdef char message[MESSAGE]
    cdef site_t* site
    cdef group_t* group
    cdef int s, g, m
    cdef int64_t used = 0
    if table.running > 0 or table.num_pending > 0 or table.failure != NULL:
        pthread_mutex_unlock(&table.mutex)
        return
    for s in range(table.num_sites):
        site = &table.sites[s]
        for g in range(site.num_groups):
            group = &site.groups[g]
            if group.arrived > 0 and used < MESSAGE - 1:
                used += snprintf(
                    message + used, MESSAGE - used, b"%s%s: %d of %d devices came, the others have ended or wait elsewhere",
                    b"; " if used else b"", site.name, group.arrived, group.size,
                )
    if used == 0:
        pthread_mutex_unlock(&table.mutex)
        return
    fail_all(table, message)  # unlocks


cdef void fail_all(table_t* table, const char* message) noexcept nogil:
    """Turn away who waits and who comes. Called with the mutex, which it gives back."""
    cdef size_t size = strlen(message)
    cdef char* kept = <char*>calloc(size + 1, 1)
    cdef void** waiting = <void**>calloc(table.devices + 1, sizeof(void*))
    cdef int count = 0, s, g, m, k
    cdef group_t* group
    memcpy(kept, message, size)
    table.failure = kept
    for s in range(table.num_sites):
        for g in range(table.sites[s].num_groups):
            group = &table.sites[s].groups[g]
            for m in range(group.size):
                if group.futures[m] != NULL:
                    waiting[count] = group.futures[m]
                    group.futures[m] = NULL
                    count += 1
            group.arrived = 0
    table.num_pending = 0
    table.running += count
    pthread_cond_signal(&table.over)
    pthread_mutex_unlock(&table.mutex)
    for k in range(count):
        fail(table.api, waiting[k], kept)
    free(waiting)


cdef wire_t* new_wire(int tag, object planned, site_t* site) except NULL:
    cdef wire_t* wire = <wire_t*>calloc(1, sizeof(wire_t))
    cdef round_t* round
    cdef int k, n, most = 0
    stage, before, rounds, after = planned
    wire.tag = tag
    wire.stage = <char*>calloc(stage + 1, 1)
    wire.before, wire.rounds, wire.after = len(before), len(rounds), len(after)
    wire.first, wire.last = new_actions(before, site), new_actions(after, site)
    wire.round = <round_t*>calloc(len(rounds) + 1, sizeof(round_t))
    for n, (sends, receives, then) in enumerate(rounds):
        round = &wire.round[n]
        round.receives, round.messages, round.actions = len(receives), len(receives) + len(sends), len(then)
        round.action = new_actions(then, site)
        round.message = <message_t*>calloc(round.messages + 1, sizeof(message_t))
        for k, (peer, offset, nbytes) in enumerate((*receives, *sends)):
            round.message[k].peer, round.message[k].offset, round.message[k].nbytes = peer, offset, nbytes
        most = max(most, round.messages)
    wire.requests = calloc(most + 1, mpi.request_bytes)
    wire.statuses = calloc(most + 1, mpi.status_bytes)
    return wire


cdef action_t* new_actions(object planned, site_t* site) except NULL:
    cdef action_t* actions = <action_t*>calloc(len(planned) + 1, sizeof(action_t))
    cdef action_t* action
    cdef int n
    for n, (what, to, given, nbytes, rows, to_step, from_step, leaf) in enumerate(planned):
        action = &actions[n]
        action.what, action.nbytes, action.rows = what, nbytes, rows
        action.to.where, action.to.index, action.to.offset = to
        action.given.where, action.given.index, action.given.offset = given
        action.to_step, action.from_step = to_step, from_step
        action.item_bytes, action.fold = site.leaves[<int>leaf].item_bytes, site.leaves[<int>leaf].fold
    return actions


cdef void free_wire(wire_t* wire) noexcept:
    cdef int n
    if wire == NULL:
        return
    for n in range(wire.rounds):
        free(wire.round[n].message)
        free(wire.round[n].action)
    free(wire.round)
    free(wire.first)
    free(wire.last)
    free(wire.stage)
    free(wire.requests)
    free(wire.statuses)
    free(wire)


def handler() -> object:
    """The handler's address in a capsule, as ``jax.ffi.register_ffi_target`` takes it."""
    return PyCapsule_New(<void*>&_arrive, NULL, NULL)


cdef class Table:
    """The sites of one region of a program, and the devices of this process that meet there.

    ``Table(devices)`` for so many devices, whose positions are 0, 1, …. `add` describes the sites, `address`
    a part of what each device's code takes as its first argument. Before each run `begin`, then `wait`.
    Where other processes take part, ``comm`` is MPI's handle of their communicator, and ``patience`` for how many
    seconds a wait for them keeps a core busy.
    """

    cdef table_t table
    cdef list _names
    cdef int _wires

    def __cinit__(self, int devices, uintptr_t comm=0, double patience=0.0):
        self.table.devices = devices
        self.table.comm, self.table.patience = comm, patience
        pthread_mutex_init(&self.table.mutex, NULL)
        pthread_cond_init(&self.table.over, NULL)
        self._names = []

    def add(
        self, str kind, list leaves, int results, list groups, str name, list pairs=None, list wires=None
    ) -> None:
        """Describe the next site.

        ``kind``: a key of `KINDS`. ``leaves``: for each operand ``(outer, inner bytes, operand bytes, result
        bytes, item bytes, reduction and element type or None)``. ``groups``: positions of the members of each group,
        in order. ``pairs``: of a permute, (source, target) positions. ``name``: for messages. ``wires``: for
        each group None, or its tag and its `wires.Wire`, whose messages name ranks of the communicator.
        """
        cdef table_t* table = &self.table
        cdef site_t* sites = <site_t*>calloc(table.num_sites + 1, sizeof(site_t))
        cdef site_t* site
        cdef group_t* group
        cdef int k, g, m
        memcpy(sites, table.sites, table.num_sites * sizeof(site_t))
        free(table.sites)
        table.sites = sites
        site = &sites[table.num_sites]
        table.num_sites += 1
        site.kind, site.operands, site.results = KINDS[kind], len(leaves), results
        site.leaves = <leaf_t*>calloc(len(leaves) + 1, sizeof(leaf_t))
        for k, (outer, inner, operand_bytes, result_bytes, item_bytes, reduction) in enumerate(leaves):
            site.leaves[k].outer, site.leaves[k].inner = outer, inner
            site.leaves[k].operand_bytes, site.leaves[k].result_bytes = operand_bytes, result_bytes
            site.leaves[k].item_bytes = item_bytes
            if reduction is not None:
                site.leaves[k].fold = <fold_t><uintptr_t>_FOLDS[reduction]
        site.group_of = <int*>calloc(table.devices, sizeof(int))
        site.index_of = <int*>calloc(table.devices, sizeof(int))
        for k in range(table.devices):
            site.group_of[k] = -1
        site.num_groups = len(groups)
        site.groups = <group_t*>calloc(len(groups) + 1, sizeof(group_t))
        sources = {target: source for source, target in pairs or ()}
        for g, members in enumerate(groups):
            group = &site.groups[g]
            group.size = len(members)
            group.members = <int*>calloc(group.size, sizeof(int))
            group.sources = <int*>calloc(group.size, sizeof(int))
            group.operands = <void**>calloc(group.size * len(leaves) + 1, sizeof(void*))
            group.results = <void**>calloc(group.size * results + 1, sizeof(void*))
            group.futures = <void**>calloc(group.size, sizeof(void*))
            for m, position in enumerate(members):
                group.members[m] = position
                group.sources[m] = members.index(sources[position]) if position in sources else -1
                site.group_of[position], site.index_of[position] = g, m
            if wires is not None and wires[g] is not None:
                group.wire = new_wire(wires[g][0], wires[g][1], site)
                self._wires += 1
        free(table.pending)
        table.pending = <pending_t*>calloc(self._wires + 1, sizeof(pending_t))
        encoded = name.encode()
        self._names.append(encoded)
        site.name = <char*>encoded

    @property
    def address(self) -> int:
        """What the first number of a device's context is; the second is its position."""
        return <uintptr_t>&self.table

    def begin(self, bint watched=False) -> None:
        """All devices are about to run. ``watched``: rows are kept of what they do."""
        cdef table_t* table = &self.table
        cdef int s, g
        free(table.failure)
        table.failure = NULL
        table.running, table.ended = table.devices, 0
        table.num_rows = table.dropped = table.num_pending = table.executed = 0
        table.late = table.resumed = False
        table.seconds = 0.0
        if watched and table.rows == NULL:
            table.capacity = 1 << 16
            table.rows = <row_t*>calloc(table.capacity, sizeof(row_t))
        elif not watched and table.rows != NULL:
            free(table.rows)
            table.rows = NULL
        for s in range(table.num_sites):
            for g in range(table.sites[s].num_groups):
                table.sites[s].groups[g].calls = table.sites[s].groups[g].came = 0

    def hurry(self, double seconds) -> None:
        """From now on this thread waits for other processes for so long at most, then gives the run up (`late`);
        0: as long as it takes."""
        global until_then
        until_then = now() + seconds if seconds > 0.0 else 0.0

    @property
    def late(self) -> bool:
        """Whether the run was given up, so that its code is to be run once more, after `resume`."""
        return self.table.late

    def resume(self) -> None:
        """The only device is about to run once more, after it was `late`, with the same operands."""
        cdef table_t* table = &self.table
        table.late, table.resumed = False, True
        table.running, table.ended, table.executed = table.devices, 0, 0

    @property
    def over(self) -> bool:
        """Whether all devices have come to their end."""
        return self.table.ended == self.table.devices

    @property
    def seconds(self) -> float:
        """For how long messages were under way since `begin`, summed over collectives."""
        return self.table.seconds

    def wait(self, double seconds) -> bool:
        """Wait until all devices have come to their end or were turned away, for so long at most; whether they
        have. Meanwhile devices that other processes' messages arrive for are run on here."""
        cdef table_t* table = &self.table
        cdef double until = now() + seconds, since = 0.0
        cdef bint over = False
        with nogil:
            while True:
                if drive(table):
                    since = 0.0
                pthread_mutex_lock(&table.mutex)
                over = table.ended == table.devices or table.failure != NULL
                if over or now() > until:
                    break
                if table.num_pending == 0:
                    since = 0.0
                    stretto_wait(&table.over, &table.mutex, until)
                    pthread_mutex_unlock(&table.mutex)
                    continue
                pthread_mutex_unlock(&table.mutex)
                if since == 0.0:
                    since = now()
                relax(table, since)
            pthread_mutex_unlock(&table.mutex)
        return over

    @property
    def executed(self) -> int:
        """How many collectives the first device has come to since `begin`."""
        return self.table.executed

    def waiting(self) -> tuple | None:
        """The site whose messages have been under way longest, and since when on the clock of
        ``time.monotonic``; None if there are none, or the handler is at work."""
        cdef table_t* table = &self.table
        cdef int k, site = -1
        cdef double began, since = 0.0
        cdef group_t* here = table.here
        if here != NULL:
            return table.here_site, here.wire.began
        if table.num_pending == 0 or pthread_mutex_trylock(&table.mutex) != 0:
            return None
        for k in range(table.num_pending):
            began = table.sites[table.pending[k].site].groups[table.pending[k].group].wire.began
            if site < 0 or began < since:
                site, since = table.pending[k].site, began
        pthread_mutex_unlock(&table.mutex)
        return None if site < 0 else (site, since)

    def calls(self) -> list:
        """For each site how often it was called since `begin`: as often as the group that did so most."""
        found = []
        for s in range(self.table.num_sites):
            found.append(
                max([self.table.sites[s].groups[g].calls for g in range(self.table.sites[s].num_groups)], default=0)
            )
        return found

    def rows(self) -> tuple:
        """``(site, group, began, ended)`` of each call, in seconds of ``perf_counter``, and how many were dropped."""
        cdef int64_t k
        cdef row_t* row
        listed = []
        for k in range(self.table.num_rows):
            row = &self.table.rows[k]
            listed.append((row.site, row.group, row.began, row.ended))
        return listed, self.table.dropped

    def abort(self, str reason) -> None:
        """Fail all devices that wait, and all that come, with this message, until the next `begin`."""
        cdef bytes message = reason.encode()
        cdef const char* text = message
        with nogil:
            pthread_mutex_lock(&self.table.mutex)
            if self.table.failure != NULL:
                pthread_mutex_unlock(&self.table.mutex)
            else:
                fail_all(&self.table, text)

    @property
    def failure(self) -> str:
        """Why devices were turned away, empty if none was."""
        return "" if self.table.failure == NULL else (<bytes>self.table.failure).decode()

    def __dealloc__(self):
        cdef table_t* table = &self.table
        cdef int s, g
        for s in range(table.num_sites):
            for g in range(table.sites[s].num_groups):
                free(table.sites[s].groups[g].members)
                free(table.sites[s].groups[g].sources)
                free(table.sites[s].groups[g].operands)
                free(table.sites[s].groups[g].results)
                free(table.sites[s].groups[g].futures)
                free_wire(table.sites[s].groups[g].wire)
            free(table.sites[s].groups)
            free(table.sites[s].leaves)
            free(table.sites[s].group_of)
            free(table.sites[s].index_of)
        free(table.sites)
        free(table.failure)
        free(table.rows)
        free(table.pending)
        pthread_cond_destroy(&table.over)
        pthread_mutex_destroy(&table.mutex)
