"""Publication of policy versions to the inference replicas: stage, verify, commit, and replicas that join late.

Owns which replicas are open, what they hold, and the version that is committed. The planner makes the copies; workers move
and verify them; the decision is journaled before the commit is sent. Must not know: sockets, tensors, how a step trains.

A replica that is lost while it stages is dropped; one whose staged weights do not verify is fenced (told to leave, so that
its supervisor starts it anew). Either way the others go on (PARTIAL). A replica that joins pulls the committed version
from what the trainer still exposes; while the trainer steps there is nothing to pull, and it waits for the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from waypath.controller import reshard
from waypath.controller.journal import Journal
from waypath.controller.runs import programs
from waypath.controller.runs.metrics import Publication
from waypath.controller.runtime import Execution, Runtime
from waypath.proto.config import RunConfig
from waypath.proto.errors import CancelledError, RemoteError, TransferError, UnavailableError, WaypathError
from waypath.proto.layout import Layout


@dataclass(frozen=True)
class Begun:
    """A publication that was dispatched: to whom, and the planner's bound over all of them."""

    version: int
    execution: Execution
    lower_bound_bytes: int
    replicas: list[str]


class Publisher:
    """The publications of one run."""

    def __init__(self, runtime: Runtime, config: RunConfig, journal: Journal, owner: str) -> None:
        self._runtime = runtime
        self._config = config
        self._journal = journal
        self._owner = owner
        self._source: Layout | None = None
        self._layouts: dict[str, Layout] = {}
        self._members: set[str] = set()
        self._in_flight = 0
        self._changed = asyncio.Event()
        self.committed = -1
        self.info: dict[str, dict[str, Any]] = {}

    @property
    def replicas(self) -> list[str]:
        """Replicas that take part in publications, in name order."""
        return sorted(self._members)

    def set_source(self, parts: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes the trainer's layout from the `open` results of its processes."""
        layouts = [Layout.from_json(parts[worker]["layout"]) for worker in sorted(parts)]
        self._source = layouts[0].merged(*layouts[1:])

    async def open(self, replica: str) -> None:
        """Opens the engine on `replica` and checks that every tensor it wants has a source."""
        execution = self._runtime.submit(programs.open_member(self._config, "rollout", replica), {}, owner=self._owner)
        results = await execution.result()
        info = results["open"][replica]
        self._layouts[replica] = Layout.from_json(info["layout"])
        self.info[replica] = {key: value for key, value in info.items() if key != "layout"}

    def admit(self, replica: str) -> None:
        """From the next publication on, `replica` takes part."""
        self._members.add(replica)

    def lost(self, replica: str) -> None:
        """Forgets a replica whose worker is gone."""
        self._members.discard(replica)
        self._layouts.pop(replica, None)

    def _copies(self, replicas: list[str]) -> tuple[dict[str, list[dict[str, Any]]], int]:
        if self._source is None:
            raise TransferError("the trainer has not reported its layout")
        copies, bound = {}, 0
        for replica in replicas:
            plan = reshard.plan(self._source, self._layouts[replica])
            copies[replica] = [copy.to_json() for copy in plan.copies]
            bound += plan.lower_bound_bytes
        return copies, bound

    def begin(self, version: int, ahead: bool = False) -> Begun:
        """Dispatches the staging of `version`, which the trainer has just made (or, with `ahead`, will have made)."""
        replicas = self.replicas
        copies, bound = self._copies(replicas)
        self._in_flight += 1
        execution = self._runtime.submit(
            programs.publish(self._config, copies, ahead=ahead), {"version": version}, owner=self._owner
        )
        return Begun(version, execution, bound, replicas)

    async def finish(self, begun: Begun) -> Publication:
        """Waits for the staging, decides, journals the decision and commits. Raises TransferError where no replica verified."""
        version, replicas = begun.version, begun.replicas
        try:
            results = await begun.execution.result()
            staged = {r: results[f"stage_{r}"].get(r) for r in replicas if f"stage_{r}" in results}
            verified = sorted(r for r, result in staged.items() if result and result.get("verified"))
            refused = sorted(r for r, result in staged.items() if result and not result.get("verified"))
            if refused and not verified:
                raise TransferError(
                    f"policy version {version} does not verify on any replica: "
                    + "; ".join(f"{r}: {staged[r].get('mismatch', 'digests differ')}" for r in refused),  # type: ignore[union-attr]
                )
            outcome = "COMMITTED" if len(verified) == len(replicas) else "PARTIAL"
            self._journal.append({"type": "publication", "version": version, "outcome": outcome, "replicas": verified})
            stall_s = await self._commit(version, verified)
            for replica in refused:
                self._runtime.fence(replica, f"policy version {version} did not verify there")
            self.committed = version
        finally:
            self._in_flight -= 1
            self._changed.set()
        reports = [staged[r] or {} for r in verified]
        return Publication(
            version=version,
            bytes=sum(int(report["publish_bytes"]) for report in reports),
            lower_bound_bytes=begun.lower_bound_bytes,
            egress_bytes=sum(int(report.get("egress_bytes", report["publish_bytes"])) for report in reports),
            stall_s=stall_s,
            outcome=outcome,
            replicas=tuple(verified),
        )

    async def _commit(self, version: int, replicas: list[str]) -> float:
        if not replicas:
            return 0.0
        execution = self._runtime.submit(
            programs.commit(self._config, replicas), {"version": version}, owner=self._owner
        )
        results = await execution.result()
        stalls = [float(result.get("stall_s", 0.0)) for node in results.values() for result in node.values() if result]
        return max(stalls, default=0.0)

    async def join(self, replica: str) -> None:
        """Brings an opened replica to the committed version and admits it; waits for the next publication where it must."""
        while True:
            version = self.committed
            if version >= 0 and self._in_flight == 0 and await self._pull_cached(replica, version):
                if self._in_flight == 0 and version == self.committed:
                    self.admit(replica)
                    return
                continue
            self._changed.clear()
            await self._changed.wait()

    async def _pull_cached(self, replica: str, version: int) -> bool:
        copies, _ = self._copies([replica])
        program = programs.publish(self._config, copies, cached=True)
        try:
            execution = self._runtime.submit(program, {"version": version}, owner=self._owner)
            results = await execution.result()
            report = results.get(f"stage_{replica}", {}).get(replica)
            if not report or not report.get("verified"):
                raise RemoteError(f"policy version {version} did not verify on {replica}")
            await self._commit(version, [replica])
        except CancelledError:
            raise
        except (UnavailableError, TransferError):
            return False
        except WaypathError as error:
            self._runtime.fence(replica, f"could not join: {error}")
            raise
        return True
