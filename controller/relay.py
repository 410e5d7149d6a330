"""How a box reaches all devices that need it: from a holder to one of them, and from there to the others.

    no holder near       holder → root → one device of every other machine → the other devices of their machines
    holder on a machine  holder → one device of its machine → the others there; and → one device of the first machine
                         without a holder → one device of every other one → …

There is a tree for every device that can be the root, so that the planner can let them take turns. The orders in which
machines and their devices are visited turn with the root: what is passed on is spread alike.

Must not know: tensors, sizes, loads. Pure. Called by the reshard planner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Tree:
    """By which way a cell reaches each of `ends`; the first is the root.

    By position: `sender` int64, the worker that passes the cell on, −1 where one of the workers `fed[position]` gives it;
    `root` int64, the position, on the way, of the end that was given it; `round` int64, hops before the last.
    """

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.fed: dict[int, tuple[int, ...]] = {}
        self._sender: list[int] = []
        self._root: list[int] = []
        self._round: list[int] = []

    def feed(self, end: int, feeders: tuple[int, ...]) -> int:
        """Adds an end that a holder gives the cell; returns its position."""
        self.fed[len(self.ends)] = feeders
        self._add(end, -1, len(self.ends), 0)
        return len(self.ends) - 1

    def pass_on(self, end: int, above: int, sender: int) -> int:
        """Adds an end that gets the cell from the worker of the end at position `above`; returns its position."""
        self._add(end, sender, self._root[above], self._round[above] + 1)
        return len(self.ends) - 1

    def _add(self, end: int, sender: int, root: int, hop: int) -> None:
        self.ends.append(end)
        self._sender.append(sender)
        self._root.append(root)
        self._round.append(hop)

    @cached_property
    def sender(self) -> Ints:
        return np.array(self._sender, np.int64)

    @cached_property
    def root(self) -> Ints:
        return np.array(self._root, np.int64)

    @cached_property
    def round(self) -> Ints:
        return np.array(self._round, np.int64)


def direct_trees(
    ends: Sequence[int], holders: Sequence[int], worker_of: Callable[[int], int], host: Mapping[int, str]
) -> list[Tree]:
    """One tree: a holder feeds every end."""
    tree = Tree()
    for end in ends:
        tree.feed(end, _feeders(holders, worker_of(end), host))
    return [tree]


def relay_trees(
    ends: Sequence[int], holders: Sequence[int], worker_of: Callable[[int], int], host: Mapping[int, str]
) -> list[Tree]:
    """Trees over the ends, one for each choice of the root."""
    by_host: dict[str, list[int]] = {}
    own: list[int] = []
    for end in ends:
        if worker_of(end) in holders:
            own.append(end)
        else:
            by_host.setdefault(host[worker_of(end)], []).append(end)
    if not by_host:
        return direct_trees(own, holders, worker_of, host)
    home = [name for name in by_host if name in {host[worker] for worker in holders}]
    trees = []
    for turn, first in enumerate(end for name in home or by_host for end in by_host[name]):
        tree = Tree()
        first_host = host[worker_of(first)]
        led = {first_host: tree.feed(first, _feeders(holders, worker_of(first), host))}
        for name in home:
            if name != first_host:
                end = by_host[name][turn % len(by_host[name])]
                led[name] = tree.feed(end, _feeders(holders, worker_of(end), host))
        far = [name for name in by_host if name not in led]
        far = far[turn % len(far) :] + far[: turn % len(far)] if far else []
        for name in far:  # with a holder at home, the first far machine serves the other ones
            above = led[far[0]] if home and name != far[0] else 0
            end = by_host[name][turn % len(by_host[name])]
            led[name] = tree.pass_on(end, above, worker_of(tree.ends[above]))
        for name, members in by_host.items():
            leader = tree.ends[led[name]]
            for end in members:
                if end != leader:
                    tree.pass_on(end, led[name], worker_of(leader))
        for end in own:
            tree.feed(end, _feeders(holders, worker_of(end), host))
        trees.append(tree)
    return trees


def _feeders(holders: Sequence[int], own: int, host: Mapping[int, str]) -> tuple[int, ...]:
    """Who may give a worker a cell: itself if it is a holder, else the holders on its machine if there are any, else all."""
    if own in holders:
        return (own,)
    return tuple(worker for worker in holders if host[worker] == host[own]) or tuple(holders)
