# Whether buffers are computed, asked without the GIL. Part of `_capi`.
#
# jaxlib holds a lock of the buffer's while it asks for its event (`PjRtCApiBuffer::GetReadyFuture`), and takes the same
# lock, with the GIL held, to ask for its layout. So PJRT_Buffer_ReadyEvent, PJRT_Event_IsReady and PJRT_Event_OnReady,
# which it calls meanwhile, never take the GIL for a buffer's event: two threads that read one array would wait for each
# other for ever. What C does not know is a question, which a thread of its own takes to Python.


cdef struct question_t:
    buffer_t* buffer  # the question holds jaxlib's reference, where jaxlib has destroyed the buffer since
    bint deleted  # when it was asked
    event_t* answer
    question_t* next


# Guards all of the below, the fields of buffers and events that are about questions, and what is in an answer. Held for
# moments, in which nobody waits for the GIL.
cdef PyThread_type_lock answers_lock = PyThread_allocate_lock()
cdef PyThread_type_lock bell = PyThread_allocate_lock()  # released to wake up the thread that answers
if answers_lock == NULL or bell == NULL:
    raise MemoryError
PyThread_acquire_lock(bell, WAIT_LOCK)

# By number of an executable, whether somebody has asked for the event of what its last run gave. A hint: several have one
# number.
cdef bint[256] waited
memset(waited, 0, sizeof(waited))

cdef question_t* first_question = NULL
cdef question_t* last_question = NULL
cdef bint answering = False  # somebody answers
cdef bint asleep = False


cdef inline void lock_answers() noexcept nogil:
    PyThread_acquire_lock(answers_lock, WAIT_LOCK)


cdef inline void unlock_answers() noexcept nogil:
    PyThread_release_lock(answers_lock)


cdef event_t* ask(buffer_t* buffer) noexcept nogil:
    """An event, owned by the caller, that will be done when the buffer is computed. NULL if nobody answers."""
    global first_question, last_question, asleep
    cdef event_t* answer = <event_t*>malloc(sizeof(event_t))
    cdef question_t* question = <question_t*>malloc(sizeof(question_t))
    cdef bint wake
    if answer == NULL or question == NULL:
        free(answer)
        free(question)
        return NULL
    memset(answer, 0, sizeof(event_t))
    answer.asked, answer.references = True, 2  # the caller's, and that of who will answer
    question.buffer, question.deleted, question.answer, question.next = buffer, buffer.deleted, answer, NULL
    lock_answers()
    if not answering:
        unlock_answers()
        free(answer)
        free(question)
        return NULL
    if last_question == NULL:
        first_question = question
    else:
        last_question.next = question
    last_question = question
    buffer.questions += 1
    wake, asleep = asleep, False
    unlock_answers()
    if wake:
        PyThread_release_lock(bell)
    return answer


cdef bint is_answered(event_t* answer) noexcept nogil:
    lock_answers()
    cdef bint ready = answer.ready
    unlock_answers()
    return ready


cdef error_t* error_of_answer(event_t* answer) noexcept nogil:
    lock_answers()
    cdef error_t* error = answer.error
    unlock_answers()
    return copy_error(error)


cdef bint listen(event_t* answer, on_ready_t function, void* argument) noexcept nogil:
    """Have the function called, at once if there is an answer. False if there is no memory for that."""
    cdef callback_t* callback = <callback_t*>malloc(sizeof(callback_t))
    cdef callback_t** end
    if callback == NULL:
        return False
    callback.function, callback.argument, callback.next = function, argument, NULL
    lock_answers()
    if not answer.ready:
        end = &answer.callbacks
        while end[0] != NULL:
            end = &end[0].next
        end[0] = callback
        unlock_answers()
        return True
    unlock_answers()
    free(callback)
    function(error_of_answer(answer), argument)
    return True


cdef void give_answer(void* error, void* argument) noexcept nogil:
    """Take the error, or NULL, as the answer to a question; call who listens."""
    cdef event_t* answer = <event_t*>argument
    cdef callback_t* callback
    cdef callback_t* following
    lock_answers()
    answer.error, answer.ready = <error_t*>error, True
    callback, answer.callbacks = answer.callbacks, NULL
    unlock_answers()
    while callback != NULL:
        following = callback.next
        callback.function(copy_error(<error_t*>error), callback.argument)
        free(callback)
        callback = following
    forget(answer)


cdef void forget(event_t* answer) noexcept nogil:
    """Drop a reference."""
    lock_answers()
    answer.references -= 1
    cdef bint unused = answer.references == 0
    unlock_answers()
    if unused:
        free(answer.error)
        free(answer)


cdef int await_answer(event_t* answer) except -1:
    """Block, in Python, until there is one."""
    import threading

    done = threading.Event()
    cdef Waiter waiter = Waiter(done.set)
    Py_INCREF(waiter)
    if not listen(answer, run_waiter, <void*>waiter):
        Py_DECREF(waiter)
        raise MemoryError
    done.wait()
    return 0


cdef int find_answer(question_t* question) except -1:
    """Answer a question, or see to it that it will be."""
    cdef event_t* ready
    cdef Event event = None
    if question.buffer.deleted and not question.deleted:
        tell(question.answer, NULL)  # donated since: that array is gone, and its run was not at fault
        return 0
    try:
        ready = <event_t*><size_t>(<Buffer>question.buffer.owner).ready_event()
        if ready.owner != NULL:
            event = <Event>ready.owner
            Py_DECREF(event)  # which `give` has added
    except BaseException as exception:
        tell(question.answer, error_of(exception))
        return 0
    if event is None:
        tell(question.answer, NULL)
        return 0
    try:
        event.add_callback(<size_t>&give_answer, <size_t>question.answer)
    except BaseException as exception:
        event.callbacks = None
        tell(question.answer, error_of(exception))
    return 0


cdef void tell(event_t* answer, error_t* error) noexcept:
    with nogil:
        give_answer(error, answer)


cdef int answer_all(question_t* question) except -1:
    cdef question_t* following
    cdef buffer_t* buffer
    cdef bint last
    while question != NULL:
        following, buffer = question.next, question.buffer
        find_answer(question)
        lock_answers()
        buffer.questions -= 1
        last = buffer.released and buffer.questions == 0
        unlock_answers()
        if last:
            drop(buffer)
        free(question)
        question = following
    return 0


def answer_questions():
    """Answer what is asked about buffers, until `stop_answering`. For one thread at a time."""
    global first_question, last_question, asleep
    cdef question_t* questions
    while True:
        with nogil:
            lock_answers()
            while first_question == NULL and answering:
                asleep = True
                unlock_answers()
                PyThread_acquire_lock(bell, WAIT_LOCK)
                lock_answers()
            questions = first_question
            first_question = last_question = NULL
            unlock_answers()
        if questions == NULL:
            return
        answer_all(questions)


def start_answering():
    """From now on questions are asked; a thread must be in `answer_questions` soon."""
    global answering
    lock_answers()
    answering = True
    unlock_answers()


def stop_answering():
    """From now on nobody is asked: `answer_questions` returns once all is answered."""
    global answering, asleep
    cdef bint wake
    lock_answers()
    answering = False
    wake, asleep = asleep, False
    unlock_answers()
    if wake:
        PyThread_release_lock(bell)


def answer_no_more():
    """In a forked child, which has no thread that answers: who asks takes the GIL. Locks may be those of threads that
    are gone, so there are others; what was asked stays with the parent."""
    global answers_lock, answering, asleep, first_question, last_question
    cdef PyThread_type_lock fresh = PyThread_allocate_lock()
    if fresh == NULL:
        raise MemoryError
    answers_lock, answering, asleep = fresh, False, False
    first_question = last_question = NULL


cdef void* buffer_destroy(void* a) noexcept nogil:
    cdef buffer_t* buffer = <buffer_t*>(<PJRT_Buffer_Destroy_Args*>a).buffer
    if buffer == NULL:
        return NULL
    if buffer.questions:
        lock_answers()
        if buffer.questions:
            buffer.released = True  # who answers drops the reference
            buffer = NULL
        unlock_answers()
    if buffer != NULL:
        release(buffer)
    return NULL
