# Wires between processes that share memory: `poll`, and what a wait does between polls.

# As `PART` and its bounds in `_messages.pxi`, where who sleeps is woken up.
cdef double NAP = 1e-3, LONG_NAP = 5e-3

# A message to this process: not seen; seen, and to be read; read.
cdef enum:
    COMING, SEEN, READ


cdef void begin_round(wire_t* wire) noexcept nogil:
    """Number the messages of the current round."""
    cdef round_t* round = &wire.round[wire.current]
    cdef message_t* message
    cdef uint32_t* counts
    cdef int k
    for k in range(round.messages):
        message = &round.message[k]
        counts = wire.near.received if k < round.receives else wire.near.sent
        counts += <int64_t>message.peer * <int>TAGS + wire.tag
        counts[0] += 1
        message.number, message.state, message.found = counts[0], COMING, NULL
    wire.sent = round.receives


cdef int poll_near(group_t* group) noexcept nogil:
    """`poll`, of processes of this host."""
    cdef wire_t* wire = group.wire
    cdef shared_t* near = wire.near
    cdef stage_t* stage = wire.stage
    cdef round_t* round
    cdef message_t* message
    cdef outstanding_t* out
    cdef bint complete
    cdef int k, state, turn
    if wire.current < 0:
        turn = (stage.turn + 1) % stage.halves
        if not is_read(stage, turn):
            return 0
        stage.turn, stage.num_sent[turn] = turn, 0
        wire.base = stage.bytes + turn * stage.half
        wire.current = 0
        act(wire.first, wire.before, group, wire)
        if wire.rounds > 0:
            begin_round(wire)
    while wire.current < wire.rounds:
        round = &wire.round[wire.current]
        complete = True
        while wire.sent < round.messages:
            message = &round.message[wire.sent]
            if not publish(
                near, message.peer, wire.tag, message.number, stage.chunk,
                stage.offset + (wire.base - stage.bytes) + message.offset,
            ):
                complete = False
                break
            out = &stage.outstanding[stage.turn][stage.num_sent[stage.turn]]
            out.acknowledged = &slot_of(near, message.peer, near.me, wire.tag).acknowledged
            out.number = message.number
            stage.num_sent[stage.turn] += 1
            wire.sent += 1
        for k in range(round.receives):
            message = &round.message[k]
            if message.state != COMING:
                continue
            state = receive(near, message.peer, wire.tag, message.number, &message.found)
            if state < 0:
                return -1
            if state == 0:
                complete = False
                continue
            message.state = SEEN
            if message.read == COPIED:
                memcpy(wire.base + message.offset, message.found, message.nbytes)
                acknowledge_message(wire, message)
        if not complete:
            return 0
        if round.acknowledged:
            for k in range(round.receives, round.messages):
                message = &round.message[k]
                if not is_acknowledged(&slot_of(near, message.peer, near.me, wire.tag).acknowledged, message.number):
                    return 0
        act(round.action, round.actions, group, wire)
        for k in range(round.receives):
            if round.message[k].read == BY_THEN:
                acknowledge_message(wire, &round.message[k])
        wire.current += 1
        if wire.current < wire.rounds:
            begin_round(wire)
    return 1


cdef inline void acknowledge_message(wire_t* wire, message_t* message) noexcept nogil:
    if message.state == SEEN:
        message.state = READ
        acknowledge(wire.near, message.peer, wire.tag, message.number)


cdef void acknowledge_all(wire_t* wire) noexcept nogil:
    """What was read in place may be written to."""
    cdef int n, k
    for n in range(wire.rounds):
        for k in range(wire.round[n].receives):
            acknowledge_message(wire, &wire.round[n].message[k])


cdef void acknowledge_deferred(table_t* table) noexcept nogil:
    """No site gives its results again."""
    while table.deferred != NULL:
        acknowledge_all(table.deferred)
        table.deferred.defers = False
        table.deferred = table.deferred.next


cdef void conclude(table_t* table, group_t* group) noexcept nogil:
    """Unpack what has come to a group, or do it again."""
    cdef wire_t* wire = group.wire
    act(wire.last, wire.after, group, wire)
    if wire.near == NULL:
        return
    if not table.replays:
        acknowledge_all(wire)
    elif not wire.defers:
        wire.defers, wire.next, table.deferred = True, table.deferred, wire


cdef int rest(table_t* table, group_t* group, double since, double until) noexcept nogil:
    """What a wait for processes of this host does between polls: give way, or sleep at the doorbell. Gives what
    a poll has, if one was made: of the group, or of all under way if it is NULL."""
    cdef double began = now()
    cdef double waited = began - since, seconds
    cdef head_t* head
    cdef uint32_t rung
    cdef int state, flag
    if waited < table.patience and began >= taken_until:
        if table.patience < 1.0:
            give_way()
        return 0
    head = head_of(table.near, table.near.me)
    rung = lie_down(head)
    state = drive(table) if group == NULL else poll(table, group)
    if state == 0 and table.failure == NULL:
        seconds = min(max(PART * waited, NAP), LONG_NAP)
        if until > 0.0:
            seconds = min(seconds, max(until - began, 0.0))
        sleep_until_rung(head, rung, seconds)
    get_up(head)
    if waited > NAP and state == 0:
        # Others may wait for what MPI has not sent yet.
        mpi.iprobe(0, 0, table.comm, &flag, mpi.status)
    return state
