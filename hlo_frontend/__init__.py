"""StableHLO or HLO in, `stretto.runtime.program.Program` out.

`compile.compile_stablehlo` and `compile.compile_hlo` are the way in. The path of a module:

1. ``tap``: XLA partitions and optimizes it, and is stopped before it generates code.
2. ``graph``, ``groups``: the HLO is read; ids, shapes, replica groups.
3. ``flatten``, ``collectives``: every array becomes a value, tuples and tokens vanish, nodes are
   left (``values``).
4. ``pipeline``: passes change the graph; it prints (``graph_text``) and is checked (``graph_check``)
   between them. The last ones, ``passes.order`` and ``carve``, put the nodes of each block into an order,
   which is cut at the runtime nodes.
5. ``segments``, ``builder``: each run of compute becomes a StableHLO module, equal ones become one.
6. ``lower``, ``aliases``: slots, donation, copies, frees; out comes the program.
"""
