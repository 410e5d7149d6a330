"""The policy versions that a replica passes on to its peers: the one that is arriving, and the one that serves.

Owns the exposures over an engine's weights and the digests of what was verified. Must not know how bytes arrive or what serves.
Called by the rollout service on the network loop.

Theory of operation. An engine's two sets of weights take turns, so a version is exposed from the moment its set is opened for
writing until the set is opened again, two versions later. While it arrives peers get each box as soon as it has landed; when it
is verified its digests let a replica that joins pull it from here, without the trainer. Before a set is written again its
exposure is taken down; peers that still read it after `CUT_AFTER_S` are cut off, and get the rest from the holders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from waypath.proto.codecs import Bundle
from waypath.proto.errors import TransferError, WaypathError
from waypath.proto.names import policy_name
from waypath.workers.exposed import Arrivals, ExposedTensor, ExposureTable

CUT_AFTER_S = 2.0

Digests = Mapping[str, np.ndarray[Any, Any]]


class Relays:
    """The exposures of one replica, by policy version."""

    def __init__(self, exposures: ExposureTable) -> None:
        self._exposures = exposures
        self._open: dict[int, Arrivals] = {}
        self._verified: dict[int, Bundle] = {}

    def open(self, version: int, tensors: Mapping[str, np.ndarray[Any, Any]]) -> Arrivals:
        """Exposes a version that is going to arrive in `tensors`; returns where to say what has landed."""
        arrivals = self._open[version] = Arrivals()
        exposed = {
            name: ExposedTensor(view.shape, view.dtype.name, [((0,) * view.ndim, view)])
            for name, view in tensors.items()
        }
        self._exposures.expose(policy_name(version), exposed, arrivals)
        return arrivals

    def verified(self, version: int, digests: Digests) -> None:
        """All of the version is here and right."""
        names = sorted(digests)
        bundle = Bundle({"tensors": names, "version": version}, {"digests": np.stack([digests[n] for n in names])})
        self._verified[version] = bundle
        self._open[version].end()

    def bundle(self, version: int) -> Bundle:
        """Names and digests of a verified version, as the trainer's expose node gives them. TransferError if it is not here."""
        found = self._verified.get(version)
        if found is None:
            held = ", ".join(map(str, self._verified)) or "none"
            raise TransferError(f"policy version {version} cannot be pulled from this replica; it holds {held}")
        return found

    async def drop(self, version: int, error: WaypathError) -> None:
        """Takes down a version that will not be verified: its readers get `error`."""
        arrivals = self._open.pop(version, None)
        if arrivals is not None:
            arrivals.end(error)
            await self._down(version)

    async def keep_only(self, serving: int | None) -> None:
        """Takes down all versions but the one that serves: their memory is going to be written."""
        for version in [version for version in self._open if version != serving]:
            await self.drop(version, TransferError(f"policy version {version} is replaced"))

    def close(self) -> None:
        """Takes everything down, and cuts readers off."""
        for version, arrivals in self._open.items():
            arrivals.end(TransferError("this replica leaves the run"))
            self._exposures.unexpose(policy_name(version), cut_after_s=0.0)
        self._open.clear()
        self._verified.clear()

    async def _down(self, version: int) -> None:
        self._verified.pop(version, None)
        await asyncio.to_thread(self._exposures.unexpose, policy_name(version), cut_after_s=CUT_AFTER_S)
