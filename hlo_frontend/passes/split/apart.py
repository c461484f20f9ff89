"""Takes combined collectives apart, so that each of their arrays can be split with what is around it.

XLA's combiner and a `psum` of several arrays make one collective of many operands. Each large one gets a
collective of its own; the small ones stay together.

Invariant: what is taken apart follows from the program's text alone.
"""

from __future__ import annotations

from dataclasses import replace

from stretto.collectives.ops import Kind

from ...edit import Editor, restricted
from ...values import BlockGraph, Node
from .instructions import collective_like, name_of
from .regions import is_free

# Smaller arrays are latency: one message is better than many.
LEAST_BYTES = 1 << 15
_KINDS = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)


def take_apart(block: BlockGraph) -> None:
    """Take the combined collectives of a block apart, in place."""
    editor = Editor(block)
    for node in block.nodes:
        c = node.collective
        if c is None or c.kind not in _KINDS or len(c.operands) < 2 or node.reducer is not None:
            continue
        if len(node.operands) != len(c.operands) or not is_free(editor, node):
            continue
        large = [k for k, type in enumerate(c.operands) if type.nbytes >= LEAST_BYTES]
        small = [k for k in range(len(c.operands)) if k not in large]
        chosen = [[k] for k in large] + ([small] if small else [])
        if len(chosen) < 2:
            continue
        made = [_one(node, ks, f"{i + 1}of{len(chosen)}") for i, ks in enumerate(chosen)]
        for ks, own in zip(chosen, made, strict=True):
            for k, result in zip(ks, own.results, strict=True):
                editor.replace(node.results[k], result)
        editor.put_behind(node, made)
        editor.remove(node)
    if editor.has_edits:
        editor.commit()


def _one(node: Node, chosen: list[int], number: str) -> Node:
    """The collective on some of its operands, with a number behind its name."""
    assert node.collective is not None
    one = replace(restricted(node.collective, chosen), name=f"{name_of(node)}.{number}")
    return collective_like(node, one, [node.operands[k] for k in chosen])
