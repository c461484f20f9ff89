# Messages between processes of one host: what is sent stays in memory that both have mapped.
#
# Each process has a mailbox: a doorbell, and for each other process and tag a slot, which has room for two messages. Who
# sends writes a descriptor into the receiver's slot: where in its own memory the message lies, and a number, which counts
# the messages with this tag. Who has read it writes that number back, as an acknowledgement. So a message is copied once,
# or not at all. What a process sends lies in chunks of memory of its own (`Shared.place`), which receivers map when they
# first see them. All of it is files without names (memfd_create(2)), which others open through /proc: nothing is left behind,
# however a process ends.
#
# Whoever waits for long sleeps at its doorbell (futex(2)), and whoever wrote something for it rings. No ring is lost: who
# goes to sleep says so, looks once more, and sleeps unless the doorbell has been rung since before it said so; who writes looks behind
# that whether somebody sleeps.

cdef extern from *:
    """
    #include <errno.h>
    #include <fcntl.h>
    #include <sys/mman.h>
    #include <unistd.h>
    #ifdef __linux__
    #include <linux/futex.h>
    #include <limits.h>
    #endif

    enum { STRETTO_CHUNKS = 128, STRETTO_TAGS = 2048 };

    typedef struct { uint32_t number, chunk; uint64_t offset; } stretto_descriptor;
    typedef struct { stretto_descriptor descriptors[2]; uint32_t acknowledged; char rest[28]; } stretto_slot;
    typedef struct { int32_t file; uint64_t size; } stretto_chunk;
    typedef struct {
        uint32_t rung, asleep;
        char rest[56];
        uint8_t nonce[16];
        stretto_chunk chunks[STRETTO_CHUNKS];
    } stretto_head;
    enum { STRETTO_HEAD = 4096 };

    static uint32_t stretto_load(uint32_t* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
    static void stretto_store(uint32_t* at, uint32_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

    static void stretto_ring(stretto_head* head) {
    #ifdef __linux__
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        if (__atomic_load_n(&head->asleep, __ATOMIC_RELAXED) == 0) return;
        __atomic_fetch_add(&head->rung, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, &head->rung, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    #endif
    }

    static uint32_t stretto_lie_down(stretto_head* head) {
        uint32_t rung = __atomic_load_n(&head->rung, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&head->asleep, 1, __ATOMIC_SEQ_CST);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        return rung;
    }

    static void stretto_sleep_until_rung(stretto_head* head, uint32_t rung, double seconds) {
    #ifdef __linux__
        struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
        syscall(SYS_futex, &head->rung, FUTEX_WAIT, rung, &t, NULL, 0);
    #else
        stretto_sleep(seconds);
    #endif
    }

    static void stretto_get_up(stretto_head* head) { __atomic_fetch_sub(&head->asleep, 1, __ATOMIC_SEQ_CST); }

    static char* stretto_map(int file, size_t size) {
        void* found = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        return found == MAP_FAILED ? NULL : (char*)found;
    }

    /* Give the whole pages in there back to the system: they read as zeros then. */
    static void stretto_give_back(char* begin, size_t size) {
    #ifdef MADV_REMOVE
        uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
        uintptr_t first = ((uintptr_t)begin + page - 1) / page * page, last = ((uintptr_t)begin + size) / page * page;
        if (first < last) madvise((void*)first, last - first, MADV_REMOVE);
    #endif
    }

    /* Map a file of another process's. NULL where that fails: `lacking` tells whether this process has too little of
       something for it; if not, the file is gone, as those of a process that ends are. */
    static char* stretto_map_from(int pid, int file, size_t size, int* lacking) {
        char path[64], *found = NULL;
        int opened;
        snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, file);
        opened = open(path, O_RDWR | O_CLOEXEC);
        if (opened < 0) {
            *lacking = errno == EMFILE || errno == ENFILE || errno == ENOMEM;
            return NULL;
        }
        *lacking = lseek(opened, 0, SEEK_END) >= (off_t)size && (found = stretto_map(opened, size)) == NULL;
        close(opened);
        return found;
    }
    """
    ctypedef struct descriptor_t "stretto_descriptor":
        uint32_t number
        uint32_t chunk
        uint64_t offset
    ctypedef struct slot_t "stretto_slot":
        descriptor_t descriptors[2]
        uint32_t acknowledged
    ctypedef struct chunk_t "stretto_chunk":
        int32_t file
        uint64_t size
    ctypedef struct head_t "stretto_head":
        uint8_t nonce[16]
        chunk_t chunks[128]
    enum:
        CHUNKS "STRETTO_CHUNKS"
        TAGS "STRETTO_TAGS"
        HEAD "STRETTO_HEAD"
    uint32_t load "stretto_load"(uint32_t*) noexcept nogil
    void store "stretto_store"(uint32_t*, uint32_t) noexcept nogil
    void ring "stretto_ring"(head_t*) noexcept nogil
    uint32_t lie_down "stretto_lie_down"(head_t*) noexcept nogil
    void sleep_until_rung "stretto_sleep_until_rung"(head_t*, uint32_t, double) noexcept nogil
    void get_up "stretto_get_up"(head_t*) noexcept nogil
    char* map_file "stretto_map"(int, size_t) noexcept nogil
    char* map_from "stretto_map_from"(int, int, size_t, int* lacking) noexcept nogil
    void give_back_pages "stretto_give_back"(char*, size_t) noexcept nogil
    int munmap(void*, size_t) noexcept nogil
    int getpid() noexcept nogil

# Bytes: of a chunk at least, of a page, of what two cores had better not both write to; and up to which a stage is there
# twice, so that the next message need not wait until the last one has been read.
cdef enum:
    CHUNK = 4 << 20
    PAGE = 1 << 16
    LINE = 128
    DOUBLE = 64 << 10

# Tags up to here have slots.
SHARED_TAGS = <int>TAGS

# A process of this host, this one among them: its mailbox, and what has been mapped of its memory.
cdef struct neighbour_t:
    int pid
    char* mailbox
    char* chunks[128]

cdef struct shared_t:
    int count
    int me
    size_t mailbox_bytes
    neighbour_t* neighbours
    uint32_t* sent  # [neighbour][tag]
    uint32_t* received


cdef inline head_t* head_of(shared_t* shared, int neighbour) noexcept nogil:
    return <head_t*>shared.neighbours[neighbour].mailbox


cdef inline slot_t* slot_of(shared_t* shared, int owner, int sender, int tag) noexcept nogil:
    """Where ``sender`` leaves what it sends to ``owner``."""
    return <slot_t*>(shared.neighbours[owner].mailbox + <int>HEAD) + <int64_t>sender * <int>TAGS + tag


cdef inline bint is_own(shared_t* shared) noexcept nogil:
    """Whether this process made it, and was not forked from the one that did, whose memory it is then."""
    return getpid() == shared.neighbours[shared.me].pid


cdef inline bint is_acknowledged(uint32_t* acknowledged, uint32_t number) noexcept nogil:
    return <int32_t>(load(acknowledged) - number) >= 0


cdef bint publish(shared_t* shared, int to, int tag, uint32_t number, uint32_t chunk, uint64_t offset) noexcept nogil:
    """Send what lies in this process's memory; False while the slot is full."""
    cdef slot_t* slot = slot_of(shared, to, shared.me, tag)
    cdef descriptor_t* descriptor = &slot.descriptors[number & 1]
    if not is_acknowledged(&slot.acknowledged, number - 2):
        return False
    descriptor.chunk, descriptor.offset = chunk, offset
    store(&descriptor.number, number)
    ring(head_of(shared, to))
    return True


cdef int receive(shared_t* shared, int sender, int tag, uint32_t number, char** found) noexcept nogil:
    """Where a message lies that was sent to this process: 1, and 0 before it has been, negative on failure. What
    a process sent that ended before its memory was mapped does not come; whoever watches over it tells."""
    cdef descriptor_t* descriptor = &slot_of(shared, shared.me, sender, tag).descriptors[number & 1]
    cdef neighbour_t* neighbour = &shared.neighbours[sender]
    cdef chunk_t* chunk
    cdef int lacking
    if load(&descriptor.number) != number:
        return 0
    if neighbour.chunks[descriptor.chunk] == NULL:
        chunk = &head_of(shared, sender).chunks[descriptor.chunk]
        neighbour.chunks[descriptor.chunk] = map_from(neighbour.pid, chunk.file, chunk.size, &lacking)
        if neighbour.chunks[descriptor.chunk] == NULL:
            return -1 if lacking else 0
    found[0] = neighbour.chunks[descriptor.chunk] + descriptor.offset
    return 1


cdef void acknowledge(shared_t* shared, int sender, int tag, uint32_t number) noexcept nogil:
    """Tell its sender that a message has been read, and those before it."""
    cdef slot_t* slot = slot_of(shared, shared.me, sender, tag)
    if not is_acknowledged(&slot.acknowledged, number):
        store(&slot.acknowledged, number)
        ring(head_of(shared, sender))


@cython.no_gc_clear
cdef class Shared:
    """Memory for messages between ``count`` processes of this host, of which this is number ``me``.

    The others map its mailbox with what `told` is (`join`). Raises ``OSError`` where there are no such files.
    """

    cdef shared_t shared
    cdef list _files
    cdef object _arena
    cdef stage_t* _leaving  # stages that nobody needs here, and somebody may still read

    def __cinit__(self, int count, int me):
        cdef shared_t* shared = &self.shared
        shared.count, shared.me = count, me
        shared.mailbox_bytes = <size_t><int>HEAD + <size_t>count * <size_t><int>TAGS * sizeof(slot_t)
        shared.neighbours = <neighbour_t*>calloc(count, sizeof(neighbour_t))
        shared.sent = <uint32_t*>calloc(<size_t>count * <size_t><int>TAGS, sizeof(uint32_t))
        shared.received = <uint32_t*>calloc(<size_t>count * <size_t><int>TAGS, sizeof(uint32_t))
        self._files = []
        self._leaving = NULL

    def __init__(self, int count, int me):
        cdef bytes nonce = os.urandom(16)
        self.shared.neighbours[me].pid = os.getpid()
        self.shared.neighbours[me].mailbox = self._file(self.shared.mailbox_bytes)
        memcpy(head_of(&self.shared, me).nonce, <char*>nonce, 16)
        self._arena = Arena()

    cdef char* _file(self, size_t size) except NULL:
        """A file of zeros, mapped."""
        cdef char* found
        file = os.memfd_create("stretto", os.MFD_CLOEXEC)
        self._files.append(file)
        os.ftruncate(file, size)
        found = map_file(file, size)
        if found == NULL:
            raise OSError(f"{size:,} bytes cannot be mapped")
        return found

    def _add(self, size: int) -> tuple:
        cdef head_t* head = head_of(&self.shared, self.shared.me)
        cdef int number = len(self._files) - 1
        # The more there are, the larger, so that there are enough; pages that nobody writes to take no memory.
        cdef size_t least = <size_t>CHUNK << (number // 16)
        cdef size_t whole = max(least, (<size_t>size + PAGE - 1) // PAGE * PAGE)
        if number == <int>CHUNKS:
            raise OSError(f"messages between processes need more than {number} pieces of memory")
        self.shared.neighbours[self.shared.me].chunks[number] = self._file(whole)
        head.chunks[number].size, head.chunks[number].file = whole, self._files[number + 1]
        return number, whole

    @property
    def told(self) -> tuple:
        """What the other processes need to know: this one, its file, and what stands in there."""
        cdef head_t* head = head_of(&self.shared, self.shared.me)
        return os.getpid(), self._files[0], (<char*>head.nonce)[:16]

    def join(self, int neighbour, tuple told) -> bool:
        """Map the mailbox of another process; whether that can be done, and it is the one that told this."""
        cdef neighbour_t* one = &self.shared.neighbours[neighbour]
        cdef int lacking
        pid, file, nonce = told
        if one.mailbox != NULL:
            return True
        one.pid = pid
        one.mailbox = map_from(pid, file, self.shared.mailbox_bytes, &lacking)
        return one.mailbox != NULL and (<char*>head_of(&self.shared, neighbour).nonce)[:16] == nonce

    cdef int _sweep(self) except -1:
        """Have the memory of stages that nobody needs any more."""
        cdef stage_t** at = &self._leaving
        cdef stage_t* gone
        while at[0] != NULL:
            gone = at[0]
            if is_read(gone, 0) and is_read(gone, 1):
                at[0] = gone.next
                give_back_pages(gone.bytes, gone.whole)
                self._arena.give((gone.chunk, gone.offset, gone.whole))
                free_stage(gone)
            else:
                at = &gone.next
        return 0

    cdef int place(self, stage_t* stage) except -1:
        """Find memory for a stage."""
        self._sweep()
        stage.halves = 2 if stage.size <= DOUBLE else 1
        stage.half = (stage.size + LINE - 1) // LINE * LINE  # C's division
        stage.chunk, stage.offset, stage.whole = self._arena.take(stage.halves * stage.half, self._add)
        stage.bytes = self.shared.neighbours[self.shared.me].chunks[stage.chunk] + stage.offset
        for half in range(2):
            stage.outstanding[half] = <outstanding_t*>calloc(stage.capacity + 1, sizeof(outstanding_t))
        return 0

    cdef void leave(self, stage_t* stage) noexcept:
        """Nobody needs this stage here. Uses nothing of Python's, which may be gone: tables end in collections of
        garbage too."""
        if stage.bytes == NULL or not is_own(&self.shared):
            free_stage(stage)
            return
        stage.next, self._leaving = self._leaving, stage
        if is_read(stage, 0) and is_read(stage, 1):
            give_back_pages(stage.bytes, stage.whole)

    def __dealloc__(self):
        cdef shared_t* shared = &self.shared
        cdef neighbour_t* one
        cdef head_t* head
        cdef stage_t* stage
        cdef int k, n
        while self._leaving != NULL:
            stage, self._leaving = self._leaving, self._leaving.next
            free_stage(stage)
        for k in range(shared.count):
            one = &shared.neighbours[k]
            if one.mailbox == NULL:
                continue
            head = head_of(shared, k)
            for n in range(<int>CHUNKS):
                if one.chunks[n] != NULL:
                    munmap(one.chunks[n], head.chunks[n].size)
            munmap(one.mailbox, shared.mailbox_bytes)
        free(shared.neighbours)
        free(shared.sent)
        free(shared.received)
        for file in self._files:
            os.close(file)


cdef bint is_read(stage_t* stage, int half) noexcept nogil:
    """Whether all that was sent from this half of a stage has been read."""
    cdef int k
    for k in range(stage.num_sent[half]):
        if not is_acknowledged(stage.outstanding[half][k].acknowledged, stage.outstanding[half][k].number):
            return False
    return True


cdef void free_stage(stage_t* stage) noexcept:
    free(stage.outstanding[0])
    free(stage.outstanding[1])
    free(stage)
