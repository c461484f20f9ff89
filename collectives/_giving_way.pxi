# How a thread in C leaves its core to others between two looks: `waiting.give_way`. For modules that have `now()`, the
# seconds of a clock.

cdef extern from *:
    """
    #include <sched.h>
    #include <time.h>
    #ifdef __linux__
    #include <stdint.h>
    #include <sys/prctl.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    #endif
    #define STRETTO_SLICE 100000  /* nanoseconds, the least that Linux gives */

    static void stretto_sleep(double seconds) {
        static __thread int precise = 0;
        struct timespec t = {0, (long)(seconds * 1e9)};
    #ifdef __linux__
        if (!precise) prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    #endif
        precise = 1;
        nanosleep(&t, NULL);
    }

    /* `waiting.short_slices`: once for each thread. */
    static void stretto_short_slices(void) {
    #if defined(__linux__) && defined(SYS_sched_setattr)
        static __thread int asked = 0;
        struct {
            uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, deadline, period;
        } attr;  /* the first version of sched_attr(2) */
        if (asked) return;
        asked = 1;
        if (syscall(SYS_sched_getattr, 0, &attr, sizeof(attr), 0) != 0) return;
        /* Only SCHED_OTHER and SCHED_BATCH have slices; before 6.12 they read as 0. */
        if ((attr.policy != 0 && attr.policy != 3) || attr.runtime <= STRETTO_SLICE) return;
        attr.size = sizeof(attr);
        attr.flags &= 1;  /* SCHED_FLAG_RESET_ON_FORK */
        attr.runtime = STRETTO_SLICE;
        syscall(SYS_sched_setattr, 0, &attr, 0);
    #endif
    }
    """
    void stretto_short_slices() noexcept nogil
    void stretto_sleep(double seconds) noexcept nogil
    int sched_yield() noexcept nogil

# As in `waiting`.
cdef double SHORTEST = 10e-6, CONTENDED = 50e-6, TAKEN = 500e-6, AS_LONG = 8.0, MEANWHILE = 40e-6
cdef double taken_until = 0.0


cdef void give_way() noexcept nogil:
    """Yield, or sleep where the last yield gave the core to a process that computes."""
    global taken_until
    cdef double began = now()
    cdef double took
    if began < taken_until:
        stretto_sleep(MEANWHILE)
        return
    sched_yield()
    took = now() - began
    if took > CONTENDED:
        stretto_short_slices()
    if took > TAKEN:
        taken_until = began + AS_LONG * took
