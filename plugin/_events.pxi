# Events: work under way, and who is called when it is done. Part of `_capi`.

ctypedef void (*on_ready_t)(void* error, void* user_arg) noexcept nogil

cdef struct callback_t:
    on_ready_t function
    error_t* error
    void* argument
    callback_t* next


cdef struct event_t:
    void* owner  # null for the one event that is always ready, and for answers
    bint ready
    error_t* error
    bint asked  # an answer (`ask`), all of C
    int references
    callback_t* callbacks


cdef event_t always_ready
always_ready.owner = NULL
always_ready.ready = True
always_ready.error = NULL


@cython.final
cdef class Event(Handle):
    """Something that will be done. Made of values, or completed by `complete`.

    ``values`` are awaited in turn, or weak references to values; one that was given up meanwhile counts as
    done. Callbacks of an event that ``may_be_late`` are called by a thread that does so for many (`later`);
    those of others at once.
    """

    cdef event_t c
    cdef tuple values
    cdef list callbacks
    cdef bint may_be_late

    def __cinit__(self, tuple values=None, bint may_be_late=False):
        self.c.owner = <void*>self
        self.c.error = NULL
        self.c.ready = False
        self.pointer = &self.c
        self.values = values
        self.callbacks = None
        self.may_be_late = may_be_late

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
        self.values = None
        callbacks, self.callbacks = self.callbacks, None
        if callbacks is not None:
            call_all(callbacks, self.c.error)

    cdef bint poll(self) except -1:
        """Whether it is done; values that are computed complete their event."""
        cdef tuple values = self.values
        if self.c.ready:
            return True
        if values is None:
            return False
        for value in values:
            value = strong(value)
            try:
                if value is not None and not value.is_ready():
                    return False
            except Exception:
                pass  # `settle` finds out
        self.settle(values)
        return True

    cdef int settle(self, tuple values) except -1:
        """Wait for the values, and be done."""
        cdef object failure = None
        for value in values:
            value = strong(value)
            if value is None:
                continue
            try:
                value.block()
            except Exception as error:
                # Donated to a later run: that array is gone, and this run was not at fault. The value may
                # not know yet, where that run is being started at this moment.
                if failure is None and not value.is_deleted and "deleted" not in str(error):
                    failure = error
        self.complete(failure)
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
        if self.callbacks is not None:
            self.callbacks.append((callback, argument))
            return
        self.callbacks = [(callback, argument)]
        if self.values is None:
            return
        if self.may_be_late or len(self.values) != 1:
            tell_later(self)
        else:
            self.values[0].on_ready(self.complete)

    def wait(self):
        """Block until it is done. Does not raise the error."""
        cdef tuple values = self.values
        if self.poll():
            return
        if values is not None:
            self.settle(values)
            return
        import threading

        done = threading.Event()
        self.when_done(done.set)
        done.wait()

    def when_done(self, function):
        """Call ``function()`` once it is done."""
        Waiter(function).attach(self)


cdef inline object strong(object value):
    """The value itself, of a weak reference what it refers to."""
    return value() if PyWeakref_CheckRef(value) else value


# Takes an event to be completed when its values are; set by `install`.
cdef object tell_later = None

# Takes a function to be called on another thread; set by `install`.
cdef object run_elsewhere = None


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


cdef int call_all(list callbacks, const error_t* error) except -1:
    """Call them without the GIL in between: whom they wake up wants it."""
    cdef size_t i, count = len(callbacks)
    cdef callback_t* calls = <callback_t*>malloc(count * sizeof(callback_t))
    if calls == NULL:
        raise MemoryError
    for i in range(count):
        function, argument = callbacks[i]
        calls[i].function, calls[i].argument = <on_ready_t><size_t>function, <void*><size_t>argument
        calls[i].error = copy_error(error)
    with nogil:
        for i in range(count):
            calls[i].function(calls[i].error, calls[i].argument)
    free(calls)
    return 0


def ready_event():
    """The pointer to the event that is ready and never fails; its Destroy does nothing."""
    return <size_t>&always_ready


def event_at(pointer):
    """The `Event` of a pointer, or None for the one that is always ready."""
    cdef event_t* event = <event_t*><size_t>pointer
    return None if event.owner == NULL else <object>event.owner


cdef void* event_destroy(void* a) noexcept nogil:
    cdef event_t* event = <event_t*>(<PJRT_Event_Destroy_Args*>a).event
    if event == NULL:
        return NULL
    if event.asked:
        forget(event)
    elif event.owner != NULL:
        release(event)
    return NULL


cdef void* event_is_ready(void* a) noexcept nogil:
    cdef PJRT_Event_IsReady_Args* args = <PJRT_Event_IsReady_Args*>a
    cdef event_t* event = <event_t*>args.event
    if event.asked:
        args.is_ready = is_answered(event)
        return NULL
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
    cdef event_t* event = <event_t*>(<PJRT_Event_Error_Args*>a).event
    return error_of_answer(event) if event.asked else copy_error(event.error)


cdef void* event_await(void* a) noexcept nogil:
    cdef event_t* event = <event_t*>(<PJRT_Event_Await_Args*>a).event
    if not (is_answered(event) if event.asked else event.ready):
        return block_on(event)
    return error_of_answer(event) if event.asked else copy_error(event.error)


cdef void* block_on(event_t* event) noexcept nogil:
    cdef void* error = NULL
    come_in()
    if not gone():
        with gil:
            error = await_event(event)
    go_out()
    return error


cdef void* await_event(event_t* event) noexcept:
    cdef stretto_pending pending
    cdef error_t* error = NULL
    cdef int depth
    save(&pending)
    depth = open_signals(pending.entered)
    try:
        try:
            if event.asked:
                await_answer(event)
            else:
                (<Event>event.owner).wait()
        finally:
            close_signals(depth)
        error = error_of_answer(event) if event.asked else copy_error(event.error)
    except BaseException as exception:
        if pending.entered:  # it comes from a handler: an error for jaxlib, and still for the program
            keep_raised(exception)
            error = new_error(1, b"interrupted by a signal", 23)
        else:
            error = error_of(exception)
    restore(&pending)
    return error


cdef void* event_on_ready(void* a) noexcept nogil:
    cdef PJRT_Event_OnReady_Args* args = <PJRT_Event_OnReady_Args*>a
    cdef event_t* event = <event_t*>args.event
    if event.asked:
        if not listen(event, <on_ready_t>args.callback, args.user_arg):
            return new_error(8, b"no memory for a callback", 24)
        return NULL
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
