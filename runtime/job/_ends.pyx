# cython: language_level=3
"""What has to be in C at the end of a rank: what Python tells nobody, and what comes while it cannot run.

- Python ends with the status of the `SystemExit` that nobody caught, and does not say which. So it is noted when
  one is made (``raise SystemExit(3)``, ``exit(3)``), and when `sys.exit` is called, which up to Python 3.11 makes
  none where nobody catches it. Both are fields of CPython's that hold a function; what was there is called.
- SIGTERM may find the main thread anywhere, in MPI or in an engine, where no handler in Python is called.
"""

cdef extern from *:
    """
    #include <signal.h>
    #include <stdatomic.h>
    #include <string.h>
    #include <unistd.h>

    static int stretto_status = 0;

    static void stretto_note(PyObject* code) {
        stretto_status = 1;
        if (code == NULL || code == Py_None) {
            stretto_status = 0;
        } else if (PyLong_Check(code)) {
            stretto_status = (int)(PyLong_AsUnsignedLongMask(code) & 0xff);
        }
    }

    static initproc stretto_init = NULL;
    static int stretto_made(PyObject* self, PyObject* args, PyObject* kwargs) {
        int result = stretto_init(self, args, kwargs);
        if (result == 0) {
            Py_ssize_t count = PyTuple_GET_SIZE(args);
            stretto_note(count == 0 ? NULL : count == 1 ? PyTuple_GET_ITEM(args, 0) : args);
        }
        return result;
    }

    typedef PyObject* (*stretto_call)(PyObject*, PyObject* const*, Py_ssize_t);
    static stretto_call stretto_exit = NULL;
    static PyObject* stretto_called(PyObject* self, PyObject* const* args, Py_ssize_t count) {
        if (count < 2) stretto_note(count ? args[0] : NULL);
        return stretto_exit(self, args, count);
    }

    static void stretto_note_status(PyObject* exit) {
        PyTypeObject* type = (PyTypeObject*)PyExc_SystemExit;
        if (stretto_init != NULL) return;
        stretto_init = type->tp_init;
        type->tp_init = stretto_made;
        if (PyCFunction_CheckExact(exit)) {
            PyMethodDef* method = ((PyCFunctionObject*)exit)->m_ml;
            if (method->ml_flags == METH_FASTCALL) {
                stretto_exit = (stretto_call)(void*)method->ml_meth;
                method->ml_meth = (PyCFunction)(void*)stretto_called;
            }
        }
    }

    static char stretto_last_words[512];
    static pid_t stretto_rank = 0;
    enum { STRETTO_SILENT, STRETTO_SPEAKS, STRETTO_HUSHED };
    static atomic_int stretto_speech = STRETTO_SILENT;

    /* SIGTERM may come again, to another thread, while this one has not got as far as writing: the default handler
     * would end the process without a word, so the thread that has written sets it. */
    static void stretto_on_term(int number) {
        if (getpid() == stretto_rank) {  /* and no child that was forked from it */
            int speech = STRETTO_SILENT;
            if (atomic_compare_exchange_strong(&stretto_speech, &speech, STRETTO_SPEAKS)) {
                ssize_t written = write(2, stretto_last_words, strlen(stretto_last_words));
                (void)written;
            } else if (speech == STRETTO_SPEAKS) {
                return;  /* another thread writes, and ends the process */
            }
        }
        signal(number, SIG_DFL);
        raise(number);  /* comes when this has returned */
    }

    static void stretto_hush(void) {
        int speech = STRETTO_SILENT;
        atomic_compare_exchange_strong(&stretto_speech, &speech, STRETTO_HUSHED);
    }

    static int stretto_speak_at_term(const char* text) {
        struct sigaction now, wanted;
        if (sigaction(SIGTERM, NULL, &now) || now.sa_handler != SIG_DFL) return 0;
        strncpy(stretto_last_words, text, sizeof(stretto_last_words) - 1);
        stretto_rank = getpid();
        memset(&wanted, 0, sizeof(wanted));
        wanted.sa_handler = stretto_on_term;
        wanted.sa_flags = SA_RESTART;
        return sigaction(SIGTERM, &wanted, NULL) == 0;
    }
    """
    int stretto_status
    void stretto_note_status(object exit) noexcept
    int stretto_speak_at_term(const char* text) noexcept nogil
    void stretto_hush() noexcept nogil


def note_status():
    """From now on note with which status this process ends, if it does so by `SystemExit`."""
    import sys

    stretto_note_status(sys.exit)


def status():
    """The exit status that the last `SystemExit` asks for, 0 to 255; 0 if there was none.

    Of one that was caught too, for nobody knows whether it will be.
    """
    return stretto_status


def speak_at_sigterm(bytes text):
    """Write ``text`` to stderr when SIGTERM ends this process. Returns False, and does not, where it is handled."""
    return bool(stretto_speak_at_term(text))


def hush():
    """Say nothing at SIGTERM any more: why this process ends has been said."""
    stretto_hush()
