/* A CUDA driver on the host's memory: what XLA's CUDA client needs of libcuda.so.1, for machines without a GPU.
 *
 * A device's memory is the host's, a stream is a thread that works off a queue of jobs, an event is a pair of
 * counters. So orders, lifetimes and races are those of a program on a GPU; only kernels compute nothing, and
 * the default stream does not wait for the others.
 *
 *   FAKE_CUDA_DEVICES    how many devices there are (1)
 *   FAKE_CUDA_DELAY_US   every job of a stream first sleeps for up to that long, pseudo-random per stream (0)
 *
 *   FAKE_CUDA_LOCKS=1    who loads code or takes memory waits for all streams, and nobody is served meanwhile
 *
 * fake_cuda_host_waits() counts the calls that made the host wait for a stream; fake_cuda_hold(function) has every
 * stream call the function in its turn, which holds it up.
 * A function that is not here is one that XLA has not asked for: the dynamic linker names it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
};
enum { VERSION = 13000, MOST_DEVICES = 16, MOST_STREAMS = 4096, MOST_BLOCKS = 1 << 16 };
enum { HOST = 1, DEVICE = 2 }; /* CUmemorytype */

static int number(const char *name, int otherwise) {
    const char *given = getenv(name);
    return given ? atoi(given) : otherwise;
}

/* Streams: a thread and a queue each. */

typedef void (*Function)(void *);
typedef struct Job {
    Function function;
    void *argument;
    struct Job *next;
} Job;
typedef struct Stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Job *first, *last;
    int busy, ending;
    unsigned seed;
    uint64_t id;
    void *context;
} Stream;

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static Stream *streams[MOST_STREAMS];
static uint64_t streams_made;
static atomic_ullong host_waits;

unsigned long long fake_cuda_host_waits(void) { return host_waits; }

static int contexts[MOST_DEVICES]; /* a device's context is the address of its entry */
static __thread void *current, *pushed[64];
static __thread int depth;

static int device_of(void *context) { return context ? (int)((int *)context - contexts) : 0; }

static void delay(Stream *stream) {
    int most = number("FAKE_CUDA_DELAY_US", 0);
    if (most > 0) {
        struct timespec time = {0, (long)(rand_r(&stream->seed) % most) * 1000};
        nanosleep(&time, NULL);
    }
}

static void *work(void *given) {
    Stream *stream = given;
    for (;;) {
        pthread_mutex_lock(&stream->lock);
        while (!stream->first && !stream->ending) pthread_cond_wait(&stream->changed, &stream->lock);
        Job *job = stream->first;
        if (!job) break;
        stream->first = job->next;
        stream->busy = 1;
        pthread_mutex_unlock(&stream->lock);
        delay(stream);
        job->function(job->argument);
        free(job);
        pthread_mutex_lock(&stream->lock);
        stream->busy = 0;
        pthread_cond_broadcast(&stream->changed);
        pthread_mutex_unlock(&stream->lock);
    }
    pthread_mutex_unlock(&stream->lock);
    free(stream);
    return NULL;
}

static Stream *make_stream(void) {
    Stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    stream->context = current ? current : contexts;
    pthread_mutex_lock(&registry);
    stream->id = ++streams_made;
    stream->seed = (unsigned)stream->id;
    for (int i = 0; i < MOST_STREAMS; i++)
        if (!streams[i]) {
            streams[i] = stream;
            break;
        }
    pthread_mutex_unlock(&registry);
    pthread_t thread;
    pthread_create(&thread, NULL, work, stream);
    pthread_detach(thread);
    return stream;
}

static Stream *default_stream;
static void make_default(void) { default_stream = make_stream(); }

/* 0, 1 and 2 stand for the default stream. */
static Stream *stream_of(void *handle) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if ((uintptr_t)handle > 2) return handle;
    pthread_once(&once, make_default);
    return default_stream;
}

static int enqueue(void *handle, Function function, void *argument) {
    Stream *stream = stream_of(handle);
    Job *job = malloc(sizeof *job);
    *job = (Job){function, argument, NULL};
    pthread_mutex_lock(&stream->lock);
    if (stream->first)
        stream->last->next = job;
    else
        stream->first = job;
    stream->last = job;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return SUCCESS;
}

static int drain(void *handle) {
    Stream *stream = stream_of(handle);
    host_waits++;
    pthread_mutex_lock(&stream->lock);
    while (stream->first || stream->busy) pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    return SUCCESS;
}

int cuStreamCreate(void **stream, unsigned flags) {
    if (!current) return NO_CONTEXT;
    *stream = make_stream();
    return SUCCESS;
}
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    return cuStreamCreate(stream, flags);
}
/* The stream finishes what it has, and goes. */
int cuStreamDestroy_v2(Stream *stream) {
    pthread_mutex_lock(&registry);
    for (int i = 0; i < MOST_STREAMS; i++)
        if (streams[i] == stream) streams[i] = NULL;
    pthread_mutex_unlock(&registry);
    pthread_mutex_lock(&stream->lock);
    stream->ending = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return SUCCESS;
}
int cuStreamSynchronize(void *stream) { return drain(stream); }
int cuStreamQuery(void *handle) {
    Stream *stream = stream_of(handle);
    pthread_mutex_lock(&stream->lock);
    int pending = stream->first || stream->busy;
    pthread_mutex_unlock(&stream->lock);
    return pending ? NOT_READY : SUCCESS;
}
int cuStreamGetFlags(void *stream, unsigned *flags) {
    *flags = 1; /* not synchronized with the default stream */
    return SUCCESS;
}
int cuStreamGetPriority(void *stream, int *priority) {
    *priority = 0;
    return SUCCESS;
}
int cuStreamIsCapturing(void *stream, int *capturing) {
    *capturing = 0;
    return SUCCESS;
}
int cuStreamGetCtx(void *stream, void **context) {
    *context = stream_of(stream)->context;
    return SUCCESS;
}
int cuStreamGetId(void *stream, unsigned long long *id) {
    *id = stream_of(stream)->id;
    return SUCCESS;
}
int cuCtxSynchronize(void) {
    void *context = current ? current : contexts;
    for (int i = 0; i < MOST_STREAMS; i++)
        if (streams[i] && streams[i]->context == context) drain(streams[i]);
    return SUCCESS;
}

/* What the driver may do for those who load code or take memory, and others wait for. */
static pthread_mutex_t served = PTHREAD_MUTEX_INITIALIZER;
static void wait_for_all(void) {
    if (!number("FAKE_CUDA_LOCKS", 0)) return;
    pthread_mutex_lock(&served);
    cuCtxSynchronize();
    pthread_mutex_unlock(&served);
}
static void pass_by(void) {
    pthread_mutex_lock(&served);
    pthread_mutex_unlock(&served);
}

int fake_cuda_hold(Function function) {
    for (int i = 0; i < MOST_STREAMS; i++)
        if (streams[i]) enqueue(streams[i], function, NULL);
    return SUCCESS;
}

/* Functions of the host, in a stream's order. */

typedef struct {
    void (*function)(void *, int, void *);
    void *stream, *argument;
} Callback;
static void call_back(void *given) {
    Callback *c = given;
    c->function(c->stream, SUCCESS, c->argument);
    free(c);
}
int cuLaunchHostFunc(void *stream, Function function, void *argument) {
    return enqueue(stream, function, argument);
}
int cuStreamAddCallback(void *stream, void (*function)(void *, int, void *), void *argument, unsigned flags) {
    Callback *c = malloc(sizeof *c);
    *c = (Callback){function, stream, argument};
    return enqueue(stream, call_back, c);
}

/* Events: how often recorded, and how many of those records the streams have passed. Whoever waits for an
 * event keeps it alive beyond its destruction. */

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t recorded, passed;
    int users;
    void *context;
    struct timespec at;
} Event;
typedef struct {
    Event *event;
    uint64_t record;
} Point;

static void let_go(Event *event) { /* with the lock held */
    int last = --event->users == 0;
    pthread_mutex_unlock(&event->lock);
    if (last) free(event);
}
static void pass(void *given) {
    Point *point = given;
    Event *event = point->event;
    pthread_mutex_lock(&event->lock);
    if (event->passed < point->record) event->passed = point->record;
    clock_gettime(CLOCK_MONOTONIC, &event->at);
    pthread_cond_broadcast(&event->changed);
    let_go(event);
    free(point);
}
static void await(void *given) {
    Point *point = given;
    Event *event = point->event;
    pthread_mutex_lock(&event->lock);
    while (event->passed < point->record) pthread_cond_wait(&event->changed, &event->lock);
    let_go(event);
    free(point);
}
static int with_event(void *stream, Event *event, int records, Function function) {
    Point *point = malloc(sizeof *point);
    pthread_mutex_lock(&event->lock);
    event->recorded += records;
    event->users++;
    *point = (Point){event, event->recorded};
    pthread_mutex_unlock(&event->lock);
    return enqueue(stream, function, point);
}
int cuEventCreate(Event **event, unsigned flags) {
    if (!current) return NO_CONTEXT;
    *event = calloc(1, sizeof **event);
    (*event)->context = current;
    pthread_mutex_init(&(*event)->lock, NULL);
    pthread_cond_init(&(*event)->changed, NULL);
    (*event)->users = 1;
    return SUCCESS;
}
int cuEventDestroy_v2(Event *event) {
    pthread_mutex_lock(&event->lock);
    let_go(event);
    return SUCCESS;
}
/* A stream records events of its own context only. */
int cuEventRecord(Event *event, void *stream) {
    void *context = (uintptr_t)stream > 2 ? stream_of(stream)->context : current;
    return event->context == context ? with_event(stream, event, 1, pass) : INVALID_HANDLE;
}
int cuEventRecordWithFlags(Event *event, void *stream, unsigned flags) { return cuEventRecord(event, stream); }
int cuStreamWaitEvent(void *stream, Event *event, unsigned flags) {
    return with_event(stream, event, 0, await);
}

/* A stream writes a number. */

typedef struct {
    volatile uint32_t *at;
    uint32_t number;
} Number;
static void write_number(void *given) {
    Number *written = given;
    atomic_thread_fence(memory_order_release);
    *written->at = written->number;
    free(written);
}
int cuStreamWriteValue32_v2(void *stream, uint32_t *at, uint32_t number, unsigned flags) {
    Number *written = malloc(sizeof *written);
    *written = (Number){at, number};
    return flags ? NOT_SUPPORTED : enqueue(stream, write_number, written);
}
int cuEventQuery(Event *event) {
    pass_by();
    pthread_mutex_lock(&event->lock);
    int pending = event->passed < event->recorded;
    pthread_mutex_unlock(&event->lock);
    return pending ? NOT_READY : SUCCESS;
}
int cuEventSynchronize(Event *event) {
    host_waits++;
    pthread_mutex_lock(&event->lock);
    while (event->passed < event->recorded) pthread_cond_wait(&event->changed, &event->lock);
    pthread_mutex_unlock(&event->lock);
    return SUCCESS;
}
int cuEventElapsedTime(float *milliseconds, Event *begin, Event *end) {
    if (begin->context != end->context) return INVALID_HANDLE;
    *milliseconds = (end->at.tv_sec - begin->at.tv_sec) * 1e3f + (end->at.tv_nsec - begin->at.tv_nsec) * 1e-6f;
    return SUCCESS;
}

/* Memory: blocks of the host's, with what pointers are asked about. New and freed ones are filled with
 * garbage, so that whoever reads too early or too late sees it. */

static struct {
    char *begin;
    size_t size;
    int kind, device;
} blocks[MOST_BLOCKS];
static int blocks_used;
static const size_t TOTAL = (size_t)8 << 30, MOST_GARBAGE = (size_t)1 << 20;

static void note_block(void *begin, size_t size, int kind) {
    pthread_mutex_lock(&registry);
    int i = 0;
    while (i < blocks_used && blocks[i].begin) i++;
    if (i == MOST_BLOCKS) abort();
    if (i == blocks_used) blocks_used++;
    blocks[i].begin = begin, blocks[i].size = size, blocks[i].kind = kind;
    blocks[i].device = device_of(current);
    pthread_mutex_unlock(&registry);
}
static int block_of(const char *pointer) {
    for (int i = 0; i < blocks_used; i++)
        if (blocks[i].begin && pointer >= blocks[i].begin && pointer < blocks[i].begin + blocks[i].size) return i;
    return -1;
}
/* Forgets a block, and gives its size. */
static size_t forget_block(void *begin) {
    size_t size = 0;
    pthread_mutex_lock(&registry);
    int i = block_of(begin);
    if (i >= 0) {
        size = blocks[i].size;
        blocks[i].begin = NULL;
    }
    pthread_mutex_unlock(&registry);
    return size;
}
static void spoil(void *begin, size_t size) { memset(begin, 0xCD, size < MOST_GARBAGE ? size : MOST_GARBAGE); }

static int allocate(void **pointer, size_t size, size_t alignment, int kind) {
    size = size ? size : 1;
    if (posix_memalign(pointer, alignment, size)) return OUT_OF_MEMORY;
    spoil(*pointer, size);
    note_block(*pointer, size, kind);
    return SUCCESS;
}
static void release(void *pointer) {
    spoil(pointer, forget_block(pointer));
    free(pointer);
}
int cuMemAlloc_v2(void **pointer, size_t size) {
    wait_for_all();
    return allocate(pointer, size, 512, DEVICE);
}
int cuMemFree_v2(void *pointer) {
    release(pointer);
    return SUCCESS;
}
int cuMemAllocAsync(void **pointer, size_t size, void *stream) { return cuMemAlloc_v2(pointer, size); }
int cuMemAllocFromPoolAsync(void **pointer, size_t size, void *pool, void *stream) {
    return cuMemAlloc_v2(pointer, size);
}
static int pool; /* stands for all pools */
int cuDeviceGetDefaultMemPool(void **of, int device) {
    *of = &pool;
    return SUCCESS;
}
int cuDeviceGetMemPool(void **of, int device) { return cuDeviceGetDefaultMemPool(of, device); }
int cuMemPoolSetAttribute(void *of, int attribute, void *value) { return SUCCESS; }
int cuMemPoolGetAttribute(void *of, int attribute, uint64_t *value) {
    *value = 0;
    return SUCCESS;
}
int cuMemFreeAsync(void *pointer, void *stream) { return enqueue(stream, release, pointer); }
int cuMemHostAlloc(void **pointer, size_t size, unsigned flags) {
    wait_for_all();
    return current ? allocate(pointer, size, 4096, HOST) : NO_CONTEXT;
}
int cuMemFreeHost(void *pointer) { return cuMemFree_v2(pointer); }
int cuMemHostGetFlags(unsigned *flags, void *pointer) {
    *flags = 0;
    return SUCCESS;
}
int cuMemHostRegister_v2(void *pointer, size_t size, unsigned flags) {
    note_block(pointer, size, HOST);
    return SUCCESS;
}
int cuMemHostUnregister(void *pointer) {
    forget_block(pointer);
    return SUCCESS;
}
int cuMemHostGetDevicePointer_v2(void **device, void *pointer, unsigned flags) {
    if (!current) return NO_CONTEXT;
    *device = pointer;
    return SUCCESS;
}
int cuMemGetInfo_v2(size_t *unused, size_t *total) {
    *total = *unused = TOTAL;
    return SUCCESS;
}
int cuMemGetAddressRange_v2(void **begin, size_t *size, void *pointer) {
    int i = block_of(pointer);
    if (i < 0) return INVALID_VALUE;
    if (begin) *begin = blocks[i].begin;
    if (size) *size = blocks[i].size;
    return SUCCESS;
}
int cuPointerGetAttribute(void *out, int attribute, void *pointer) {
    int i = block_of(pointer);
    if (i < 0) return INVALID_VALUE;
    switch (attribute) {
    case 1: *(void **)out = &contexts[blocks[i].device]; break;
    case 2: *(int *)out = blocks[i].kind; break;
    case 3: case 4: *(void **)out = pointer; break;
    case 7: *(uint64_t *)out = (uintptr_t)pointer; break;
    case 9: *(int *)out = blocks[i].device; break;
    case 11: *(void **)out = blocks[i].begin; break;
    case 12: *(size_t *)out = blocks[i].size; break;
    default: *(int *)out = 0;
    }
    return SUCCESS;
}

/* Attributes of a pointer that is not ours are 0. */
int cuPointerGetAttributes(unsigned count, int *attributes, void **out, void *pointer) {
    for (unsigned i = 0; i < count; i++)
        if (cuPointerGetAttribute(out[i], attributes[i], pointer)) *(int *)out[i] = 0;
    return SUCCESS;
}

/* Virtual memory: reserved addresses are the memory, handles are numbers. */
int cuMemGetAllocationGranularity(size_t *size, void *properties, int option) {
    *size = 2 << 20;
    return SUCCESS;
}
int cuMemCreate(uint64_t *handle, size_t size, void *properties, uint64_t flags) {
    static atomic_ullong made;
    *handle = ++made;
    return SUCCESS;
}
int cuMemRelease(uint64_t handle) { return SUCCESS; }
int cuMemSetAccess(void *begin, size_t size, const void *access, size_t count) { return SUCCESS; }
int cuMemGetAccess(uint64_t *flags, void *location, void *begin) {
    *flags = 3; /* to be read and written */
    return SUCCESS;
}
int cuMemGetAllocationPropertiesFromHandle(void *properties, uint64_t handle) {
    memset(properties, 0, 32);
    return SUCCESS;
}
int cuMemRetainAllocationHandle(uint64_t *handle, void *begin) {
    *handle = 1;
    return SUCCESS;
}
int cuMemAddressReserve(void **begin, size_t size, size_t alignment, void *wanted, uint64_t flags) {
    int private = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    *begin = mmap(NULL, size, PROT_READ | PROT_WRITE, private, -1, 0);
    return *begin == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}
int cuMemAddressFree(void *begin, size_t size) { return munmap(begin, size) ? INVALID_VALUE : SUCCESS; }
int cuMemMap(void *begin, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    note_block(begin, size, DEVICE);
    return SUCCESS;
}
int cuMemUnmap(void *begin, size_t size) { return cuMemHostUnregister(begin); }

/* Copies and fills. Those without a stream are the default stream's; the host waits for them. */

typedef struct {
    void *to;
    const void *from;
    size_t size; /* in bytes, of fills in elements */
    unsigned value;
} Move;
static void copy(void *given) {
    Move *move = given;
    memmove(move->to, move->from, move->size);
    free(move);
}
static void fill_bytes(void *given) {
    Move *move = given;
    memset(move->to, (int)move->value, move->size);
    free(move);
}
static void fill_words(void *given) {
    Move *move = given;
    for (size_t i = 0; i < move->size; i++) ((uint32_t *)move->to)[i] = move->value;
    free(move);
}
static int enqueue_move(void *stream, Function function, void *to, const void *from, size_t size, unsigned value) {
    Move *move = malloc(sizeof *move);
    *move = (Move){to, from, size, value};
    return enqueue(stream, function, move);
}
int cuMemcpyAsync(void *to, const void *from, size_t size, void *stream) {
    return enqueue_move(stream, copy, to, from, size, 0);
}
int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t n, void *s) { return cuMemcpyAsync(to, from, n, s); }
int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t n, void *s) { return cuMemcpyAsync(to, from, n, s); }
int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t n, void *s) { return cuMemcpyAsync(to, from, n, s); }
int cuMemcpyPeerAsync(void *to, void *c, const void *from, void *d, size_t n, void *s) {
    return cuMemcpyAsync(to, from, n, s);
}
/* CUDA_MEMCPY2D between pointers. */
typedef struct {
    size_t from_x, from_y;
    int from_kind;
    const void *from_host;
    const char *from;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    int to_kind;
    void *to_host;
    char *to;
    void *to_array;
    size_t to_pitch, width, height;
} Rows;
static void copy_rows(void *given) {
    Rows *rows = given;
    for (size_t i = 0; i < rows->height; i++)
        memmove(rows->to + i * rows->to_pitch, rows->from + i * rows->from_pitch, rows->width);
    free(rows);
}
int cuMemcpy2DAsync_v2(const Rows *rows, void *stream) {
    Rows *kept = malloc(sizeof *kept);
    *kept = *rows;
    return enqueue(stream, copy_rows, kept);
}
int cuMemcpy(void *to, const void *from, size_t size) {
    cuMemcpyAsync(to, from, size, NULL);
    return drain(NULL);
}
int cuMemcpyHtoD_v2(void *to, const void *from, size_t size) { return cuMemcpy(to, from, size); }
int cuMemcpyDtoH_v2(void *to, const void *from, size_t size) { return cuMemcpy(to, from, size); }
int cuMemcpyDtoD_v2(void *to, const void *from, size_t size) { return cuMemcpy(to, from, size); }
int cuMemsetD8Async(void *to, unsigned char value, size_t size, void *stream) {
    return enqueue_move(stream, fill_bytes, to, NULL, size, value);
}
int cuMemsetD32Async(void *to, unsigned value, size_t count, void *stream) {
    return enqueue_move(stream, fill_words, to, NULL, count, value);
}
int cuMemsetD8_v2(void *to, unsigned char value, size_t n) { return cuMemsetD8Async(to, value, n, NULL); }
int cuMemsetD32_v2(void *to, unsigned value, size_t n) { return cuMemsetD32Async(to, value, n, NULL); }

/* Devices and contexts. */

int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) {
    *version = VERSION;
    return SUCCESS;
}
int cuDeviceGetCount(int *count) {
    *count = number("FAKE_CUDA_DEVICES", 1);
    return *count > MOST_DEVICES ? INVALID_VALUE : SUCCESS;
}
int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return SUCCESS;
}
int cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, size, "fake CUDA device");
    return SUCCESS;
}
int cuDeviceGetUuid(void *uuid, int device) {
    memset(uuid, device + 1, 16);
    return SUCCESS;
}
int cuDeviceGetUuid_v2(void *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
int cuDeviceTotalMem_v2(size_t *size, int device) {
    *size = TOTAL;
    return SUCCESS;
}
int cuDeviceGetPCIBusId(char *id, int size, int device) {
    snprintf(id, size, "0000:%02x:00.0", device + 1);
    return SUCCESS;
}
int cuDeviceComputeCapability(int *major, int *minor, int device) {
    *major = 9, *minor = 0;
    return SUCCESS;
}
/* CUdevice_attribute: those of an H100, as the CUDA Programming Guide gives them; 0 for all others. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    static const int known[][2] = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64},                    /* threads of a block, along x, y, z */
        {5, 2147483647}, {6, 65535}, {7, 65535},                     /* blocks of a grid, along x, y, z */
        {8, 49152}, {9, 65536}, {10, 32}, {12, 65536},               /* shared, constant, warp, registers */
        {13, 1980000}, {16, 132}, {19, 1}, {31, 1}, {36, 3201000},   /* clock, cores, memory clock */
        {37, 6144}, {38, 62914560}, {39, 2048}, {40, 3}, {41, 1},    /* bus, L2, threads of a core */
        {75, 9}, {76, 0}, {78, 1}, {79, 1}, {81, 233472}, {82, 65536}, /* capability, shared of a core */
        {97, 232448}, {102, 1}, {106, 32}, {0, 0},                   /* shared by choice, virtual memory */
    };
    *value = 0;
    for (int i = 0; known[i][0]; i++)
        if (known[i][0] == attribute) *value = known[i][1];
    return SUCCESS;
}
int cuDeviceCanAccessPeer(int *can, int a, int b) {
    *can = 1;
    return SUCCESS;
}
int cuDeviceGetP2PAttribute(int *value, int attribute, int a, int b) {
    *value = 0;
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &contexts[device];
    return SUCCESS;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0, *active = 1;
    return SUCCESS;
}
int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { return SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
int cuCtxGetFlags(unsigned *flags) {
    *flags = 0;
    return SUCCESS;
}
int cuCtxEnablePeerAccess(void *context, unsigned flags) { return SUCCESS; }
int cuCtxGetCurrent(void **context) {
    *context = current;
    return SUCCESS;
}
int cuCtxSetCurrent(void *context) {
    current = context;
    return SUCCESS;
}
int cuCtxPushCurrent_v2(void *context) {
    if (depth == 64) return INVALID_VALUE;
    pushed[depth++] = current;
    current = context;
    return SUCCESS;
}
int cuCtxPopCurrent_v2(void **context) {
    if (context) *context = current;
    current = depth ? pushed[--depth] : NULL;
    return SUCCESS;
}
int cuCtxGetDevice(int *device) {
    *device = device_of(current);
    return SUCCESS;
}
int cuCtxGetApiVersion(void *context, unsigned *version) {
    *version = VERSION;
    return SUCCESS;
}
int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return SUCCESS;
}

/* Code: loaded without a look, a function is its name; what a kernel launch does is nothing, in order. */

static void nothing(void *unused) {}
static int handle(void **out) {
    *out = malloc(1);
    return SUCCESS;
}
static int load(void **out) {
    wait_for_all();
    return handle(out);
}
int cuModuleLoadData(void **module, const void *image) { return load(module); }
int cuModuleLoadDataEx(void **module, const void *image, unsigned n, int *options, void **values) {
    return load(module);
}
int cuModuleLoadFatBinary(void **module, const void *image) { return load(module); }
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned n, void *c, void *d,
                      unsigned m) {
    return load(library);
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name) { return handle(kernel); }
int cuKernelGetFunction(void **function, void *kernel) {
    *function = kernel;
    return SUCCESS;
}
int cuLibraryUnload(void *library) {
    free(library);
    return SUCCESS;
}
int cuModuleUnload(void *module) {
    free(module);
    return SUCCESS;
}
int cuModuleGetFunction(void **function, void *module, const char *name) { return handle(function); }
/* Globals of a module are constants: all of a device's are one block, and have no content. */
int cuModuleGetGlobal_v2(void **begin, size_t *size, void *module, const char *name) {
    static char constants[MOST_DEVICES][1 << 16] __attribute__((aligned(512)));
    char *constant = constants[device_of(current)];
    if (block_of(constant) < 0) note_block(constant, sizeof constants[0], DEVICE);
    if (begin) *begin = constant;
    if (size) *size = sizeof constants[0];
    return SUCCESS;
}
int cuModuleGetLoadingMode(int *mode) {
    *mode = 2;
    return SUCCESS;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; /* threads of a block, registers */
    return SUCCESS;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }
int cuFuncSetCacheConfig(void *function, int config) { return SUCCESS; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *function, int threads, size_t shared) {
    *count = 2;
    return SUCCESS;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, void *function, int threads, size_t shared,
                                                         unsigned flags) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(count, function, threads, shared);
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
    return enqueue(stream, nothing, NULL);
}
/* CUlaunchConfig: seven unsigned, then the stream. */
int cuLaunchKernelEx(const char *config, void *function, void **parameters, void **extra) {
    return enqueue(*(void **)(config + 32), nothing, NULL);
}

int cuGetErrorName(int error, const char **name) {
    *name = "CUDA_ERROR";
    return SUCCESS;
}
int cuGetErrorString(int error, const char **text) {
    *text = "an error of the fake CUDA driver";
    return SUCCESS;
}
int cuGetExportTable(const void **table, const void *uuid) { return NOT_FOUND; }

/* The newest version of a function, as of the symbols above. */
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    char versioned[128];
    static void *self;
    if (!self) {
        Dl_info here;
        dladdr((void *)cuGetProcAddress_v2, &here);
        self = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    *function = dlsym(self, versioned);
    if (!*function) *function = dlsym(self, name);
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
