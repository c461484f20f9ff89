# Threads that still compute when Python ends: daemon threads, as loaders of data have them. Part of `_capi`.
#
# From a certain point on Python ends each thread that asks for the GIL, by unwinding its stack. jaxlib asks for it on
# the way out of most calls, in destructors, and a destructor that is unwound aborts the process: a program with such
# threads that computes on JAX's CPU backend mostly ends with exit code 134. Therefore they rest in the plugin, without
# the GIL, on the way in and on the way out, from the time on when Python calls the functions that were registered for
# its end. One of those may wait for such a thread: so each rests once, for a limited time. Once Python ends threads,
# they rest for ever.
#
# Left alone: the thread that ends the process, threads of C++ that Python does not know, and who holds the GIL.

cdef extern from *:
    """
    static pthread_t stretto_last;          /* the thread that ends the process */
    static double stretto_rest_limit = 0.0; /* for how many seconds the others rest; 0: they do not */
    static long stretto_inside = 0;         /* how many threads are in the plugin, and do not rest, */
    static long stretto_visits = 0;         /* and how often one came in */
    static __thread int stretto_rested = 0;

    static double stretto_now(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
    }

    static void stretto_nap(void) {
        const struct timespec some = {0, 2000000};
        nanosleep(&some, NULL);
    }

    static void stretto_rest(void) {
        const double until = stretto_now() + stretto_rest_limit;
        if (pthread_equal(pthread_self(), stretto_last)) return;
        if (PyGILState_GetThisThreadState() == NULL || PyGILState_Check()) return;
        while (stretto_gone() || (!stretto_rested && stretto_now() < until)) stretto_nap();
        stretto_rested = 1;
    }

    static inline void stretto_come_in(void) {
        if (stretto_rest_limit > 0.0) stretto_rest();
        __atomic_add_fetch(&stretto_inside, 1, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&stretto_visits, 1, __ATOMIC_SEQ_CST);
    }

    static inline void stretto_go_out(void) {
        __atomic_sub_fetch(&stretto_inside, 1, __ATOMIC_SEQ_CST);
        if (stretto_rest_limit > 0.0) stretto_rest();
    }

    static void stretto_have_rest(double limit) {
        stretto_last = pthread_self();
        stretto_rest_limit = limit;
    }

    /* Without the GIL. Whether nobody came in for `quiet` seconds and nobody is inside; waits up to `limit`. */
    static int stretto_all_rest(double quiet, double limit) {
        const double end = stretto_now() + limit;
        double since = stretto_now();
        long visits = __atomic_load_n(&stretto_visits, __ATOMIC_SEQ_CST);
        do {
            stretto_nap();
            long now = __atomic_load_n(&stretto_visits, __ATOMIC_SEQ_CST);
            if (now != visits || __atomic_load_n(&stretto_inside, __ATOMIC_SEQ_CST) > 0) since = stretto_now();
            visits = now;
            if (stretto_now() - since >= quiet) return 1;
        } while (stretto_now() < end);
        return 0;
    }
    """
    void come_in "stretto_come_in"() noexcept nogil
    void go_out "stretto_go_out"() noexcept nogil
    void stretto_have_rest(double limit) noexcept
    bint stretto_all_rest(double quiet, double limit) noexcept nogil


def have_others_rest(double limit):
    """From now on, threads other than this one rest in the plugin: each once, for ``limit`` seconds at most."""
    stretto_have_rest(limit)


def others_rest(double quiet, double limit):
    """Wait until no other thread is in the plugin, but for those that rest, and none came for ``quiet`` seconds; up to
    ``limit`` seconds. Whether that is so."""
    cdef bint rest
    with nogil:
        rest = stretto_all_rest(quiet, limit)
    return rest
