# The clock of a trace: `time.perf_counter`, read in a third of the time. Part of `_capi`.
#
# Linux makes that clock of the processor's counter, if it finds the counter steady. Then what the counter has
# done since the last reading of the clock, a millisecond ago at most, is added to it here: a reading of the
# clock also waits for everything before it, which takes three times as long. How fast the counter goes is
# measured from reading to reading, so whatever adjusts the clock is followed.
#
# Invariants: never goes back; differs from the clock by less than `DISTURBED`. Threads take turns by the GIL.

cdef extern from *:
    """
    #include <stdint.h>
    #if defined(__linux__)
    #include <time.h>
    static inline double stretto_monotonic(void) {  /* what time.perf_counter is made of, there */
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (double)((int64_t)t.tv_sec * 1000000000 + t.tv_nsec) / 1e9;
    }
    static inline double stretto_of_thread(void) {  /* processor time of the calling thread, in seconds */
        struct timespec t;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return (double)((int64_t)t.tv_sec * 1000000000 + t.tv_nsec) / 1e9;
    }
    #else
    static inline double stretto_monotonic(void) { return -1.0; }
    static inline double stretto_of_thread(void) { return -1.0; }
    #endif
    #if defined(__linux__) && defined(__x86_64__)
    #include <x86intrin.h>
    #define STRETTO_HAS_COUNTER 1
    static inline uint64_t stretto_counter(void) { return __rdtsc(); }
    #else
    #define STRETTO_HAS_COUNTER 0
    static inline uint64_t stretto_counter(void) { return 0; }
    #endif
    """
    double monotonic "stretto_monotonic"() noexcept nogil
    double of_thread "stretto_of_thread"() noexcept nogil
    uint64_t counter "stretto_counter"() noexcept nogil
    const bint HAS_COUNTER "STRETTO_HAS_COUNTER"

cdef struct clock_t:
    bint counted  # whether the counter may be used
    uint64_t at  # the counter at the last reading
    double time
    double unit  # seconds of one count; 0 while it is not known
    uint64_t window  # how many counts a reading is good for; 0: none
    uint64_t since  # the counter at the reading that the unit is measured from
    double since_time
    uint64_t since_width  # how many counts that reading took
    double last  # what was given

cdef double READING = 1e-3  # seconds for which a reading is good
cdef double BASELINE = 0.02  # over which the unit is measured at least
cdef double RENEWED = 1.0  # and at most, where it is read so often
cdef double DISTURBED = 250e-9  # a reading that took longer was interrupted


cdef bint has_counter():
    """Whether the system's clock is made of the counter."""
    if not HAS_COUNTER:
        return False
    try:
        with open("/sys/devices/system/clocksource/clocksource0/current_clocksource") as file:
            return file.read().strip() == "tsc"
    except OSError:
        return False


cdef inline double clock_now(clock_t* clock) noexcept nogil:
    cdef uint64_t since
    cdef double now
    if clock.window:
        since = counter() - clock.at
        if since < clock.window:
            now = clock.time + <double>since * clock.unit
            if now > clock.last:
                clock.last = now
            return clock.last
    return clock_read(clock)


cdef double clock_read(clock_t* clock) noexcept nogil:
    """Read the system's clock, and the counter beside it."""
    cdef uint64_t before, width, narrowest = 0, at = 0
    cdef double read, now = 0.0, elapsed, unit
    cdef int attempt
    for attempt in range(3):
        before, read = counter(), monotonic()
        width = counter() - before
        if attempt == 0 or width < narrowest:
            narrowest, at, now = width, before + width // 2, read
        if clock.unit and <double>width * clock.unit < DISTURBED:
            break
    clock.window = 0
    if now > clock.last:
        clock.last = now
    if not clock.counted or <double>narrowest * clock.unit >= DISTURBED:
        return clock.last
    elapsed = now - clock.since_time
    if clock.since == 0 or at <= clock.since:
        clock.since, clock.since_time, clock.since_width, clock.unit = at, now, narrowest, 0.0
    elif elapsed > BASELINE:
        unit = elapsed / <double>(at - clock.since)
        if clock.unit and not 0.999 < unit / clock.unit < 1.001:  # the machine was halted meanwhile
            unit = 0.0
        if <double>max(narrowest, clock.since_width) * unit >= DISTURBED:
            unit = 0.0
        clock.unit = unit
        if unit == 0.0 or elapsed > RENEWED:
            clock.since, clock.since_time, clock.since_width = at, now, narrowest
    if clock.unit:
        clock.at, clock.time, clock.window = at, now, <uint64_t>(READING / clock.unit)
    return clock.last
