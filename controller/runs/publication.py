"""Publication of policy versions to the inference replicas: stage, verify, commit, and replicas that join late.

Owns which replicas are open, what they hold, and the version that is committed. The planner makes the copies; workers move
and verify them; the decision is journaled before the commit is sent. Must not know: sockets, tensors, how a step trains.

A replica that is lost while it stages or commits is left out; one that fails, or whose staged weights do not verify, is
fenced (told to leave, so that its supervisor starts it anew). Either way the others go on (PARTIAL). Where none verifies
(ABORTED), all drop what they staged and go on serving, and the version is staged again a few times. The trainer sends each
byte once, and replicas pass it on. A replica that joins pulls the committed version from the replicas that serve it; where
there are none, from what the trainer still exposes: while the trainer steps there is nothing, and it waits for the next one.

A replica is a process, not a name: a successor under the same name has staged nothing, so it is neither sent the commit of
its predecessor's version nor declared ready on its behalf.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from waypath.controller import reshard
from waypath.controller.journal import Journal
from waypath.controller.runs import programs
from waypath.controller.runs.executor import Executor
from waypath.controller.runs.metrics import Publication
from waypath.controller.runtime import Execution, Runtime
from waypath.controller.transfer_plan import Plan
from waypath.proto.config import RunConfig
from waypath.proto.errors import DeadlineError, TransferError, UnavailableError, WaypathError, WorkerLostError
from waypath.proto.layout import Layout


@dataclass(frozen=True)
class _Replica:
    """An engine that was opened: the process, and where its tensors lie."""

    incarnation: str
    layout: Layout
    info: Mapping[str, Any]


@dataclass(frozen=True)
class Begun:
    """A publication that was dispatched: to which processes (name → incarnation), and the planner's bound over all of them."""

    version: int
    execution: Execution
    lower_bound_bytes: int
    replicas: Mapping[str, str]


class Publisher:
    """The publications of one run."""

    def __init__(self, runtime: Runtime, executor: Executor, config: RunConfig, journal: Journal) -> None:
        self._runtime = runtime
        self._executor = executor
        self._config = config
        self._journal = journal
        self._source: Layout | None = None
        self._trainers: frozenset[str] = frozenset()
        self._opened: dict[str, _Replica] = {}
        self._members: set[str] = set()
        self._serving: dict[str, int] = {}  # replica → the policy version that it committed last
        self._in_flight = 0
        self._ended = asyncio.Event()  # of the publication that is under way, or the next one
        self._eval_rows = 0
        self._any_opened = asyncio.Event()
        self.committed = -1

    @property
    def replicas(self) -> list[str]:
        """Replicas that take part in publications, in name order."""
        return sorted(self._members)

    def set_source(self, parts: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes the trainer's layout from the `open` results of its processes."""
        layouts = [self._layout(worker, parts[worker]) for worker in sorted(parts)]
        self._source, self._trainers = layouts[0].merged(*layouts[1:]), frozenset(parts)

    async def open(self, replica: str) -> None:
        """Opens the engine on `replica`. Raises WorkerLostError where another process has its name by then."""
        incarnation = self._runtime.incarnation(replica)
        program = programs.open_member(self._config, "rollout", replica)
        results = await self._executor.run(program, what=f"opening the engine on {replica}")
        if not incarnation or self._runtime.incarnation(replica) != incarnation:
            raise WorkerLostError(f"worker {replica} was lost while its engine was opened")
        info = results["open"][replica]
        self._opened[replica] = _Replica(incarnation, self._layout(replica, info), info)
        self._eval_rows = int(info.get("eval_rows", 0))
        self._any_opened.set()

    async def eval_rows(self) -> int:
        """How many held-out prompts the task has, as soon as an engine was opened; DeadlineError where none ever is."""
        limit_s = self._config.deadlines.open_s + self._config.cluster.rejoin_timeout_s
        try:
            await asyncio.wait_for(self._any_opened.wait(), limit_s)
        except TimeoutError:
            raise DeadlineError(f"no inference worker opened its engine within {limit_s:g} s") from None
        return self._eval_rows

    def admit(self, replica: str) -> None:
        """From the next publication on, `replica` takes part."""
        self._members.add(replica)

    def lost(self, replica: str) -> None:
        """Forgets a replica whose worker is gone."""
        self._members.discard(replica)
        self._serving.pop(replica, None)
        self._opened.pop(replica, None)

    def _present(self, replica: str, incarnation: str) -> bool:
        """Is that very process still opened?"""
        opened = self._opened.get(replica)
        return opened is not None and opened.incarnation == incarnation

    def _layout(self, worker: str, info: Mapping[str, Any]) -> Layout:
        """Where a worker says its tensors lie, and on which machine that is."""
        return replace(Layout.from_json(info["layout"]), hosts={worker: self._runtime.host(worker)})

    def _plan(self, source: Layout | None, replicas: list[str]) -> Plan:
        """What brings `replicas` the policy: they get it once from `source`, and the rest from each other."""
        if source is None:
            raise TransferError("the trainer has not reported its layout")
        layouts = [self._opened[replica].layout for replica in replicas]
        if not layouts:
            return Plan((), (), (), (), 0)
        return reshard.plan(source, layouts[0].merged(*layouts[1:]))

    @staticmethod
    def _copies(plan: Plan, replicas: list[str]) -> dict[str, list[dict[str, Any]]]:
        return {replica: [copy.to_json() for copy in plan.for_worker(replica)] for replica in replicas}

    def begin(self, version: int, ahead: bool = False) -> Begun:
        """Dispatches the staging of `version`, which the trainer has just made (or, with `ahead`, will have made)."""
        plan = self._plan(self._source, self.replicas)
        copies = self._copies(plan, self.replicas)
        execution = self._executor.submit(programs.publish(self._config, copies, ahead=ahead), {"version": version})
        self._in_flight += 1
        return Begun(version, execution, plan.lower_bound_bytes, {r: self._opened[r].incarnation for r in copies})

    async def finish(self, begun: Begun) -> Publication:
        """Waits for the staging, decides, journals the decision, commits, and declares ready who committed.

        Where no replica verifies the publication is ABORTED: all drop what is staged, the version before serves on, and it is
        tried again, `publish.attempts` times in all. Raises TransferError with the causes after the last one, and what ended a
        publication that was not decided, which is then ABORTED too.
        """
        version, reports, attempt = begun.version, list[Mapping[str, Any]](), 1
        decided = False
        try:
            while True:
                results = await self._executor.result(begun.execution, f"staging policy version {version}")
                replicas = begun.replicas
                staged = {r: found for r in replicas for found in results.get(f"stage_{r}", {}).values()}
                reports += staged.values()
                verified = sorted(r for r, found in staged.items() if found.get("verified"))
                refused = {r: _reason(found) for r, found in staged.items() if not found.get("verified")}
                if verified or not refused:
                    break
                decided = True
                causes = _causes(refused)
                await self._abort(version, replicas, causes, attempt)
                if attempt >= self._config.publish.attempts:
                    times = f" (attempt {attempt} of {attempt}, publish.attempts)"
                    raise TransferError(f"no replica could stage policy version {version}: {causes}{times}")
                begun, attempt, decided = self._again(version), attempt + 1, False
            self._fence(version, "stage", replicas, refused, left=verified)
            present = [r for r in verified if self._present(r, replicas[r])]
            lost = dict.fromkeys(replicas.keys() - refused.keys() - set(present), "it was lost")
            outcome = self._decide(version, replicas, present, _causes(refused | lost), attempt)
            decided = True
            try:
                stalls_s, failed = await self._commit(version, {r: replicas[r] for r in present})
            except WaypathError as error:
                self._journal_outcome(version, "PARTIAL", [], str(error), attempt)
                raise
            self.committed = version
            if outcome == "COMMITTED" and stalls_s.keys() != replicas.keys():
                gone = {r: failed.get(r, "it was lost") for r in replicas.keys() - stalls_s.keys()}
                outcome = self._decide(version, replicas, sorted(stalls_s), _causes(gone), attempt)
            for replica in stalls_s:
                self._runtime.pool_ready("inference", replica, replicas[replica])
        except BaseException as error:
            if not decided:
                cause = f"{error}" if isinstance(error, WaypathError) else "the run ended before it was decided"
                self._journal_outcome(version, "ABORTED", [], cause, attempt)
            raise
        finally:
            self._in_flight -= 1
            self._ended.set()
            self._ended = asyncio.Event()
        return Publication(
            version=version,
            bytes=sum(int(staged[r]["publish_bytes"]) for r in verified),
            lower_bound_bytes=begun.lower_bound_bytes,
            egress_bytes=sum(self._from_trainers(found) for found in reports),
            stall_s=max(stalls_s.values(), default=0.0),
            outcome=outcome,
            attempts=attempt,
            replicas=tuple(present),
        )

    def _decide(self, version: int, replicas: Mapping[str, str], present: list[str], cause: str, attempt: int) -> str:
        """Journals which replicas serve the version from now on; the rest is left out for `cause`."""
        outcome = "COMMITTED" if len(present) == len(replicas) else "PARTIAL"
        self._journal_outcome(version, outcome, present, cause if outcome == "PARTIAL" else "", attempt)
        return outcome

    def _journal_outcome(self, version: int, outcome: str, replicas: list[str], cause: str, attempt: int) -> None:
        entry = {"type": "publication", "version": version, "outcome": outcome, "replicas": replicas}
        self._journal.append({**entry, "attempt": attempt, "cause": cause})
        if cause:
            self._runtime.log(f"publication of policy version {version}: {outcome}, attempt {attempt}: {cause}")

    async def _abort(self, version: int, replicas: Mapping[str, str], cause: str, attempt: int) -> None:
        """Journals it, and lets every replica that is still there drop what it has staged."""
        self._journal_outcome(version, "ABORTED", [], cause, attempt)
        present = sorted(r for r, incarnation in replicas.items() if self._present(r, incarnation))
        if present:
            program = programs.abort(self._config, present)
            results = await self._executor.run(program, {"version": version}, what=f"aborting policy version {version}")
            failed = {
                r: str(report["error"])
                for r in present
                for report in results.get(f"abort_{r}", {}).values()
                if "error" in report
            }
            for replica, reason in failed.items():  # what it has staged is not known
                self._members.discard(replica)
                self._runtime.fence(
                    replica, replicas[replica], f"it could not abort policy version {version}: {reason}"
                )

    def _again(self, version: int) -> Begun:
        """Dispatches a version that was aborted once more, from what the trainer still exposes."""
        members = [r for r in self.replicas if r in self._opened]
        if not members:
            raise TransferError(f"no replica is left to stage policy version {version}")
        plan = self._plan(self._source, members)
        copies = self._copies(plan, members)
        execution = self._executor.submit(programs.join(self._config, copies), {"version": version})
        return Begun(version, execution, plan.lower_bound_bytes, {r: self._opened[r].incarnation for r in members})

    def _from_trainers(self, report: Mapping[str, Any]) -> int:
        """Bytes that a stage node received from trainer processes; what a node that failed received is not known."""
        return sum(int(size) for worker, size in report.get("sources", {}).items() if worker in self._trainers)

    def _fence(
        self, version: int, what: str, replicas: Mapping[str, str], failed: Mapping[str, str], left: list[str]
    ) -> None:
        if not failed:
            return
        if not left:
            raise TransferError(f"no replica could {what} policy version {version}: {_causes(failed)}")
        for replica, reason in failed.items():
            self._members.discard(replica)
            self._runtime.fence(replica, replicas[replica], f"it could not {what} policy version {version}: {reason}")

    async def _commit(self, version: int, replicas: Mapping[str, str]) -> tuple[dict[str, float], dict[str, str]]:
        """Commits on these processes; returns those that serve the version now with how long each stood still for it, and why
        others failed. TransferError where all did.
        """
        if not replicas:
            return {}, {}
        program = programs.commit(self._config, sorted(replicas))
        results = await self._executor.run(program, {"version": version}, what=f"committing policy version {version}")
        reports = {r: report for r in replicas for report in results.get(f"commit_{r}", {}).values()}
        failed = {r: str(report["error"]) for r, report in reports.items() if "error" in report}
        serving = sorted(reports.keys() - failed.keys())
        self._fence(version, "commit", replicas, failed, left=serving)
        self._serving.update({r: version for r in serving if self._present(r, replicas[r])})
        return {r: float(reports[r].get("stall_s", 0.0)) for r in serving}, failed

    async def join(self, replica: str) -> None:
        """Brings an opened replica to the committed version, admits it and declares it ready.

        Waits for the next publication where the trainer exposes nothing. Raises DeadlineError where none ends in the time
        of a step; a replica that fails is fenced.
        """
        limit_s = self._executor.limit_s(programs.step(self._config))
        while True:
            ended, version = self._ended, self.committed
            if version >= 0 and self._in_flight == 0 and await self._pull_cached(replica, version):
                if self._in_flight == 0 and version == self.committed:
                    self.admit(replica)
                    self._runtime.pool_ready("inference", replica, self._opened[replica].incarnation)
                    return
                continue
            try:
                await asyncio.wait_for(ended.wait(), limit_s)
            except TimeoutError:
                raise DeadlineError(
                    f"{replica} waited {limit_s:g} s for a publication after version {version} that it could join"
                ) from None

    async def _pull_cached(self, replica: str, version: int) -> bool:
        serving = sorted(r for r, held in self._serving.items() if held == version and r in self._members)
        for peers in ([serving] if serving else []) + [[]]:
            report = await self._stage_late(replica, version, peers)
            if report is not None:
                break
        else:
            return False
        incarnation = self._opened[replica].incarnation
        try:
            if not report.get("verified"):
                raise TransferError(_reason(report))
            await self._commit(version, {replica: incarnation})
        except WaypathError as error:
            self._runtime.fence(replica, incarnation, f"could not join: {error}")
            raise
        return True

    async def _stage_late(self, replica: str, version: int, peers: list[str]) -> Mapping[str, Any] | None:
        """Stages a version that is out already, from `peers` or else the trainer; None where they have gone on, or are gone."""
        layouts = [self._opened[peer].layout for peer in peers]
        source = layouts[0].merged(*layouts[1:]) if layouts else self._source
        copies = self._copies(self._plan(source, [replica]), [replica])
        program = programs.join(self._config, copies, peers[0] if peers else "")
        try:
            results = await self._executor.run(program, {"version": version}, what=f"staging version {version}")
        except (UnavailableError, TransferError):
            return None
        except WorkerLostError:
            if not peers:
                raise
            return None
        report = results.get(f"stage_{replica}", {}).get(replica)
        if report is None:
            raise WorkerLostError(f"worker {replica} was lost while it joined")
        return None if report.get("kind") == "TransferError" else report


def _reason(report: Mapping[str, Any]) -> str:
    """Why a stage node's report is no success."""
    return str(report.get("error") or report.get("mismatch") or "digests differ")


def _causes(failed: Mapping[str, str]) -> str:
    """ "replica: reason" of each, in name order."""
    return "; ".join(f"{replica}: {reason}" for replica, reason in sorted(failed.items()))
