# Devices whose code calls back into Python, in turns.
#
# A function that is called back may wait for that of another device: in a barrier, or through a queue. So no device is run
# from within another one's stack, as `release` does, not even that of the last member: all are left to a thread of these,
# which runs one after the other up to where it waits next. A thread that is about to call such a function steps aside: the
# devices behind it are another thread's, of which there is always one, since it is begun where none is idle. Where nothing
# is called, all devices share one thread and nobody is woken up; where steps are long, as many as there are helpers.

cdef extern from *:
    """
    static __thread int stretto_turn = 0;  /* whether this thread runs devices, and has not stepped aside */
    """
    bint turn "stretto_turn"

cdef struct waiting_t:
    ready_t item
    waiting_t* next

cdef struct turns_t:
    pthread_mutex_t mutex
    pthread_cond_t filled
    waiting_t* first
    waiting_t* last
    int running  # threads that run devices, less those that stepped aside
    int idle

cdef turns_t turns
memset(&turns, 0, sizeof(turns))
pthread_mutex_init(&turns.mutex, NULL)
pthread_cond_init(&turns.filled, NULL)


cdef bint wanted() noexcept nogil:
    """Whether one more thread is to run devices. Called with the mutex, as what follows."""
    if turns.first == NULL:
        return False
    return turns.running == 0 or (
        turns.running < queue.helpers and turns.first.item.estimate.seconds > SIDE_BY_SIDE
    )


cdef void ask() noexcept nogil:
    """Have a thread see to who waits, if one more is wanted."""
    cdef pthread_t thread
    if not wanted():
        return
    if turns.idle > 0:
        pthread_cond_signal(&turns.filled)
    elif pthread_create(&thread, NULL, &take_turns, NULL) == 0:
        pthread_detach(thread)


cdef void* take_turns(void* unused) noexcept nogil:
    global turn
    cdef waiting_t* taken
    flush_denormals()
    pthread_mutex_lock(&turns.mutex)
    while True:
        while not wanted():
            turns.idle += 1
            pthread_cond_wait(&turns.filled, &turns.mutex)
            turns.idle -= 1
        turns.running += 1
        turn = True
        while turns.first != NULL:
            taken = turns.first
            turns.first = taken.next
            ask()
            pthread_mutex_unlock(&turns.mutex)
            run_on(&taken.item)
            free(taken)
            pthread_mutex_lock(&turns.mutex)
        turn = False
        turns.running -= 1


cdef void leave_to_turns(const ffi_api* api, estimate_t* estimate, void** futures, int count) noexcept nogil:
    """Have these members go on, each in its turn."""
    cdef waiting_t* one
    cdef int k
    pthread_mutex_lock(&queue.mutex)
    estimate.users += count
    pthread_mutex_unlock(&queue.mutex)
    pthread_mutex_lock(&turns.mutex)
    for k in range(count):
        one = <waiting_t*>calloc(1, sizeof(waiting_t))
        one.item.api, one.item.future, one.item.estimate = api, futures[k], estimate
        if turns.first == NULL:
            turns.first = one
        else:
            turns.last.next = one
        turns.last = one
    ask()
    pthread_mutex_unlock(&turns.mutex)


def step_aside() -> bool:
    """This thread may be about to wait for other devices: those behind it are another thread's from now on. Gives
    whether it has to `step_back`."""
    global turn
    if not turn:
        return False
    pthread_mutex_lock(&turns.mutex)
    turns.running -= 1
    ask()
    pthread_mutex_unlock(&turns.mutex)
    turn = False
    return True


def step_back() -> None:
    """It waits no longer."""
    global turn
    pthread_mutex_lock(&turns.mutex)
    turns.running += 1
    pthread_mutex_unlock(&turns.mutex)
    turn = True
