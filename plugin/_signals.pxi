# Signals whose handlers are functions in Python, such as that of Ctrl-C.
#
# Python calls a handler between any two instructions of the main thread, also in the middle of a call by
# jaxlib. What the handler raises would then be an error of that call, which jaxlib takes for a fault of the
# plugin: of some calls it ends the process. So handlers wait until the main thread is out of the plugin, and
# raise in the program. Python asks for them between instructions; a wait of jaxlib's, which may be what comes
# next, asks for signals alone. So a signal that nobody has asked for is sent again. Handlers do not wait where
# the plugin itself waits for a result or for other processes to join (`open_signals`), nor the second time that
# a signal comes. Where the main thread is in an engine that does not come back, as in a loop without end, Python
# calls no handler at all: the third Ctrl-C ends the process.

cdef extern from *:
    """
    #include <pthread.h>
    #include <signal.h>
    #include <time.h>

    #define STRETTO_SIGNALS 65
    static volatile sig_atomic_t stretto_depth = 0, stretto_any = 0;
    static volatile sig_atomic_t stretto_held[STRETTO_SIGNALS];
    static void (*stretto_next[STRETTO_SIGNALS])(int);
    static pthread_t stretto_main;
    static int stretto_guarding = 0;
    static int stretto_sending = 0;  /* whether `stretto_send_again` runs */
    static PyObject* stretto_raised = NULL;  /* by a handler that Python called on the way in */
    static volatile sig_atomic_t stretto_again = 0;  /* how often Ctrl-C came while one was held, */
    static volatile time_t stretto_first = 0;        /* and when that was */

    static volatile sig_atomic_t stretto_ctrl_c = 0;     /* how often it came at all */

    static void stretto_on_signal(int number) {
        if (number == SIGINT) stretto_ctrl_c++;
        if (stretto_depth > 0 && !stretto_held[number]) {
            stretto_held[number] = 1;
            stretto_any = 1;
            if (number == SIGINT) {
                stretto_again = 0;
                stretto_first = time(NULL);
            }
            if (stretto_depth > 0) return;
            stretto_held[number] = 0;  /* the main thread has left meanwhile */
        } else if (number == SIGINT && stretto_depth > 0 && ++stretto_again > 1
                   && time(NULL) > stretto_first + 1) {  /* not for keys that are hit in a hurry */
            signal(SIGINT, SIG_DFL);
            raise(SIGINT);
            return;
        }
        stretto_next[number](number);
    }

    static void (*stretto_python)(int) = NULL;  /* Python's handler, which calls those in Python */
    static const int stretto_numbers[] = {SIGINT, SIGTERM, SIGHUP, SIGALRM};

    /* In the main thread: have handlers in Python wait, also those that were set since the last time. */
    static void stretto_hold(void) {
        struct sigaction now;
        for (size_t i = 0; i < sizeof(stretto_numbers) / sizeof(int); i++) {
            int number = stretto_numbers[i];
            if (sigaction(number, NULL, &now) || now.sa_handler != stretto_python) continue;
            stretto_next[number] = stretto_python;
            now.sa_handler = stretto_on_signal;
            sigaction(number, &now, NULL);
        }
    }

    /* In the main thread; a signal whose handler is in Python: all that are have one function in C. */
    static void stretto_guard(int number) {
        struct sigaction now;
        if (sigaction(number, NULL, &now) || now.sa_handler == stretto_on_signal) return;
        stretto_python = now.sa_handler;
        stretto_main = pthread_self();
        stretto_guarding = 1;
        stretto_hold();
    }

    /* Whether it was held; it is not from now on. */
    static int stretto_take(int number) {
        return __atomic_exchange_n(&stretto_held[number], 0, __ATOMIC_SEQ_CST);
    }

    static int stretto_fire(void* unused) {
        if (stretto_depth > 0) {  /* back in the plugin already: on the way out again */
            stretto_any = 1;
            return 0;
        }
        for (int number = 1; number < STRETTO_SIGNALS; number++) {
            if (stretto_take(number)) raise(number);
        }
        if (stretto_raised != NULL) {
            PyObject* raised = stretto_raised;
            stretto_raised = NULL;
            PyErr_SetObject((PyObject*)Py_TYPE(raised), raised);
            Py_DECREF(raised);
            return -1;
        }
        return PyErr_CheckSignals();
    }

    /* What a handler has raised is raised anew once the main thread is out of the plugin. */
    static void stretto_keep(PyObject* raised) {
        Py_INCREF(raised);
        Py_XSETREF(stretto_raised, raised);
        stretto_any = 1;
    }

    static void stretto_keep_current(void) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyErr_NormalizeException(&type, &value, &trace);
        stretto_keep(value);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    }

    /* With the GIL and no exception set. The result is for stretto_leave. */
    static int stretto_enter(void) {
        if (!stretto_guarding || !pthread_equal(pthread_self(), stretto_main)) return 0;
        if (stretto_depth++ == 0 && PyErr_CheckSignals()) stretto_keep_current();
        return 1;
    }

    static int stretto_holds(void) {
        for (int number = 1; number < STRETTO_SIGNALS; number++) {
            if (stretto_held[number]) return 1;
        }
        return 0;
    }

    /* A thread of its own: what is still held some time after the main thread has left is sent to it again. */
    static void* stretto_send_again(void* unused) {
        const struct timespec some = {0, 100000000};
        do {
            while (stretto_holds()) {
                nanosleep(&some, NULL);
                for (int number = 1; stretto_depth == 0 && number < STRETTO_SIGNALS; number++) {
                    if (stretto_take(number)) pthread_kill(stretto_main, number);
                }
            }
            __atomic_store_n(&stretto_sending, 0, __ATOMIC_SEQ_CST);
        } while (stretto_holds() && !__atomic_exchange_n(&stretto_sending, 1, __ATOMIC_SEQ_CST));
        return NULL;
    }

    static void stretto_watch(void) {
        pthread_t thread;
        sigset_t all, before;
        if (!stretto_holds() || __atomic_exchange_n(&stretto_sending, 1, __ATOMIC_SEQ_CST)) return;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  /* signals are for the others */
        if (pthread_create(&thread, NULL, stretto_send_again, NULL)) stretto_sending = 0;
        else pthread_detach(thread);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }

    static void stretto_leave(int entered) {
        if (entered && --stretto_depth == 0 && stretto_any) {
            stretto_any = 0;
            if (Py_AddPendingCall(stretto_fire, NULL)) stretto_any = 1;  /* full: the next time */
            stretto_watch();
        }
    }

    /* Handlers are called at once from here to stretto_close, which takes the result. */
    static int stretto_open(int entered) {
        int depth = stretto_depth;
        if (!entered) return 0;
        stretto_hold();
        stretto_depth = 0;
        for (int number = 1; stretto_any && number < STRETTO_SIGNALS; number++) {
            if (stretto_take(number)) raise(number);
        }
        return depth;
    }

    static void stretto_close(int depth) {
        if (depth) stretto_depth = depth;
    }
    """
    int open_signals "stretto_open"(int entered)
    void close_signals "stretto_close"(int depth)
    void keep_raised "stretto_keep"(object raised)
    void hold_signals "stretto_hold"()
    void stretto_guard(int number)
    int stretto_ctrl_c


def guard(int number):
    """Keep signals whose handlers are in Python, as this one's is, from interrupting the main thread,
    which calls this, while it is in the plugin. Handlers that are set later wait too.
    """
    stretto_guard(number)


def interrupts():
    """How often Ctrl-C came since signals are guarded."""
    return stretto_ctrl_c
