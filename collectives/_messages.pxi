# Messages between processes.

cdef struct mpi_t:
    mpi_message isend
    mpi_message irecv
    mpi_testall testall
    mpi_iprobe iprobe
    uintptr_t byte
    int request_bytes
    int status_bytes
    void* status  # of a probe; nobody reads it

cdef const char* MPI_FAILED = b"MPI failed in a collective that compiled code called"
cdef const char* NEAR_FAILED = (
    b"memory of another process cannot be mapped in a collective that compiled code called; is the limit of open files "
    b"or of memory reached? With STRETTO_SHARED_MEMORY=0 messages go over MPI"
)
cdef mpi_t mpi
memset(&mpi, 0, sizeof(mpi))

# Polls between two looks at the clock; what `send_off` gives where the thread may wait no longer.
cdef enum:
    POLLS = 8
    LATE = 2
# As in `waiting`: a sleep is this part of the time waited so far, within these bounds in seconds.
cdef double PART = 0.1, LONGEST = 500e-6


def use_mpi(
    uintptr_t isend, uintptr_t irecv, uintptr_t testall, uintptr_t iprobe, uintptr_t byte, int request_bytes,
    int status_bytes,
) -> None:
    """Addresses of MPI's functions, its handle of a byte, and the sizes of its requests and statuses."""
    mpi.isend, mpi.irecv, mpi.testall = <mpi_message>isend, <mpi_message>irecv, <mpi_testall>testall
    mpi.iprobe = <mpi_iprobe>iprobe
    mpi.byte, mpi.request_bytes, mpi.status_bytes = byte, request_bytes, status_bytes
    free(mpi.status)
    mpi.status = calloc(1, status_bytes)


cdef inline char* at(place_t* place, group_t* group, wire_t* wire) noexcept nogil:
    if place.where == STAGE:
        return wire.base + place.offset
    if place.where == ARRIVED:
        return place.message.found + place.offset
    if place.where == OPERAND:
        return <char*>group.operands[place.index] + place.offset
    return <char*>group.results[place.index] + place.offset


cdef void act(action_t* actions, int count, group_t* group, wire_t* wire) noexcept nogil:
    cdef int k
    cdef int64_t row
    cdef action_t* action
    cdef char* to
    cdef char* given
    for k in range(count):
        action = &actions[k]
        to, given = at(&action.to, group, wire), at(&action.given, group, wire)
        if action.what == COPY:
            copy_rows(to, action.to_step, given, action.from_step, action.nbytes, action.rows)
        elif action.what == ZERO:
            memset(to, 0, action.nbytes)
        else:
            for row in range(action.rows):
                action.fold(
                    to + row * action.to_step, given + row * action.from_step,
                    action.nbytes // action.item_bytes,
                )


cdef int post(table_t* table, wire_t* wire) noexcept nogil:
    """Post the messages of the current round; negative where MPI refuses."""
    cdef round_t* round = &wire.round[wire.current]
    cdef message_t* message
    cdef mpi_message call
    cdef int k
    for k in range(round.messages):
        message = &round.message[k]
        call = mpi.irecv if k < round.receives else mpi.isend
        if call(
            wire.base + message.offset, <int>message.nbytes, mpi.byte, message.peer, wire.tag, table.comm,
            <char*>wire.requests + k * mpi.request_bytes,
        ) != 0:
            return -1
    return 0


cdef int begin_wire(table_t* table, group_t* group) noexcept nogil:
    """Pack what is sent, and post the first round; negative on failure."""
    cdef wire_t* wire = group.wire
    if wire.near != NULL:
        wire.current = -1  # `poll` does, once what was sent before is read
        return 0
    wire.current, wire.base = 0, wire.stage.bytes
    act(wire.first, wire.before, group, wire)
    return post(table, wire)


cdef int poll(table_t* table, group_t* group) noexcept nogil:
    """Go on with the rounds as far as messages have come: 1 after the last, 0 before, negative on failure."""
    cdef wire_t* wire = group.wire
    cdef round_t* round
    cdef int done = 0
    if wire.near != NULL:
        return poll_near(group)
    while wire.current < wire.rounds:
        round = &wire.round[wire.current]
        if round.messages > 0:
            if mpi.testall(round.messages, wire.requests, &done, wire.statuses) != 0:
                return -1
            if not done:
                return 0
        act(round.action, round.actions, group, wire)
        wire.current += 1
        if wire.current < wire.rounds and post(table, wire) < 0:
            return -1
    return 1


cdef const char* why(wire_t* wire) noexcept nogil:
    return MPI_FAILED if wire.near == NULL else NEAR_FAILED


cdef int wait_here(table_t* table, group_t* group) noexcept nogil:
    """Wait for the messages of a group, as long as this thread may. The state as of `poll`, or `LATE`."""
    global wait_left
    cdef double left = wait_left, began = now() if left > 0.0 else 0.0
    cdef int state = wait_until(table, group, began + left)
    if left > 0.0:
        wait_left = max(left - (now() - began), MOMENT)
    return state


cdef int wait_until(table_t* table, group_t* group, double until) noexcept nogil:
    cdef int k, state
    while True:
        for k in range(1 if group.wire.near != NULL else POLLS):  # a poll of MPI moves little of what has come
            state = poll(table, group)
            if state != 0:
                return state
        if table.failure != NULL:
            return -1
        if until > 0.0 and now() > until:
            return LATE
        if group.wire.near == NULL:
            relax(table, group.wire.began)
            continue
        state = rest(table, group, group.wire.began, until)
        if state != 0:
            return state


cdef bint drive(table_t* table) noexcept nogil:
    """Poll all messages under way once, and run on whom they were for; whether there were any."""
    cdef pending_t item
    cdef site_t* site
    cdef group_t* group
    cdef int k = 0, state, m, count
    cdef bint moved = False
    cdef void** futures
    cdef const char* failure
    while True:
        pthread_mutex_lock(&table.mutex)
        if k >= table.num_pending or table.failure != NULL:
            pthread_mutex_unlock(&table.mutex)
            return moved
        item = table.pending[k]
        pthread_mutex_unlock(&table.mutex)
        site = &table.sites[item.site]
        group = &site.groups[item.group]
        state = poll(table, group)
        if state == 0:
            k += 1
            continue
        pthread_mutex_lock(&table.mutex)
        if table.failure != NULL or state < 0:
            if table.failure == NULL:
                fail_all(table, why(group.wire))  # unlocks
            else:
                pthread_mutex_unlock(&table.mutex)
            return True
        futures = <void**>calloc(group.size, sizeof(void*))
        for m in range(group.size):
            futures[m] = group.futures[m]
            group.futures[m] = NULL
        count = group.size
        table.num_pending -= 1
        table.pending[k] = table.pending[table.num_pending]
        table.running += count
        group.arrived = 0
        group.calls += 1
        pthread_mutex_unlock(&table.mutex)
        moved = True
        conclude(table, group)
        table.seconds += now() - group.wire.began
        if table.rows != NULL:
            note(table, item.site, item.group, group.wire.began)
        if table.apart:
            leave_to_turns(table.api, site.estimate, futures, count)
        else:
            release(table.api, site.estimate, futures, count)
        free(futures)
        k = 0


cdef void relax(table_t* table, double since) noexcept nogil:
    """What a wait does between polls: see `waiting`."""
    cdef double waited = now() - since
    if waited < table.patience:
        if table.patience < 1.0:
            give_way()
        return
    stretto_sleep(min(max(PART * waited, SHORTEST), LONGEST))


cdef void note(table_t* table, int site, int group, double began) noexcept nogil:
    cdef row_t* row
    pthread_mutex_lock(&table.mutex)
    if table.num_rows < table.capacity:
        row = &table.rows[table.num_rows]
        row.site, row.group, row.began, row.ended = site, group, began, now()
        table.num_rows += 1
    else:
        table.dropped += 1
    pthread_mutex_unlock(&table.mutex)


cdef void settle(table_t* table) noexcept nogil:
    """Unlock the table. If devices wait and none runs, tell them that nobody will come."""
    cdef char message[MESSAGE]
    cdef site_t* site
    cdef group_t* group
    cdef int s, g, m
    cdef int64_t used = 0
    if table.running > 0 or table.num_pending > 0 or table.failure != NULL:
        pthread_mutex_unlock(&table.mutex)
        return
    for s in range(table.num_sites):
        site = &table.sites[s]
        for g in range(site.num_groups):
            group = &site.groups[g]
            if group.arrived > 0 and used < MESSAGE - 1:
                used += snprintf(
                    message + used, MESSAGE - used, b"%s%s: %d of %d devices came, the others have ended or wait elsewhere",
                    b"; " if used else b"", site.name, group.arrived, group.size,
                )
    if used == 0:
        pthread_mutex_unlock(&table.mutex)
        return
    fail_all(table, message)  # unlocks


cdef void fail_all(table_t* table, const char* message) noexcept nogil:
    """Turn away who waits and who comes. Called with the mutex, which it gives back."""
    cdef size_t size = strlen(message)
    cdef char* kept = <char*>calloc(size + 1, 1)
    cdef void** waiting = <void**>calloc(table.devices + 1, sizeof(void*))
    cdef int count = 0, s, g, m, k
    cdef group_t* group
    memcpy(kept, message, size)
    table.failure = kept
    for s in range(table.num_sites):
        for g in range(table.sites[s].num_groups):
            group = &table.sites[s].groups[g]
            for m in range(group.size):
                if group.futures[m] != NULL:
                    waiting[count] = group.futures[m]
                    group.futures[m] = NULL
                    count += 1
            group.arrived = 0
    table.num_pending = 0
    table.running += count
    pthread_cond_signal(&table.over)
    pthread_mutex_unlock(&table.mutex)
    if table.near != NULL:
        ring(head_of(table.near, table.near.me))
    for k in range(count):
        fail(table.api, waiting[k], kept)
    free(waiting)


cdef wire_t* new_wire(int tag, object planned, site_t* site, stage_t* stage) except NULL:
    cdef wire_t* wire = <wire_t*>calloc(1, sizeof(wire_t))
    cdef round_t* round
    cdef int k, n, most = 0
    _, before, rounds, after = planned
    cdef int sends = 0
    wire.tag, wire.stage = tag, stage
    wire.before, wire.rounds, wire.after = len(before), len(rounds), len(after)
    wire.round = <round_t*>calloc(len(rounds) + 1, sizeof(round_t))
    for n, (outgoing, incoming, then, acknowledged) in enumerate(rounds):
        round = &wire.round[n]
        round.receives, round.messages, round.actions = len(incoming), len(incoming) + len(outgoing), len(then)
        round.acknowledged = acknowledged
        round.message = <message_t*>calloc(round.messages + 1, sizeof(message_t))
        for k, (peer, offset, nbytes, read) in enumerate((*incoming, *outgoing)):
            round.message[k].peer, round.message[k].offset, round.message[k].nbytes = peer, offset, nbytes
            round.message[k].read, round.message[k].state = read, READ
        round.action = new_actions(then, site, round.message)
        most = max(most, round.messages)
        sends += len(outgoing)
    wire.first = new_actions(before, site, NULL)
    wire.last = new_actions(after, site, wire.round[len(rounds) - 1].message if rounds else NULL)
    stage.capacity = max(stage.capacity, sends)
    wire.requests = calloc(most + 1, mpi.request_bytes)
    wire.statuses = calloc(most + 1, mpi.status_bytes)
    return wire


cdef action_t* new_actions(object planned, site_t* site, message_t* messages) except NULL:
    """Actions that may read what these messages bring."""
    cdef action_t* actions = <action_t*>calloc(len(planned) + 1, sizeof(action_t))
    cdef action_t* action
    cdef int n
    for n, (what, to, given, nbytes, rows, to_step, from_step, leaf) in enumerate(planned):
        action = &actions[n]
        action.what, action.nbytes, action.rows = what, nbytes, rows
        action.to.where, action.to.index, action.to.offset = to
        action.given.where, action.given.index, action.given.offset = given
        if action.given.where == ARRIVED:
            action.given.message = &messages[action.given.index]
        action.to_step, action.from_step = to_step, from_step
        action.item_bytes, action.fold = site.leaves[<int>leaf].item_bytes, site.leaves[<int>leaf].fold
    return actions


cdef void free_wire(wire_t* wire) noexcept:
    cdef int n
    if wire == NULL:
        return
    for n in range(wire.rounds):
        free(wire.round[n].message)
        free(wire.round[n].action)
    free(wire.round)
    free(wire.first)
    free(wire.last)
    free(wire.requests)
    free(wire.statuses)
    free(wire)
