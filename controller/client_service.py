"""The Client service: what clients may ask of the controller. Thin: every answer comes from the run manager or the runtime."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from waypath.controller.runs.disk import LineReader, dump_line
from waypath.controller.runs.manager import RunManager
from waypath.controller.runtime import Runtime
from waypath.controller.sessions import Session
from waypath.controller.status import describe
from waypath.proto import client_pb2 as pb
from waypath.proto import version
from waypath.proto.client_pb2_grpc import ClientServicer
from waypath.proto.errors import WaypathError, trailer

T = TypeVar("T")


async def _refuse(context: Any, error: WaypathError) -> None:
    context.set_trailing_metadata(trailer(error))
    await context.abort(error.status, str(error))


class ClientService(ClientServicer):
    """Answers clients."""

    def __init__(self, runtime: Runtime, manager: RunManager) -> None:
        self._runtime = runtime
        self._manager = manager

    @staticmethod
    async def _answer(context: Any, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await work()
        except WaypathError as error:
            await _refuse(context, error)
            raise

    @staticmethod
    async def _stream(context: Any, updates: AsyncIterator[T]) -> AsyncIterator[T]:
        try:
            async for update in updates:
                yield update
        except WaypathError as error:
            await _refuse(context, error)
            raise

    async def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:
        """Shakes hands; a mismatch of versions is refused."""

        async def work() -> pb.HelloReply:
            ours = version.versions()
            version.check(request.versions, ours, "the client")
            return pb.HelloReply(versions=ours, cluster_id=self._runtime.cluster_id, epoch=self._runtime.epoch)

        return await self._answer(context, work)

    async def StartRun(self, request: pb.StartRunRequest, context: Any) -> pb.StartRunReply:
        """Starts or resumes a run; answers with its id."""

        async def work() -> pb.StartRunReply:
            record = self._manager.start(request.config_json, request.resume_run, request.run_id)
            return pb.StartRunReply(run_id=record.run_id)

        return await self._answer(context, work)

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsReply:
        """Lists the runs of the run folder."""

        async def work() -> pb.ListRunsReply:
            listed = await self._manager.listing()
            return pb.ListRunsReply(runs=[pb.RunSummary(**entry) for entry in listed])

        return await self._answer(context, work)

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.RunUpdate]:
        """Streams metrics lines from `from_step` on, phases, and the result."""

        async def updates() -> AsyncIterator[pb.RunUpdate]:
            async for kind, value in self._manager.attach(request.run_id).watch(request.from_step):
                if kind == "metrics":
                    yield pb.RunUpdate(metrics_json=json.dumps(value))
                elif kind == "result":
                    yield pb.RunUpdate(result_json=json.dumps(value))
                else:
                    yield pb.RunUpdate(phase=value)

        async for update in self._stream(context, updates()):
            yield update

    async def CancelRun(self, request: pb.CancelRunRequest, context: Any) -> pb.CancelRunReply:
        """Asks a run to stop."""

        async def work() -> pb.CancelRunReply:
            await self._manager.cancel(request.run_id, request.checkpoint)
            return pb.CancelRunReply()

        return await self._answer(context, work)

    async def ExportRun(self, request: pb.ExportRunRequest, context: Any) -> pb.ExportRunReply:
        """Writes a run's parameters as a Hugging Face directory."""

        async def work() -> pb.ExportRunReply:
            export_dir, digest = await self._manager.export(request.run_id, request.out)
            return pb.ExportRunReply(export_dir=export_dir, params_digest=digest)

        return await self._answer(context, work)

    async def Samples(self, request: pb.SamplesRequest, context: Any) -> AsyncIterator[pb.Sample]:
        """Streams recorded samples of one step, or of all (step −1)."""

        async def samples() -> AsyncIterator[pb.Sample]:
            reader = LineReader(self._manager.record(request.run_id).directory / "samples.jsonl")
            while lines := await asyncio.to_thread(reader.read):
                for line in lines:
                    if request.step in (-1, line["step"]):
                        yield pb.Sample(sample_json=dump_line(line))

        async for sample in self._stream(context, samples()):
            yield sample

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionReply]:
        """Serves one client session from open to its end."""
        async with contextlib.aclosing(Session(self._runtime).replies(request_iterator)) as replies:
            async for reply in self._stream(context, replies):
                yield reply

    async def Upload(self, request_iterator: AsyncIterator[pb.UploadChunk], context: Any) -> pb.UploadReply:
        """Takes an exported function; with a digest and no bytes it says whether that one is here."""

        async def work() -> pb.UploadReply:
            functions, digest, parts, nbytes = self._runtime.functions, "", [], 0
            async for chunk in request_iterator:
                digest = digest or chunk.digest
                nbytes += len(chunk.data)
                functions.check_size(digest, nbytes)
                parts.append(chunk.data)
            if nbytes:
                functions.add(digest, b"".join(parts))
            return pb.UploadReply(known=digest in functions)

        return await self._answer(context, work)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        """Tells what is up and what waits for what."""
        workers = [
            {
                "name": link.worker,
                "role": link.register.role,
                "world": link.register.world,
                "pid": link.register.pid,
                "incarnation": link.register.incarnation,
                "activity": link.heartbeat.activity,
                "waits": list(link.heartbeat.waits),
                "rss_bytes": link.heartbeat.rss_bytes,
                "store_bytes": link.heartbeat.store_bytes,
                "egress_bytes": link.heartbeat.egress_bytes,
                "devices": len(link.register.devices),
                "transfer_paths": list(link.register.transfer_paths),
                "staging": link.register.staging,
            }
            for link in sorted(self._runtime.connections.values(), key=lambda item: item.worker)
        ]
        resources = self._runtime.scheduler.resources
        status = {
            "cluster_id": self._runtime.cluster_id,
            "epoch": self._runtime.epoch,
            "workers": workers,
            "missing": sorted({w for name in resources.slices for w in resources.missing(name)}),
            "publication_path": "host",
            "executions": describe(self._runtime.scheduler),
            "runs": [
                {
                    "run_id": record.run_id,
                    "status": record.status,
                    "steps": record.steps,
                    "phase": record.phase,
                }
                for record in self._manager.kept()
            ],
        }
        return pb.StatusReply(status_json=json.dumps(status))
