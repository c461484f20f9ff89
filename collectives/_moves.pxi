# Moving data: the last member of a group does it for all.

cdef void perform(site_t* site, group_t* group) noexcept nogil:
    cdef int k, member, size = group.size, count = site.operands, results = site.results
    cdef leaf_t* leaf
    cdef char* first
    for k in range(count):
        leaf = &site.leaves[k]
        if site.kind == ALL_REDUCE:
            first = <char*>group.results[k]
            memcpy(first, group.operands[k], leaf.operand_bytes)
            for member in range(1, size):
                leaf.fold(first, group.operands[member * count + k], leaf.operand_bytes // leaf.item_bytes)
            for member in range(1, size):
                memcpy(group.results[member * results + k], first, leaf.operand_bytes)
        elif site.kind == ALL_GATHER:
            first = <char*>group.results[k]
            for member in range(size):
                copy_rows(
                    first + member * leaf.inner, size * leaf.inner,
                    <char*>group.operands[member * count + k], leaf.inner, leaf.inner, leaf.outer,
                )
            for member in range(1, size):
                memcpy(group.results[member * results + k], first, leaf.result_bytes)
        elif site.kind == REDUCE_SCATTER:
            for member in range(size):
                reduce_part(site, group, k, member)
        elif site.kind == ALL_TO_ALL:
            for member in range(size):
                exchange_part(site, group, k, member)
        elif site.kind == TUPLE_ALL_TO_ALL:
            for member in range(size):
                memcpy(
                    group.results[k * results + member], group.operands[member * count + k], leaf.operand_bytes
                )
        elif site.kind == BROADCAST:
            for member in range(size):
                memcpy(group.results[member * results + k], group.operands[k], leaf.operand_bytes)
        elif site.kind == PERMUTE:
            for member in range(size):
                if group.sources[member] < 0:
                    memset(group.results[member * results + k], 0, leaf.result_bytes)
                else:
                    memcpy(
                        group.results[member * results + k],
                        group.operands[group.sources[member] * count + k],
                        leaf.operand_bytes,
                    )


cdef inline void copy_rows(
    char* to, int64_t to_step, const char* given, int64_t step, int64_t nbytes, int64_t rows
) noexcept nogil:
    cdef int64_t row
    for row in range(rows):
        memcpy(to + row * to_step, given + row * step, nbytes)


cdef void reduce_part(site_t* site, group_t* group, int k, int member) noexcept nogil:
    """The part of a reduce-scatter that ``member`` gets."""
    cdef leaf_t* leaf = &site.leaves[k]
    cdef int other
    cdef int64_t row
    cdef char* to = <char*>group.results[member * site.results + k]
    cdef char* given
    for other in range(group.size):
        given = <char*>group.operands[other * site.operands + k] + member * leaf.inner
        if other == 0:
            copy_rows(to, leaf.inner, given, group.size * leaf.inner, leaf.inner, leaf.outer)
            continue
        for row in range(leaf.outer):
            leaf.fold(
                to + row * leaf.inner, given + row * group.size * leaf.inner, leaf.inner // leaf.item_bytes
            )


cdef void exchange_part(site_t* site, group_t* group, int k, int member) noexcept nogil:
    """What ``member`` of an all-to-all gets."""
    cdef leaf_t* leaf = &site.leaves[k]
    cdef int other
    cdef int64_t step = group.size * leaf.inner
    for other in range(group.size):
        copy_rows(
            <char*>group.results[member * site.results + k] + other * leaf.inner, step,
            <char*>group.operands[other * site.operands + k] + member * leaf.inner, step,
            leaf.inner, leaf.outer,
        )
