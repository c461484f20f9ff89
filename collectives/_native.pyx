# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Collectives that compiled code calls itself: the handler behind the custom calls of a `Table`'s sites.

A program, or a loop of it, that an engine got whole contains a custom call for each collective. XLA calls
`_arrive` there, on whatever thread runs the device. Devices meet in groups: all members but the last leave
their addresses and an unfinished future behind, which lets go of the thread; the last one moves the data and
finishes the others' futures, which runs the others up to where they wait next. No thread ever waits in here, so
no device waits for a thread that another one holds, and on few cores nobody needs to be woken up.

Where the members have much to compute between two collectives, their futures are finished by the threads of
a pool, one for each core (`start_helpers`), instead of one after the other. Those whose code calls back into Python take turns on
threads of their own (`_turns.pxi`).

Invariants:

- A table's fields change under its mutex only; futures are finished, and data is moved, without it. A group is
  used again only by members whose future is finished, so what the last member copied out of it holds.
- ``running`` counts devices that neither wait nor have ended. When it drops to 0 while some wait and no
  message is under way, nobody will ever come: all that wait fail at once, with what each of them waits for.
- A group that other processes are in has a `wire_t`, whose messages the last member that comes here posts, through
  memory that processes of one host share (`_shared.pxi`), else over MPI. Where
  there is one device here, it waits for them where it is. Where there are more, they are left to the thread in
  `Table.wait`, which runs the members on when the messages have come: whoever comes in here still waits for nobody.
  So one thread at a time asks MPI for a wire's messages, and it needs no lock.
- What came from a process of this host is read where that one put it, and acknowledged when no site gives its results
  again: at once, or at the end of a run whose sites do (`wire_t.defers`).
- A thread that must not block may run a device that is alone here, with a limit (`Table.begin`). Where messages are
  late then, the handler gives the run up, and another thread runs the code once more (`Table.resume`): sites that have
  given their results give them again, and the one that was given up waits on for the messages that it has posted. So
  this is for code that calls each site once at most. Other code, with loops, is given up at the first of its sites,
  or not at all: the processes are all there once that has its results.
- The declarations of XLA's FFI (``xla/ffi/api/c_api.h``, version 0.1 or later, which XLA keeps compatible) have the
  fields used here in their order; sizes tell XLA which ones are known. A test compares them with jaxlib's header.
"""

import os

from .arena import Arena

cimport cython
from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.math cimport INFINITY
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset, strlen

include "_ffi.pxi"

cdef extern from *:
    """
    #include <pthread.h>
    #include <sched.h>
    #include <time.h>
    #include <stdint.h>
    #ifdef __linux__
    #include <sys/prctl.h>
    #endif

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

    /* Have this thread take denormal numbers for zeros, as XLA's own do while they compute; what it did so far. */
    #if defined(__x86_64__)
    #include <xmmintrin.h>
    static uint64_t stretto_flush(void) {
        uint64_t before = _mm_getcsr();
        _mm_setcsr((unsigned)before | 0x8040);  /* results, and operands */
        return before;
    }
    static void stretto_flush_as(uint64_t before) { _mm_setcsr((unsigned)before); }
    #elif defined(__aarch64__)
    static void stretto_flush_as(uint64_t before) { __asm__ volatile("msr fpcr, %0" : : "r"(before)); }
    static uint64_t stretto_flush(void) {
        uint64_t before;
        __asm__ volatile("mrs %0, fpcr" : "=r"(before));
        stretto_flush_as(before | (uint64_t)1 << 24);
        return before;
    }
    #else
    static uint64_t stretto_flush(void) { return 0; }
    static void stretto_flush_as(uint64_t before) { (void)before; }
    #endif

    /* For how many seconds this thread may still wait for other processes' messages; 0: for ever. */
    static __thread double stretto_left = 0.0;

    /* MPI's functions, by their addresses. Handles are integers or pointers, which calls pass alike. */
    typedef int (*mpi_message)(void*, int, uintptr_t, int, int, uintptr_t, void*);
    typedef int (*mpi_testall)(int, void*, int*, void*);
    typedef int (*mpi_iprobe)(int, int, uintptr_t, int*, void*);
    """
    ctypedef int (*mpi_message)(void*, int, uintptr_t, int, int, uintptr_t, void*) noexcept nogil
    ctypedef int (*mpi_testall)(int, void*, int*, void*) noexcept nogil
    ctypedef int (*mpi_iprobe)(int, int, uintptr_t, int*, void*) noexcept nogil
    double wait_left "stretto_left"
    uint64_t flush_denormals "stretto_flush"() noexcept nogil
    void flush_denormals_as "stretto_flush_as"(uint64_t before) noexcept nogil
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
cdef double MOMENT = 1e-6  # seconds that a thread in a hurry waits for other processes at least

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
    COPIED, BY_THEN, BY_AFTER

cdef enum:
    STAGE, OPERAND, RESULT, ARRIVED

cdef struct message_t:
    int peer
    int64_t offset
    int64_t nbytes
    int read  # how: see `wires.COPIED`
    # Of one between processes of this host:
    uint32_t number
    int state
    char* found

cdef struct place_t:
    int where
    int index
    int64_t offset
    message_t* message  # of ARRIVED

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

cdef struct round_t:
    int receives
    int messages  # receives come first
    int actions
    bint acknowledged
    message_t* message
    action_t* action

# A message that was sent from a stage, and the last one that has been read: see `_shared.pxi`.
cdef struct outstanding_t:
    uint32_t* acknowledged
    uint32_t number

# Memory that messages leave from and come to, of one wire or of several in turns. What other processes read there is
# in memory that they see, twice if it is small: ``turn`` says which one is in use.
cdef struct stage_t:
    char* bytes
    int64_t size
    stage_t* next
    bint near
    int chunk
    int64_t offset
    int64_t whole  # bytes of it, with all halves
    int64_t half
    int halves
    int turn
    int capacity  # messages sent in a collective, at most
    int num_sent[2]  # from each half
    outstanding_t* outstanding[2]

cdef struct shared_t

# Of a group that several processes are in: what is done here. See `wires.Wire`.
cdef struct wire_t:
    stage_t* stage
    char* base  # where in the stage it is this time
    int tag
    shared_t* near  # NULL where MPI carries its messages
    int sent  # messages of the round
    bint defers  # messages that were read in place may be needed again
    wire_t* next
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

# Seconds that a member of a site runs until it waits again, smoothed. ``users``: the table, and threads that run a member.
cdef struct estimate_t:
    double seconds
    int users

cdef struct site_t:
    int kind
    int operands
    int results
    leaf_t* leaves  # one for each operand; results run in parallel
    group_t* groups
    int num_groups
    int64_t idle  # calls by the first device, counted where no group is here
    int* group_of  # by position: the group, or -1
    int* index_of  # by position: the member
    estimate_t* estimate
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
    stage_t* stages
    shared_t* near  # processes of this host, or NULL
    bint far  # MPI carries messages of some wires
    wire_t* deferred  # see `wire_t.defers`
    char* failure  # NULL, or why all who come are turned away
    bint late  # the run was given up, to be resumed
    bint resumed
    bint replays  # sites of a resumed run give their results again
    bint apart  # devices take turns, see `_turns.pxi`
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


# In the order in which they use each other: what reduces, what moves data, how waiting devices go on.
include "_folds.pxi"
include "_moves.pxi"
include "_futures.pxi"
include "_turns.pxi"
include "_giving_way.pxi"
include "_shared.pxi"


# The handler.

cdef enum:
    MESSAGE = 1024


cdef void* _arrive(ffi_frame* frame) noexcept nogil:
    if is_question(frame):
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
            if not table.late:
                acknowledge_deferred(table)
        settle(table)  # unlocks
        return NULL
    return meet(table, &table.sites[number], <int>number, position, frame)


cdef void* meet(table_t* table, site_t* site, int number, int position, ffi_frame* frame) noexcept nogil:
    # Arguments: the context, the chain that keeps sites in order, the operands. Results: the chain, the results.
    global wait_left
    cdef int which = site.group_of[position], k, index, size, other, state
    cdef double began
    cdef bint again
    cdef group_t* group
    cdef void* error = NULL
    cdef void* own = NULL  # this device's future, if it is to wait too
    cdef void** futures
    cdef void* few[64]
    if position == 0:
        table.executed += 1
    if which < 0:
        if position == 0 and site.num_groups == 0:
            site.idle += 1
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
        error = wait_behind(frame, &group.futures[index])
        if error != NULL:
            pthread_mutex_unlock(&table.mutex)
            return error
        group.arrived += 1
        table.running -= 1
        settle(table)  # unlocks
        return NULL
    if group.wire != NULL:
        pthread_mutex_unlock(&table.mutex)
        state = send_off(table, site, group)
        pthread_mutex_lock(&table.mutex)
        if state < 0 and table.failure == NULL:
            fail_all(table, why(group.wire))  # unlocks
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
        if not table.replays:  # from here on the run cannot be given up, nor be one that was
            wait_left, table.resumed = 0.0, False
    if table.apart:
        error = wait_behind(frame, &own)
        if error != NULL:
            pthread_mutex_unlock(&table.mutex)
            return error
    futures = &few[0]
    if size > 64:
        futures = <void**>calloc(size, sizeof(void*))
    futures[size - 1] = own
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
        conclude(table, group)
        began = group.wire.began
        if not again:
            table.seconds += now() - began
    if table.rows != NULL and not again:
        note(table, number, which, began)
    if own != NULL:
        leave_to_turns(frame.api, site.estimate, futures, size)
    else:
        release(frame.api, site.estimate, futures, size - 1)
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
        if begin_wire(table, group) < 0:
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
    cdef void* error = wait_behind(frame, &group.futures[index])
    if error != NULL:
        pthread_mutex_unlock(&table.mutex)
        return error
    group.arrived += 1
    table.running -= 1
    table.pending[table.num_pending].site = number
    table.pending[table.num_pending].group = which
    table.num_pending += 1
    pthread_cond_signal(&table.over)
    pthread_mutex_unlock(&table.mutex)
    if table.near != NULL:
        ring(head_of(table.near, table.near.me))
    return NULL


include "_messages.pxi"
include "_nearby.pxi"


def short_slices() -> None:
    """See `waiting.short_slices`."""
    stretto_short_slices()


def handler() -> object:
    """The handler's address in a capsule, as ``jax.ffi.register_ffi_target`` takes it."""
    return PyCapsule_New(<void*>&_arrive, NULL, NULL)


@cython.no_gc_clear
cdef class Table:
    """The sites of one region of a program, and the devices of this process that meet there.

    ``Table(devices)`` for so many devices, whose positions are 0, 1, …. `add` describes the sites, `address`
    a part of what each device's code takes as its first argument. Before each run `begin`, then `wait`.
    Where other processes take part, ``comm`` is MPI's handle of their communicator, and ``patience`` for how many
    seconds a wait for them keeps a core busy. ``resumed``: runs may be given up wherever they wait, and be
    resumed, for which each site keeps what it has sent and received. Else sites take turns with the memory for it
    (`stages`), and a run may be given up at its first wait alone. ``apart``: what they run calls back into Python,
    and devices may wait there for each other. ``shared``: memory of processes of this host, for wires between
    them.
    """

    cdef table_t table
    cdef Shared _shared
    cdef list _names
    cdef dict _stages  # address of a `stage_t` by the local members of its wires, or by its wire's number
    cdef int _wires
    cdef bint _unplaced  # stages that other processes read have no memory yet

    def __cinit__(
        self, int devices, uintptr_t comm=0, double patience=0.0, bint resumed=False, bint apart=False,
        Shared shared=None,
    ):
        self.table.devices, self.table.apart = devices, apart and devices > 1
        self.table.comm, self.table.patience = comm, patience
        self._shared = shared
        self.table.near = NULL if shared is None else &shared.shared
        self._stages = {}
        self.table.replays = resumed
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
        each group None, or its tag, its `wires.Wire`, and whether its messages go through the shared memory: they
        name numbers of processes there, else ranks of the communicator.
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
        site.estimate = <estimate_t*>calloc(1, sizeof(estimate_t))
        site.estimate.users = 1
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
                tag, planned, near = wires[g]
                group.wire = new_wire(tag, planned, site, self._stage(members, planned[0], near))
                group.wire.near = table.near if near else NULL
                table.far |= not near
                self._wires += 1
        free(table.pending)
        table.pending = <pending_t*>calloc(self._wires + 1, sizeof(pending_t))
        encoded = name.encode()
        self._names.append(encoded)
        site.name = <char*>encoded

    cdef stage_t* _stage(self, list members, int64_t size, bint near) except NULL:
        """Memory for the next wire. A device is in one site at a time, and is let go of once its results are
        there: wires with the same local members are never under way at the same time."""
        cdef stage_t* stage
        key = self._wires if self.table.replays else (near, *sorted(members))
        if key not in self._stages:
            stage = <stage_t*>calloc(1, sizeof(stage_t))
            stage.next, self.table.stages = self.table.stages, stage
            stage.near = near
            self._unplaced |= near
            self._stages[key] = <uintptr_t>stage
        stage = <stage_t*><uintptr_t>self._stages[key]
        if not near and (stage.bytes == NULL or stage.size < size):
            free(stage.bytes)
            stage.bytes = <char*>calloc(size + 1, 1)
        stage.size = max(stage.size, size)
        return stage

    cdef int _place_stages(self) except -1:
        """Find memory for the stages that other processes read: once, since all their wires are known."""
        cdef stage_t* stage = self.table.stages
        while stage != NULL:
            if stage.near and stage.bytes == NULL:
                self._shared.place(stage)
            stage = stage.next
        self._unplaced = False
        return 0

    @property
    def stages(self) -> list:
        """Bytes of each piece of memory that messages between processes leave from and come to."""
        cdef stage_t* stage = self.table.stages
        sizes = []
        while stage != NULL:
            sizes.append(stage.size)
            stage = stage.next
        return sizes[::-1]

    @property
    def address(self) -> int:
        """What the first number of a device's context is; the second is its position."""
        return <uintptr_t>&self.table

    @cython.binding(False)
    def begin(self, bint watched=False, double patience=INFINITY) -> None:
        """All devices are about to run. ``watched``: rows are kept of what they do. ``patience``: after how many
        seconds of waiting for other processes, in all, this thread gives the run up (`late`); at least a moment."""
        global wait_left
        cdef table_t* table = &self.table
        cdef int s, g
        if self._unplaced:
            self._place_stages()
        acknowledge_deferred(table)
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
            table.sites[s].idle = 0
            for g in range(table.sites[s].num_groups):
                table.sites[s].groups[g].calls = table.sites[s].groups[g].came = 0
        if patience < INFINITY:
            wait_left = max(patience, MOMENT)

    @cython.binding(False)
    def completed(self) -> bool:
        """`stay`, and whether the run has ended well, with each site called once."""
        global wait_left
        cdef table_t* table = &self.table
        cdef bint ended
        wait_left = 0.0
        # A thread of the engine's that has counted the last end is still at it while it has the mutex.
        pthread_mutex_lock(&table.mutex)
        ended = table.ended == table.devices
        pthread_mutex_unlock(&table.mutex)
        return (
            ended
            and not table.late
            and table.failure == NULL
            and table.executed == table.num_sites
        )

    def stay(self) -> None:
        """From now on this thread waits for other processes as long as it takes, after `begin` had it hurry."""
        global wait_left
        wait_left = 0.0

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
        """Whether all devices have come to their end, and let go of the table."""
        cdef bint over
        with nogil:
            pthread_mutex_lock(&self.table.mutex)
            over = self.table.ended == self.table.devices
            pthread_mutex_unlock(&self.table.mutex)
        return over

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
        cdef uint64_t before
        with nogil:
            before = flush_denormals()
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
                if table.near == NULL or table.far:
                    relax(table, since)
                elif rest(table, NULL, since, until):
                    since = 0.0
            pthread_mutex_unlock(&table.mutex)
            flush_denormals_as(before)
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
        """For each site how often it was called since `begin`: as often as the group that did so most, where it
        has some here."""
        cdef site_t* site
        found = []
        for s in range(self.table.num_sites):
            site = &self.table.sites[s]
            found.append(max([site.groups[g].calls for g in range(site.num_groups)], default=site.idle))
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
        cdef stage_t* stage
        cdef int s, g
        if table.deferred != NULL and is_own(table.near):
            acknowledge_deferred(table)
        while table.stages != NULL:
            stage, table.stages = table.stages, table.stages.next
            if stage.near:
                self._shared.leave(stage)
            else:
                free(stage.bytes)
                free(stage)
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
            pthread_mutex_lock(&queue.mutex)
            give_up(table.sites[s].estimate)
            pthread_mutex_unlock(&queue.mutex)
        free(table.sites)
        free(table.failure)
        free(table.rows)
        free(table.pending)
        pthread_cond_destroy(&table.over)
        pthread_mutex_destroy(&table.mutex)
