# How a thread in C leaves its core to others between two looks: `waiting.give_way`. For modules that have `now()`, the
# seconds of a clock.

cdef extern from *:
    """
    #include <sched.h>
    #include <time.h>
    #ifdef __linux__
    #include <sys/prctl.h>
    #endif

    static void stretto_sleep(double seconds) {
        static __thread int precise = 0;
        struct timespec t = {0, (long)(seconds * 1e9)};
    #ifdef __linux__
        if (!precise) prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    #endif
        precise = 1;
        nanosleep(&t, NULL);
    }
    """
    void stretto_sleep(double seconds) noexcept nogil
    int sched_yield() noexcept nogil

# As in `waiting`.
cdef double SHORTEST = 10e-6, TAKEN = 500e-6, AS_LONG = 8.0
cdef double taken_until = 0.0


cdef void give_way() noexcept nogil:
    """Yield, or sleep where the last yield gave the core to a process that computes."""
    global taken_until
    cdef double began = now()
    cdef double took
    if began < taken_until:
        stretto_sleep(SHORTEST)
        return
    sched_yield()
    took = now() - began
    if took > TAKEN:
        taken_until = began + AS_LONG * took
