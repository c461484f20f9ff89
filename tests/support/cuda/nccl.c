/* NCCL on the fake driver of driver.c, for ranks of one host: threads of one process, or several processes.
 *
 * A communicator is a file in /dev/shm with a mailbox for each pair of ranks, a ring of bytes with one sender and
 * one receiver. Every collective is a list of transfers through mailboxes, then sums of what has come, in the order
 * of ranks. What the calls of a group enqueue on a stream of one communicator is one launch: a function of the host
 * in the stream's order, which moves all of it at once. So calls that do not match on all ranks hang, here too.
 *
 * A rank that dies is noticed by nobody, as where GPUs share a host: the others wait until they abort.
 *
 *   FAKE_NCCL_DELAY_US  every launch first sleeps for up to that long, in its stream's turn (0): longer than what
 *                       XLA does meanwhile, so that it would be seen if XLA did not wait. It is also taken later
 *   FAKE_NCCL_FAIL_AT   the number of a launch of this process that moves nothing; its communicator then has the
 *                       asynchronous error ncclRemoteError, and the stream waits until somebody aborts (none)
 *
 * fake_nccl_launches() counts the launches of this process.
 * A function that is not here is one that stretto does not call: the dynamic linker names it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

int cuCtxGetDevice(int *device);
int cuLaunchHostFunc(void *stream, void (*function)(void *), void *argument);

enum { SUCCESS = 0, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
enum { RING = 1 << 15, VERSION = 23007 };

typedef struct {
    char bytes[128];
} Id;
typedef struct {
    atomic_ullong sent, received;
    char ring[RING];
} Box;
typedef struct {
    atomic_int joined;
    char padding[60];
    Box boxes[]; /* [source * size + target] */
} Shared;
typedef struct {
    Shared *shared;
    int size, rank, device, nonblocking;
    Id id;
    atomic_int state, aborted, launched; /* state: what ncclCommGetAsyncError tells */
} Comm;

static size_t bytes_of(int size) { return sizeof(Shared) + sizeof(Box) * (size_t)size * (size_t)size; }
static int number(const char *name) {
    const char *given = getenv(name);
    return given ? atoi(given) : 0;
}
static void nap(void) { nanosleep(&(struct timespec){0, 20000}, NULL); }

/* Joining: each rank opens the file and says so, and the first removes its name when all have it open. */

static int open_shared(Comm *comm) {
    int file = shm_open(comm->id.bytes, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, (off_t)bytes_of(comm->size))) return SYSTEM;
    comm->shared = mmap(NULL, bytes_of(comm->size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (comm->shared == MAP_FAILED) return SYSTEM;
    comm->shared->joined++;
    return SUCCESS;
}
static void *await_others(void *given) {
    Comm *comm = given;
    while (comm->shared->joined < comm->size && !comm->aborted) nap();
    if (comm->rank == 0) shm_unlink(comm->id.bytes);
    int expected = IN_PROGRESS;
    atomic_compare_exchange_strong(&comm->state, &expected, SUCCESS);
    return NULL;
}

/* Types and sums. Floats of 16 bits are summed in their own type, one operand after the other. */

static const size_t WIDTH[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
enum { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, TYPES };
typedef struct {
    uint16_t bits;
} Bfloat;
static float wide(Bfloat x) {
    union { uint32_t bits; float value; } u = {(uint32_t)x.bits << 16};
    return u.value;
}
static Bfloat narrow(float x) {
    union { float value; uint32_t bits; } u = {x};
    if (x != x) return (Bfloat){0x7FC0};
    return (Bfloat){(uint16_t)((u.bits + 0x7FFF + ((u.bits >> 16) & 1)) >> 16)};
}
#define COMBINE(a, b) (op == 0 ? (a) + (b) : op == 1 ? (a) * (b) : op == 2 ? ((a) > (b) ? (a) : (b)) : (a) < (b) ? (a) : (b))
#define REDUCE(T) \
    for (size_t i = 0; i < count; i++) ((T *)to)[i] = (T)COMBINE(((T *)to)[i], ((const T *)from)[i])
static void reduce(void *to, const void *from, size_t count, int type, int op) {
    switch (type) {
    case I8: REDUCE(int8_t); break;
    case U8: REDUCE(uint8_t); break;
    case I32: REDUCE(uint32_t); break; /* as unsigned: sums wrap around */
    case U32: REDUCE(uint32_t); break;
    case I64: REDUCE(uint64_t); break;
    case U64: REDUCE(uint64_t); break;
    case F16: REDUCE(_Float16); break;
    case F32: REDUCE(float); break;
    case F64: REDUCE(double); break;
    case BF16:
        for (size_t i = 0; i < count; i++) {
            float a = wide(((Bfloat *)to)[i]), b = wide(((const Bfloat *)from)[i]);
            ((Bfloat *)to)[i] = narrow(COMBINE(a, b));
        }
    }
}
static void reduce_signed(void *to, const void *from, size_t count, int type, int op) {
    if (type == I32)
        REDUCE(int32_t);
    else
        REDUCE(int64_t);
}

/* Launches: transfers, all at once, then what is to be made of what came. */

typedef struct Transfer {
    char *at;
    size_t left;
    int peer, outgoing;
    struct Transfer *next;
} Transfer;
typedef struct Step { /* parts[rank] have come; their sum goes to `to` */
    char *parts, *to;
    size_t count;
    int type, op;
    struct Step *next;
} Step;
typedef struct Launch {
    Comm *comm;
    void *stream;
    Transfer *transfers, **last_transfer;
    Step *steps, **last_step;
    int fails;
    struct Launch *next;
} Launch;

static atomic_int launches;
int fake_nccl_launches(void) { return launches; }

/* Moves what can be moved now; whether anything was. Transfers of one mailbox keep their order. */
static int progress(Launch *launch, int *pending) {
    Comm *comm = launch->comm;
    char busy[2][comm->size];
    int moved = 0;
    memset(busy, 0, sizeof busy);
    *pending = 0;
    for (Transfer *t = launch->transfers; t; t = t->next) {
        if (!t->left || busy[t->outgoing][t->peer]) {
            *pending |= t->left > 0;
            continue;
        }
        int source = t->outgoing ? comm->rank : t->peer, target = t->outgoing ? t->peer : comm->rank;
        Box *box = &comm->shared->boxes[(size_t)source * comm->size + target];
        size_t filled = box->sent - box->received, can = t->outgoing ? RING - filled : filled;
        size_t at = (t->outgoing ? box->sent : box->received) % RING;
        if (can > t->left) can = t->left;
        if (can > RING - at) can = RING - at;
        if (can && t->outgoing) {
            memcpy(box->ring + at, t->at, can);
            box->sent += can;
        } else if (can) {
            memcpy(t->at, box->ring + at, can);
            box->received += can;
        }
        t->at += can, t->left -= can, moved |= can > 0;
        if (t->left) busy[t->outgoing][t->peer] = *pending = 1;
    }
    return moved;
}
static void run(void *given) {
    Launch *launch = given;
    Comm *comm = launch->comm;
    int pending = 1, most = number("FAKE_NCCL_DELAY_US");
    unsigned seed = (unsigned)(comm->rank + 8 * launches);
    for (long left = most ? rand_r(&seed) % most : 0; left > 0 && !comm->aborted; left -= 20) nap();
    for (int i = 0; launch->fails && i < 1000; i++) nap(); /* as a network that gives up at last */
    if (launch->fails) comm->state = REMOTE;
    while (!comm->aborted && pending)
        if (launch->fails || !progress(launch, &pending)) nap();
    for (Step *step = launch->steps, *after; step; step = after) {
        size_t width = WIDTH[step->type], nbytes = step->count * width;
        for (int r = 1; r < comm->size; r++)
            (step->op > 1 && (step->type == I32 || step->type == I64) ? reduce_signed : reduce)(
                step->parts, step->parts + (size_t)r * nbytes, step->count, step->type, step->op);
        if (step->to && !comm->aborted) memcpy(step->to, step->parts, nbytes);
        after = step->next;
        free(step->parts);
        free(step);
    }
    for (Transfer *t = launch->transfers, *after; t; t = after) {
        after = t->next;
        free(t);
    }
    comm->launched--;
    free(launch);
}

/* Groups: what a thread calls between the start and the end of one is launched at its end. */

static __thread int depth;
static __thread Launch *grouped;
typedef struct Joining {
    Comm *comm;
    struct Joining *next;
} Joining;
static __thread Joining *joining;

static Launch *launch_on(Comm *comm, void *stream) {
    Launch **at = &grouped;
    while (*at && ((*at)->comm != comm || (*at)->stream != stream)) at = &(*at)->next;
    if (!*at) {
        Launch *made = *at = calloc(1, sizeof *made);
        made->comm = comm, made->stream = stream;
        made->last_transfer = &made->transfers, made->last_step = &made->steps;
    }
    return *at;
}
static void transfer(Launch *launch, const void *at, size_t nbytes, int peer, int outgoing) {
    Transfer *made = calloc(1, sizeof *made);
    *made = (Transfer){(char *)at, nbytes, peer, outgoing, NULL};
    *launch->last_transfer = made;
    launch->last_transfer = &made->next;
}
/* Sends to all and receives from all: parts of `nbytes`; a stride of 0 sends all the same one. */
static void exchange(Launch *launch, const char *from, size_t stride, char *to, size_t nbytes) {
    for (int r = 0; r < launch->comm->size; r++) {
        transfer(launch, from + (size_t)r * stride, nbytes, r, 1);
        transfer(launch, to + (size_t)r * nbytes, nbytes, r, 0);
    }
}
static void sum(Launch *launch, char *parts, void *to, size_t count, int type, int op) {
    Step *made = calloc(1, sizeof *made);
    *made = (Step){parts, to, count, type, op, NULL};
    *launch->last_step = made;
    launch->last_step = &made->next;
}
int ncclGroupStart(void) {
    depth++;
    return SUCCESS;
}
/* A communicator that does not block takes its launches later: until then it is in progress. */
static void *launch_later(void *given) {
    Launch *launch = given;
    Comm *comm = launch->comm;
    int expected = IN_PROGRESS;
    if (number("FAKE_NCCL_DELAY_US")) nap();
    cuLaunchHostFunc(launch->stream, run, launch);
    atomic_compare_exchange_strong(&comm->state, &expected, SUCCESS);
    return NULL;
}
int ncclGroupEnd(void) {
    static int fail_at = -1;
    int result = SUCCESS;
    pthread_t thread;
    if (--depth) return SUCCESS;
    if (fail_at < 0) fail_at = number("FAKE_NCCL_FAIL_AT");
    for (Launch *launch = grouped, *after; launch; launch = after) {
        after = launch->next;
        launch->fails = ++launches == fail_at;
        launch->comm->launched++;
        if (!launch->comm->nonblocking) {
            cuLaunchHostFunc(launch->stream, run, launch);
            continue;
        }
        result = launch->comm->state = IN_PROGRESS;
        pthread_create(&thread, NULL, launch_later, launch);
        pthread_detach(thread);
    }
    grouped = NULL;
    for (Joining *j = joining, *after; j; j = after) {
        after = j->next;
        if (j->comm->nonblocking) {
            pthread_create(&thread, NULL, await_others, j->comm);
            pthread_detach(thread);
            result = IN_PROGRESS;
        } else
            await_others(j->comm);
        free(j);
    }
    joining = NULL;
    return result;
}

/* Communicators. */

int ncclGetVersion(int *version) {
    *version = VERSION;
    return SUCCESS;
}
const char *ncclGetErrorString(int error) { return error == REMOTE ? "remote process exited" : "an error of the fake NCCL"; }
const char *ncclGetLastError(void *comm) { return ""; }
int ncclGetUniqueId(Id *id) {
    static atomic_int made;
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "/fake-nccl-%d-%d", getpid(), ++made);
    return SUCCESS;
}
static int join(Comm **out, int size, Id id, int rank, int nonblocking) {
    if (rank < 0 || rank >= size) return INVALID_ARGUMENT;
    Comm *comm = *out = calloc(1, sizeof *comm);
    comm->size = size, comm->rank = rank, comm->id = id, comm->nonblocking = nonblocking;
    comm->state = IN_PROGRESS;
    cuCtxGetDevice(&comm->device);
    if (open_shared(comm)) return SYSTEM;
    Joining *made = malloc(sizeof *made);
    *made = (Joining){comm, joining};
    joining = made;
    ncclGroupStart();
    return ncclGroupEnd();
}
int ncclCommInitRank(Comm **comm, int size, Id id, int rank) { return join(comm, size, id, rank, 0); }
/* ncclConfig_t: its size (8 bytes), a magic number, the version (4 each), `blocking` (4). */
int ncclCommInitRankConfig(Comm **comm, int size, Id id, int rank, const int *config) {
    if (config && (unsigned)config[2] != 0xcafebeef) return INVALID_ARGUMENT;
    return join(comm, size, id, rank, config && config[4] == 0);
}
int ncclCommCount(Comm *comm, int *count) {
    *count = comm->size;
    return SUCCESS;
}
int ncclCommUserRank(Comm *comm, int *rank) {
    *rank = comm->rank;
    return SUCCESS;
}
int ncclCommCuDevice(Comm *comm, int *device) {
    *device = comm->device;
    return SUCCESS;
}
int ncclCommGetAsyncError(Comm *comm, int *error) {
    *error = comm->state;
    return SUCCESS;
}
int ncclCommFinalize(Comm *comm) { return SUCCESS; }
/* What is under way ends; the memory of an aborted communicator is left to it. */
int ncclCommAbort(Comm *comm) {
    comm->aborted = 1;
    return SUCCESS;
}
int ncclCommDestroy(Comm *comm) {
    while (comm->launched) nap();
    munmap(comm->shared, bytes_of(comm->size));
    free(comm);
    return SUCCESS;
}

/* Collectives. Outside of a group each is one of its own. */

#define IN_A_GROUP(...)                                                          \
    if (comm->state != SUCCESS) return comm->state == IN_PROGRESS ? INVALID_USAGE : comm->state; \
    ncclGroupStart();                                                            \
    Launch *launch = launch_on(comm, stream);                                    \
    __VA_ARGS__                                                                  \
    return ncclGroupEnd();
#define CHECK_TYPE if (type < 0 || type >= TYPES) return INVALID_ARGUMENT;
#define CHECK_OP if (op < 0 || op > 3) return INVALID_ARGUMENT;

int ncclSend(const void *from, size_t count, int type, int peer, Comm *comm, void *stream) {
    CHECK_TYPE
    IN_A_GROUP(transfer(launch, from, count * WIDTH[type], peer, 1);)
}
int ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, void *stream) {
    CHECK_TYPE
    IN_A_GROUP(transfer(launch, to, count * WIDTH[type], peer, 0);)
}
int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, void *stream) {
    CHECK_TYPE
    IN_A_GROUP(exchange(launch, from, 0, to, count * WIDTH[type]);)
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
    CHECK_TYPE CHECK_OP
    IN_A_GROUP(size_t nbytes = count * WIDTH[type]; char *parts = malloc(nbytes * comm->size + 1);
               exchange(launch, from, 0, parts, nbytes); sum(launch, parts, to, count, type, op);)
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
    CHECK_TYPE CHECK_OP
    IN_A_GROUP(size_t nbytes = count * WIDTH[type]; char *parts = malloc(nbytes * comm->size + 1);
               exchange(launch, from, nbytes, parts, nbytes); sum(launch, parts, to, count, type, op);)
}
int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, Comm *comm, void *stream) {
    CHECK_TYPE CHECK_OP
    IN_A_GROUP(
        size_t nbytes = count * WIDTH[type]; transfer(launch, from, nbytes, root, 1);
        if (comm->rank == root) {
            char *parts = malloc(nbytes * comm->size + 1);
            for (int r = 0; r < comm->size; r++) transfer(launch, parts + (size_t)r * nbytes, nbytes, r, 0);
            sum(launch, parts, to, count, type, op);
        })
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, void *stream) {
    CHECK_TYPE
    IN_A_GROUP(
        for (int r = 0; comm->rank == root && r < comm->size; r++) transfer(launch, from, count * WIDTH[type], r, 1);
        transfer(launch, to, count * WIDTH[type], root, 0);)
}
