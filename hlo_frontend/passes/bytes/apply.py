"""Applies all rewrites to a program. Each works on the result of the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from stretto.collectives.order import entry_of

from ...edit import Editor
from ...values import BlockGraph, Node, NodeKind, all_blocks
from ..order import order
from .alone import leave_out_alone
from .context import Context, Rewritten
from .contributed import gather_own
from .copied import use_copies
from .copies import Copies
from .device_values import DeviceValues
from .ends import end_alone
from .fourier import exchange
from .gathers import take_own
from .mapped import map_own
from .merge import merge
from .narrow import narrow
from .regions import cut_regions
from .scatter import scatter

Found = dict[Node, Rewritten]


@dataclass(frozen=True)
class Rewrite:
    """The rewrite of one collective. ``said``: a description that follows its ``name`` in a sentence."""

    name: str
    source: str
    said: str


@dataclass(frozen=True)
class RewriteReport:
    """The result of `rewrite`. ``digest``: empty if nothing was rewritten, else equal only for programs with
    the same collectives and the same rewrites of them. It numbers the collectives of a block by its default
    order before the rewrites.
    """

    rewrites: tuple[Rewrite, ...] = ()
    digest: bytes = b""


def rewrite(
    entry: BlockGraph,
    num_replicas: int,
    num_partitions: int,
    parameters: Sequence[bytes | None] = (),
) -> RewriteReport:
    """Rewrite the collectives of a program and of its loops and branches, in place. ``parameters``: the
    serialized sharding of each parameter of ``entry``, None where there is none, or there are replicas."""
    done: list[Rewrite] = []
    digests: list[bytes] = []
    context: Context | None = None
    for number, block in enumerate(all_blocks(entry)):
        ended = end_alone(block)
        if ended:
            done += [_ended(node) for node in ended]
            digests.append(b"%d:ends:%d" % (number, len(ended)))
        collectives = [n for n in block.nodes if n.kind is NodeKind.COLLECTIVE]
        if not collectives:
            continue
        if context is None:
            known = DeviceValues(entry, num_replicas, num_partitions)
            num_devices = num_replicas * num_partitions
            copies = Copies(entry, known, num_devices, parameters)
            context = Context(known, num_devices, copies)
        slices = any(n.instruction.opcode == "dynamic-slice" for n in block.nodes)
        found = _Block(block, collectives).rewrite(
            replace(context, has_slices=slices, tried=set(), crossed=set())
        )
        if found is not None:
            done += found.rewrites
            digests.append(b"%d:" % number + found.digest)
    if not done:
        return RewriteReport()
    return RewriteReport(tuple(done), sha256(b"".join(digests)).digest())


def _ended(node: Node) -> Rewrite:
    said = "goes: every device leaves the loop when its own part is done"
    return Rewrite(node.instruction.name, node.instruction.source, said)


def _each(
    one: Callable[[Editor, Node, Context], Rewritten | None],
) -> Callable[[Editor, Sequence[Node], Context], Found]:
    def apply(editor: Editor, nodes: Sequence[Node], context: Context) -> Found:
        found = ((node, one(editor, node, context)) for node in nodes)
        return {node: rewritten for node, rewritten in found if rewritten is not None}

    return apply


# name -> what it does to the collectives of a block
_REWRITES: dict[str, Callable[[Editor, Sequence[Node], Context], Found]] = {
    "alone": _each(leave_out_alone),
    "merge": lambda editor, nodes, context: merge(editor, nodes),
    "copied": use_copies,
    "contributed": _each(gather_own),
    "own": _each(take_own),
    "exchange": _each(exchange),
    "map": map_own,
    "cut": cut_regions,
    "scatter": _each(scatter),
    "narrow": _each(narrow),
}

# An array that is gathered along several dimensions loses one gather after the other; what other devices have
# is made of what was made so before.
_REPEATED = frozenset({"copied", "own"})


class _Block:
    """The rewrites of one block."""

    def __init__(self, block: BlockGraph, collectives: list[Node]) -> None:
        self._block = block
        self._nodes = collectives
        self._done: list[Rewrite] = []
        self._ordinal: dict[Node, int] = {}
        self._digest = sha256()

    def rewrite(self, context: Context) -> RewriteReport | None:
        editor = Editor(self._block)
        for name, apply in _REWRITES.items():
            while self._apply(editor, name, apply(editor, self._nodes, context)):
                if name not in _REPEATED:
                    break
        return RewriteReport(tuple(self._done), self._digest.digest()) if self._done else None

    def _apply(self, editor: Editor, name: str, found: Found) -> bool:
        """Apply the edits of a rewrite; whether there were some."""
        if not editor.has_edits:
            return False
        if not self._done:
            self._number()
        for node, rewritten in found.items():
            self._note(name, node, rewritten)
        editor.commit()
        left = set(self._block.nodes)
        made = [node for rewritten in found.values() for node in rewritten.made]
        for node in made:
            self._ordinal[node] = len(self._ordinal)
        self._nodes = [node for node in (*self._nodes, *made) if node in left]
        return True

    def _number(self) -> None:
        """Number the collectives by the block's default order before the first rewrite."""
        for node in order(self._block):
            if node.collective is not None:
                entry = entry_of(node.collective, (), "")
                self._ordinal[node] = len(self._ordinal)
                self._digest.update(repr((entry.kind, entry.key, entry.groups)).encode())

    def _note(self, name: str, node: Node, rewritten: Rewritten) -> None:
        instruction = node.instruction
        self._done.append(Rewrite(instruction.name, instruction.source, rewritten.said))
        same = -1 if rewritten.same is None else self._ordinal[rewritten.same]
        self._digest.update(repr((name, self._ordinal[node], same)).encode())
