"""Topological orders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

Item = TypeVar("Item")


def topological(before: Mapping[Item, Collection[Item]], key: Callable[[Item], Any]) -> list[Item]:
    """The items, each behind all that are ``before`` it; of those that may come next, the least key first.

    No two items may have the same key. Items on a cycle, and those behind them, are missing.
    """
    after: dict[Item, list[Item]] = {item: [] for item in before}
    for item, earlier in before.items():
        for other in earlier:
            after[other].append(item)
    keys = {item: key(item) for item in before}
    items = {key: item for item, key in keys.items()}
    waiting = {item: len(earlier) for item, earlier in before.items()}
    ready = [keys[item] for item, count in waiting.items() if not count]
    heapify(ready)
    ordered: list[Item] = []
    while ready:
        item = items[heappop(ready)]
        ordered.append(item)
        for other in after[item]:
            waiting[other] -= 1
            if not waiting[other]:
                heappush(ready, keys[other])
    return ordered
