# cython: language_level=3
"""Calls of NCCL, made by a thread of their own: who enqueues a collective only says what to call.

Of a communicator that does not block, NCCL puts each launch onto the streams in a thread that it starts for it
(`groupLaunchNonBlocking` in its `src/group.cc`). Starting one takes whoever calls 15 to 36 microseconds, and far
longer where the cores are busy: a walk can enqueue segments meanwhile. So it leaves the calls here, and asks NCCL's
state when it needs to know that the collective is on its streams. Calls that nobody has begun by then are made by
whoever waits.

One launch at a time: it is put, then over, then the next. Calls, and questions about communicators, which NCCL does
not take from two threads at once (it joins its own thread in them), are made with a lock held. `stop` takes it, too:
after it no communicator is used any more, and all of them may be aborted.

Code on a GPU may call collectives itself (`_called.pxi`): then no launch is put, and the thread that XLA calls on makes
the calls.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int32_t, int64_t, uint32_t, uintptr_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

include "_ffi.pxi"

cdef extern from *:
    """
    #include <pthread.h>
    #include <semaphore.h>
    #include <time.h>

    static double launches_now(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    }
    static int launches_state(int* state) { return __atomic_load_n(state, __ATOMIC_ACQUIRE); }
    static void launches_be(int* state, int now) { __atomic_store_n(state, now, __ATOMIC_RELEASE); }
    static int launches_take(int* state, int from, int to) {
        return __atomic_compare_exchange_n(state, &from, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    }
    """
    ctypedef struct sem_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef unsigned long pthread_t
    int sem_init(sem_t*, int, unsigned int) noexcept nogil
    int sem_post(sem_t*) noexcept nogil
    int sem_wait(sem_t*) noexcept nogil
    int sem_destroy(sem_t*) noexcept nogil
    int pthread_mutex_init(pthread_mutex_t*, void*) noexcept nogil
    int pthread_mutex_lock(pthread_mutex_t*) noexcept nogil
    int pthread_mutex_trylock(pthread_mutex_t*) noexcept nogil
    int pthread_mutex_unlock(pthread_mutex_t*) noexcept nogil
    int pthread_mutex_destroy(pthread_mutex_t*) noexcept nogil
    int pthread_create(pthread_t*, void*, void* (*)(void*) noexcept nogil, void*) noexcept nogil
    int pthread_detach(pthread_t) noexcept nogil
    double now "launches_now"() noexcept nogil
    int launches_state(int*) noexcept nogil
    void launches_be(int*, int) noexcept nogil
    bint launches_take(int*, int, int) noexcept nogil

# What a call begins with; then, for all of them alike: address read, address written, elements, type, peer, root
# or reduction, communicator, stream. A send has no second address, and a receive has no first one.
SEND = 0
RECEIVE = 1
ALL_GATHER = 2
ALL_REDUCE = 3
REDUCE_SCATTER = 4
BROADCAST = 5

ctypedef int (*uses)(uintptr_t) noexcept nogil
ctypedef int (*groups)() noexcept nogil
ctypedef int (*asks)(uintptr_t, int*) noexcept nogil
ctypedef int (*messages)(uintptr_t, size_t, int, int, uintptr_t, uintptr_t) noexcept nogil
ctypedef int (*gathers)(uintptr_t, uintptr_t, size_t, int, uintptr_t, uintptr_t) noexcept nogil
ctypedef int (*reduces)(uintptr_t, uintptr_t, size_t, int, int, uintptr_t, uintptr_t) noexcept nogil

cdef enum:
    _IN_PROGRESS = 7  # ncclInProgress
    # Where a launch is: there is none, nobody has begun it, somebody makes the calls, all of them are made.
    _OVER = 0
    _PUT = 1
    _BEGUN = 2
    _MADE = 3
    # What failed, where it is none of the calls.
    _NOTHING = -1
    _LATER = -2
    _GROUP = -3
    _CONTEXT = -4

# Seconds of a wait before it sleeps between two looks.
cdef double ATTENTIVE = 200e-6

include "_giving_way.pxi"

cdef struct call_t:
    int kind
    uintptr_t context, source, target
    size_t count
    int dtype, which
    uintptr_t communicator, stream

cdef struct launches_t:
    sem_t there  # as many tokens as were put
    pthread_mutex_t calling
    int where, ended, stopped, has_thread
    call_t* calls
    int count, room, asked
    int failed, error  # number of the call, or one of the above, and NCCL's code
    uintptr_t communicator  # whose error it is
    uses use
    groups group_start, group_end
    asks ask
    uintptr_t functions[6]


cdef int call(launches_t* l, call_t* c) noexcept nogil:
    cdef uintptr_t function = l.functions[c.kind]
    if c.kind == 0:
        return (<messages>function)(c.source, c.count, c.dtype, c.which, c.communicator, c.stream)
    if c.kind == 1:
        return (<messages>function)(c.target, c.count, c.dtype, c.which, c.communicator, c.stream)
    if c.kind == 2:
        return (<gathers>function)(c.source, c.target, c.count, c.dtype, c.communicator, c.stream)
    return (<reduces>function)(c.source, c.target, c.count, c.dtype, c.which, c.communicator, c.stream)


cdef int call_all(launches_t* l) noexcept nogil:
    """Make the calls, in a group where there are several. Whether all went well."""
    cdef int k, error = 0
    cdef uintptr_t context = 0
    cdef bint grouped = l.count > 1
    if grouped:
        l.group_start()
    for k in range(l.count):
        if l.calls[k].context != context:
            context = l.calls[k].context
            error = l.use(context)
            if error:
                l.failed, l.error = _CONTEXT, error
                break
        error = call(l, &l.calls[k])
        if error != 0 and error != _IN_PROGRESS:
            l.failed, l.error, l.communicator = k, error, l.calls[k].communicator
            break
    if grouped:
        error = l.group_end()
        if l.failed == _NOTHING and error != 0 and error != _IN_PROGRESS:
            l.failed, l.error, l.communicator = _GROUP, error, l.calls[0].communicator
    return l.failed == _NOTHING


cdef void launch(launches_t* l) noexcept nogil:
    """Make the calls that were put."""
    pthread_mutex_lock(&l.calling)
    if not launches_state(&l.stopped):
        call_all(l)
    pthread_mutex_unlock(&l.calling)
    launches_be(&l.where, _MADE)


cdef bint settled(launches_t* l) noexcept nogil:
    """Whether what was called is on its streams, or has failed. Asks of one communicator after the other."""
    cdef int state, error
    cdef uintptr_t communicator
    if launches_state(&l.where) != _MADE:
        return False
    while l.failed == _NOTHING and l.asked < l.count:
        communicator = l.calls[l.asked].communicator
        if l.asked == 0 or communicator != l.calls[l.asked - 1].communicator:
            state = 0
            pthread_mutex_lock(&l.calling)
            error = 0 if launches_state(&l.stopped) else l.ask(communicator, &state)
            pthread_mutex_unlock(&l.calling)
            if error == 0 and state == _IN_PROGRESS:
                return False
            if error != 0 or state != 0:
                l.failed, l.error, l.communicator = _LATER, error or state, communicator
        l.asked += 1
    launches_be(&l.where, _OVER)
    return True


cdef bint has_room(launches_t* l, int count) noexcept nogil:
    """Make room for so many calls. Whether there was memory."""
    cdef call_t* calls
    if count > l.room:
        calls = <call_t*>realloc(l.calls, (2 * count + 8) * sizeof(call_t))
        if calls == NULL:
            return False
        l.calls, l.room = calls, 2 * count + 8
    return True


cdef void begin(launches_t* l, int count, int where) noexcept nogil:
    """A launch of so many calls, which are there, begins where it is said to be."""
    l.count, l.asked, l.failed, l.error, l.communicator = count, 0, _NOTHING, 0, 0
    launches_be(&l.where, where)


cdef void await_settled(launches_t* l, double seconds) noexcept nogil:
    """Wait until what was called is on its streams, or has failed, for so long at most."""
    cdef double began = now(), waited
    while not settled(l):
        waited = now() - began
        if waited > seconds:
            return
        if waited < ATTENTIVE:
            give_way()
        else:
            stretto_sleep(5 * SHORTEST)


cdef void* serve(void* given) noexcept nogil:
    cdef launches_t* l = <launches_t*>given
    while True:
        while sem_wait(&l.there) != 0:  # a signal came
            pass
        if launches_state(&l.ended):
            give_up(l)
            return NULL
        if launches_take(&l.where, _PUT, _BEGUN):
            launch(l)


cdef void give_up(launches_t* l) noexcept nogil:
    sem_destroy(&l.there)
    pthread_mutex_destroy(&l.calling)
    free(l.calls)
    free(l)


cdef class Launches:
    """The calls of one `Gpus`. Functions are given by their addresses: of ``NAMES``, and ``cuCtxSetCurrent``."""

    NAMES = (
        "ncclGroupStart",
        "ncclGroupEnd",
        "ncclCommGetAsyncError",
        "ncclSend",
        "ncclRecv",
        "ncclAllGather",
        "ncclAllReduce",
        "ncclReduceScatter",
        "ncclBroadcast",
    )
    # Of the kinds of calls, in the order of their numbers.
    KINDS = NAMES[3:]

    cdef launches_t* _all

    def __cinit__(self, uintptr_t use, uintptr_t group_start, uintptr_t group_end, uintptr_t ask, *functions):
        self._all = <launches_t*>calloc(1, sizeof(launches_t))
        if self._all is NULL:
            raise MemoryError
        sem_init(&self._all.there, 0, 0)
        pthread_mutex_init(&self._all.calling, NULL)
        self._all.use = <uses>use
        self._all.group_start = <groups>group_start
        self._all.group_end = <groups>group_end
        self._all.ask = <asks>ask
        for n, function in enumerate(functions):
            self._all.functions[n] = function

    def __dealloc__(self):
        if self._all is NULL:
            return
        if self._all.has_thread:
            launches_be(&self._all.ended, 1)
            sem_post(&self._all.there)
        else:
            give_up(self._all)

    def put(self, list launch) -> None:
        """Have calls made, given as pairs: the context of a device, and the calls about it. The launch before must be
        over. Raises ``RuntimeError`` if it is not."""
        cdef launches_t* l = self._all
        cdef pthread_t thread
        cdef int count = 0
        cdef call_t* c
        cdef tuple one
        cdef list calls
        if launches_state(&l.where) != _OVER:
            raise RuntimeError("the calls of NCCL before these are not over")
        for context, calls in launch:
            for one in calls:
                if not has_room(l, count + 1):
                    raise MemoryError
                c = l.calls + count
                c.context = context
                c.kind, c.source, c.target, c.count, c.dtype, c.which, c.communicator, c.stream = one
                if not 0 <= c.kind < 6:
                    raise ValueError(f"no call of NCCL has the number {c.kind}")
                count += 1
        if not count:
            return
        begin(l, count, _PUT)
        if not l.has_thread and pthread_create(&thread, NULL, &serve, l) == 0:
            pthread_detach(thread)
            l.has_thread = True
        sem_post(&l.there)  # without a thread it is made by whoever waits

    def wait(self, double seconds) -> bool:
        """Wait, for so long at most, until what was put is on its streams or has failed. Whether it is. One thread at a
        time waits."""
        cdef launches_t* l = self._all
        if launches_state(&l.where) == _OVER:
            return True
        with nogil:
            if launches_take(&l.where, _PUT, _BEGUN):
                launch(l)
            await_settled(l, seconds)
        return launches_state(&l.where) == _OVER

    def state(self, uintptr_t communicator):
        """0, NCCL's code for what is in progress, or the error that a communicator has met. None once it may not be
        asked any more (`stop`)."""
        cdef launches_t* l = self._all
        cdef int state = 0, error = 0
        cdef bint stopped
        with nogil:
            pthread_mutex_lock(&l.calling)
            stopped = launches_state(&l.stopped)
            if not stopped:
                error = l.ask(communicator, &state)
            pthread_mutex_unlock(&l.calling)
        return None if stopped else error or state

    def failure(self):
        """None, or of the launch that is over what failed, the error, and whose communicator's it is: ``""`` where
        the calls went well, and the communicator failed later."""
        cdef launches_t* l = self._all
        if l.failed == _NOTHING:
            return None
        if l.failed >= 0:
            return self.KINDS[l.calls[l.failed].kind], l.error, l.communicator
        names = {_LATER: "", _GROUP: "ncclGroupEnd", _CONTEXT: "cuCtxSetCurrent"}
        return names[l.failed], l.error, l.communicator

    def stop(self, double patience=1.0) -> None:
        """Make no call any more, and ask for no state. Waits for so many seconds for a call that does not return: then
        an abort has to end it."""
        cdef launches_t* l = self._all
        cdef double until = now() + patience
        with nogil:
            launches_be(&l.stopped, 1)
            while pthread_mutex_trylock(&l.calling) != 0:
                if now() > until:
                    break
                stretto_sleep(1e-3)
            else:
                pthread_mutex_unlock(&l.calling)


include "_called.pxi"
