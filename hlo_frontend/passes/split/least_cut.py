"""The least cut of a directed graph with capacities, by Dinic's algorithm (Soviet Math. Doklady 11, 1970)."""

from __future__ import annotations

from collections import deque

INFINITE = 1 << 62


class Network:
    """Edges between numbered vertices. Vertex 0 is the source, vertex 1 the sink."""

    def __init__(self) -> None:
        self._out: list[list[int]] = [[], []]
        self._to: list[int] = []
        self._left: list[int] = []  # capacity left; edge e ^ 1 is the way back of e

    def vertex(self) -> int:
        """A new vertex."""
        self._out.append([])
        return len(self._out) - 1

    def edge(self, source: int, target: int, capacity: int) -> None:
        """An edge that costs ``capacity`` where ``source`` is on the source's side and ``target`` is not."""
        for a, b, c in ((source, target, capacity), (target, source, 0)):
            self._out[a].append(len(self._to))
            self._to.append(b)
            self._left.append(c)

    def sources_side(self) -> set[int]:
        """The vertices on the source's side of a least cut; of several, the one with most of them."""
        while (levels := self._levels())[1] >= 0:
            at = [0] * len(self._out)
            while self._augment(levels, at):
                pass
        # What still reaches the sink is on its side.
        behind = {1}
        todo = [1]
        while todo:
            for e in self._out[todo.pop()]:
                source = self._to[e]
                if self._left[e ^ 1] and source not in behind:
                    behind.add(source)
                    todo.append(source)
        return set(range(len(self._out))) - behind

    def _levels(self) -> list[int]:
        """How far each vertex is from the source, -1 if it is not reached."""
        levels = [-1] * len(self._out)
        levels[0] = 0
        todo = deque([0])
        while todo:
            vertex = todo.popleft()
            for e in self._out[vertex]:
                target = self._to[e]
                if self._left[e] and levels[target] < 0:
                    levels[target] = levels[vertex] + 1
                    todo.append(target)
        return levels

    def _augment(self, levels: list[int], at: list[int]) -> bool:
        """Send what fits along one shortest path. ``at``: the edge of each vertex to go on with."""
        path: list[int] = []
        vertex = 0
        while vertex != 1:
            if at[vertex] == len(self._out[vertex]):
                if not path:
                    return False
                levels[vertex] = -1
                vertex = self._to[path.pop() ^ 1]
                at[vertex] += 1
                continue
            e = self._out[vertex][at[vertex]]
            target = self._to[e]
            if self._left[e] and levels[target] == levels[vertex] + 1:
                path.append(e)
                vertex = target
            else:
                at[vertex] += 1
        least = min(self._left[e] for e in path)
        for e in path:
            self._left[e] -= least
            self._left[e ^ 1] += least
        return True
