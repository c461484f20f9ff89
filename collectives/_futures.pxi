# Futures and errors.

cdef void* wait_behind(ffi_frame* frame, void** future) noexcept nogil:
    """Have the device of a call go on once the future that this makes is finished. Gives an error, or NULL."""
    cdef ffi_future_args args
    cdef void* error
    args.size, args.next, args.future = sizeof(args), NULL, NULL
    error = frame.api.future_create(&args)
    if error == NULL:
        frame.future = future[0] = args.future
    return error


cdef void finish(const ffi_api* api, void* future) noexcept nogil:
    """Run the device behind a future, here, until it waits again or has ended.

    The thread takes denormal numbers for zeros: XLA sees to that in its own threads, not in this one.
    """
    cdef ffi_future_args args
    args.size, args.next, args.future = sizeof(args), NULL, future
    drop_error(api, api.future_set_available(&args))


cdef void fail(const ffi_api* api, void* future, const char* message) noexcept nogil:
    cdef ffi_future_error_args args
    args.size, args.next, args.future = sizeof(args), NULL, future
    args.error = new_error(api, message)
    drop_error(api, api.future_set_error(&args))


cdef void finish_timed(const ffi_api* api, void* future, estimate_t* estimate) noexcept nogil:
    cdef double began = now()
    finish(api, future)
    # Threads may write this at once: it is an estimate.
    estimate.seconds += 0.125 * (now() - began - estimate.seconds)


# Devices whose future is to be finished by whichever thread has time. That a device has gone on does not mean that the
# thread has come back from it: by then its run may be over and the table gone, so the thread has a part in the estimate.

cdef struct ready_t:
    const ffi_api* api
    void* future
    estimate_t* estimate

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


cdef void give_up(estimate_t* estimate) noexcept nogil:
    """One user fewer. Called with the queue's mutex."""
    estimate.users -= 1
    if estimate.users == 0:
        free(estimate)


cdef void run_on(ready_t* item) noexcept nogil:
    """Go on with a device, as a user of its estimate."""
    finish_timed(item.api, item.future, item.estimate)
    pthread_mutex_lock(&queue.mutex)
    give_up(item.estimate)
    pthread_mutex_unlock(&queue.mutex)


cdef void* help(void* unused) noexcept nogil:
    cdef ready_t item
    flush_denormals()
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
        finish_timed(item.api, item.future, item.estimate)
        pthread_mutex_lock(&queue.mutex)
        give_up(item.estimate)


def start_helpers(int count) -> None:
    """Have at least ``count`` threads that run devices side by side."""
    cdef pthread_t thread
    while queue.helpers < count:
        if pthread_create(&thread, NULL, &help, NULL) != 0:
            return
        pthread_detach(thread)
        queue.helpers += 1


cdef bint hand_over(const ffi_api* api, void* future, estimate_t* estimate) noexcept nogil:
    """Leave a device to the helpers; False where there are none, or too many are waiting."""
    cdef bint taken = False
    cdef ready_t* item
    pthread_mutex_lock(&queue.mutex)
    if queue.helpers > 0 and queue.count < QUEUE:
        item = &queue.items[(queue.first + queue.count) % QUEUE]
        item.api, item.future, item.estimate = api, future, estimate
        estimate.users += 1
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


cdef void release(const ffi_api* api, estimate_t* estimate, void** futures, int count) noexcept nogil:
    """Go on with these members; the caller's own goes on when this returns."""
    cdef int k
    cdef ready_t item
    if estimate.seconds > SIDE_BY_SIDE and queue.helpers > 0:
        for k in range(count):
            if not hand_over(api, futures[k], estimate):
                finish_timed(api, futures[k], estimate)
        # The caller's own device is one more: it leaves the helpers their share.
        while queue.count > queue.helpers and take(&item):
            run_on(&item)
        return
    for k in range(count):
        finish_timed(api, futures[k], estimate)
