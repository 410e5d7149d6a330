"""The Python client: start, follow, cancel and export runs of a controller.

Blocking, thread-compatible, free of jax. A run belongs to the controller: it goes on when the client exits, and
`Client.run(run_id)` attaches to it again.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import grpc

from waypath.controller.client.calls import AS_IT_IS, CALL_DEADLINE_S, Function, RegisteredFunction, Service
from waypath.controller.client.programs import TracedProgram
from waypath.controller.client.refs import Ref, Slice
from waypath.controller.client.session import ClientSession
from waypath.controller.client.waiting import in_thread
from waypath.proto import channel as channels
from waypath.proto import client_pb2 as pb
from waypath.proto import config as configs
from waypath.proto import version
from waypath.proto.client_pb2_grpc import ClientStub
from waypath.proto.errors import ConfigError, UnavailableError, from_rpc_error

T = TypeVar("T")

CALL_TIMEOUT_S = 30.0
EXPORT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class StepRecord:
    """One step of a run. Every key of its metrics line is an attribute too."""

    metrics: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.metrics[name]
        except KeyError:
            raise AttributeError(f"a step has no {name!r}; it has: {', '.join(self.metrics)}") from None


@dataclass(frozen=True)
class RunResult:
    """How a run ended: the contents of its result.json."""

    run_id: str
    status: str
    steps: int
    policy_version: int
    params_digest: str | None
    eval_before: float | None
    eval_after: float | None
    export_dir: str | None
    seconds: float
    cause: str | None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunResult:
        """Reads result.json's object."""
        names = [name for name in cls.__dataclass_fields__ if name != "extra"]
        rest = {key: item for key, item in value.items() if key not in names}
        known: dict[str, Any] = {name: value.get(name) for name in names}
        return cls(**known, extra=rest)


class Run:
    """A run of the controller, by id."""

    def __init__(self, client: Client, run_id: str) -> None:
        self._client = client
        self.id = run_id
        self._result: RunResult | None = None

    def updates(self, from_step: int = 0) -> Iterator[StepRecord | str | RunResult]:
        """Yields steps, phase texts and at last the result, as they come; blocks in between."""
        self._client.check_open()
        request = pb.WatchRunRequest(run_id=self.id, from_step=from_step)
        stream = self._client.stub.WatchRun(request, metadata=self._client.metadata)
        try:
            for update in stream:
                kind = update.WhichOneof("kind")
                if kind == "metrics_json":
                    yield StepRecord(json.loads(update.metrics_json))
                elif kind == "phase":
                    yield str(update.phase)
                elif kind == "result_json":
                    self._result = RunResult.from_json(json.loads(update.result_json))
                    yield self._result
        except grpc.RpcError as error:
            raise from_rpc_error(error, f"follow run {self.id} at {self._client.address}") from None
        finally:
            stream.cancel()

    def steps(self, from_step: int = 0) -> Iterator[StepRecord]:
        """Yields each step when it is done; ends with the run."""
        for update in self.updates(from_step):
            if isinstance(update, StepRecord):
                yield update

    async def __aiter__(self) -> AsyncIterator[StepRecord]:
        """`async for step in run`: as `steps()`."""
        steps = self.steps()
        while (step := await in_thread(lambda: next(steps, None))) is not None:
            yield step

    def __await__(self) -> Generator[Any, None, RunResult]:
        """`await run` is its `result()`."""
        return in_thread(self.result).__await__()

    def result(self) -> RunResult:
        """Waits for the run's end and returns its result. A failed run is a result with status and cause, not an error."""
        if self._result is None:
            for _ in self.updates(from_step=1 << 31):
                continue
        if self._result is None:
            raise from_rpc_error(grpc.RpcError("the stream ended early"), f"learn how run {self.id} ended")
        return self._result

    def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        """Returns the recorded samples (prompt, completion, reward) of one step, or of all."""
        self._client.check_open()
        request = pb.SamplesRequest(run_id=self.id, step=-1 if step is None else step)
        stream = self._client.stub.Samples(request, metadata=self._client.metadata, timeout=CALL_TIMEOUT_S)
        try:
            return [json.loads(sample.sample_json) for sample in stream]
        except grpc.RpcError as error:
            raise from_rpc_error(error, f"read samples of run {self.id}") from None

    def cancel(self, checkpoint: bool = True) -> None:
        """Asks the run to stop after its current step, with a checkpoint if asked; returns at once."""
        request = pb.CancelRunRequest(run_id=self.id, checkpoint=checkpoint)
        self._client.call(self._client.stub.CancelRun, request, f"cancel run {self.id}")

    def export(self, out: str | Path) -> str:
        """Writes the run's newest parameters as a Hugging Face directory `out`; returns its path."""
        request = pb.ExportRunRequest(run_id=self.id, out=str(Path(out).absolute()))
        reply = self._client.call(
            self._client.stub.ExportRun, request, f"export run {self.id}", timeout=EXPORT_TIMEOUT_S
        )
        return str(reply.export_dir)


class Client:
    """A connection to one controller; a context manager."""

    def __init__(self, address: str, token: str, *, name: str = "", weight: float = 1.0, lease_s: float = 0.0) -> None:
        self.address = address
        self.metadata = channels.metadata(token)
        self._channel = channels.channel(address)
        self.stub = ClientStub(self._channel)
        self._session = ClientSession(self, weight, lease_s, name)
        self._closed = False

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *details: object) -> None:
        await in_thread(self.close)

    def close(self) -> None:
        """Closes the connection. Runs go on; slices and objects of this client are released."""
        self._closed = True
        self._session.close()
        self._channel.close()

    def check_open(self) -> None:
        """Raises UnavailableError where this client was closed."""
        if self._closed:
            raise UnavailableError("this client is closed", remedy="waypath.connect makes another")

    def call(self, method: Callable[..., T], request: Any, doing: str, timeout: float = CALL_TIMEOUT_S) -> T:
        """Makes one RPC with token and deadline; raises the controller's error, or what the status code says."""
        self.check_open()
        try:
            return method(request, metadata=self.metadata, timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error, f"{doing} at {self.address}") from None

    def start_run(
        self,
        config: str | Path | Mapping[str, Any] | configs.RunConfig | None = None,
        overrides: Mapping[str, Any] | None = None,
        resume: str | None = None,
    ) -> Run:
        """Starts a run from a configuration (TOML file, mapping or RunConfig) with dotted `overrides`.

        `resume` goes on with an earlier run instead, which keeps its configuration. Raises ConfigError naming key, value
        and what is allowed, before anything starts.
        """
        request = pb.StartRunRequest(resume_run=resume or "")
        if resume:
            if config is not None or overrides:
                raise ConfigError(
                    "a resumed run keeps its configuration: give neither config nor overrides with resume"
                )
        elif config is None:
            raise ConfigError("start_run needs a config, or the id of a run to resume")
        else:
            source = config.to_json() if isinstance(config, configs.RunConfig) else config
            request.config_json = json.dumps(configs.load(source, overrides).to_json())
        reply = self.call(self.stub.StartRun, request, "start a run")
        return Run(self, reply.run_id)

    def slice(
        self,
        devices: int | None = None,
        mesh: Mapping[str, int] | None = None,
        *,
        kind: str = "",
        name: str = "",
        world: str = "",
        strategy: Literal["pack", "spread"] = "pack",
        exclusive: bool = False,
        like: Slice | None = None,
    ) -> Slice:
        """Asks for `devices` devices of one world as a mesh (axis → size; by default one axis "x").

        `kind`: a platform (cpu, tpu, gpu); `world`: one that it must lie in; `pack` prefers devices that slices use already, `spread`
        others; `exclusive`: on devices of its own; `like`: on the devices of that slice. Raises ConfigError where it cannot be
        had, saying what is free and who holds the rest.
        """
        return self._session.slice(devices, mesh, kind, name, world, strategy, exclusive, like)

    def function(
        self,
        fun: Callable[..., Any],
        slice: Slice,
        in_specs: Any = None,
        out_specs: Any = None,
        donate: Sequence[int] | int = (),
        *,
        name: str = "",
        debug_nans: bool = False,
        deadline_s: float = CALL_DEADLINE_S,
    ) -> Function:
        """A JAX function of trees of arrays, to be called on refs that lie on `slice`.

        `in_specs`: a `PartitionSpec` for all arguments, or a tuple with one entry an argument (a spec, or a tree of them); `out_specs`
        likewise for what it returns. `donate`: positions of arguments that a call consumes. With `debug_nans` a NaN in an output
        is an error. A call that is not done `deadline_s` after its dispatch has failed. It is traced here and exported as StableHLO at the first call with arguments of a kind.
        """
        return Function(self._session, fun, slice, in_specs, out_specs, donate, name, debug_nans, deadline_s)

    def registered(
        self,
        name: str,
        slice: Slice,
        gives: Any,
        in_specs: Any = AS_IT_IS,
        out_specs: Any = None,
        donate: Sequence[int] | int = (),
        *,
        deadline_s: float = CALL_DEADLINE_S,
    ) -> RegisteredFunction:
        """A pure JAX function that the workers of `slice` know by name (`[compute] services`); options are given at the call.

        `gives`: what it returns, as arrays or `jax.ShapeDtypeStruct`s; a tuple for several outputs. Raises GraphError at the first
        call where a worker does not know it, or takes other options.
        """
        return RegisteredFunction(self._session, name, slice, gives, in_specs, out_specs, donate, deadline_s)

    def service(self, name: str, slice: Slice) -> Service:
        """A service that the workers of `slice` have; all of them run what is called."""
        return Service(self._session, name, slice)

    def put(self, value: Any, slice: Slice, spec: Any = None) -> Ref:
        """Brings a tree of arrays to a slice, split as `spec` says (None: whole on every device)."""
        return self._session.put(value, slice, spec)

    def transfer(self, ref: Any, slice: Slice, spec: Any = None) -> Any:
        """The same arrays on another slice, or with another spec on the same; workers pull from workers."""
        return self._session.transfer(ref, slice, spec)

    def program(self, fun: Callable[..., Any], *, name: str = "") -> TracedProgram:
        """A Python function over refs as a program; a decorator. See `TracedProgram`."""
        return TracedProgram(self._session, fun, name)

    def run(self, run_id: str) -> Run:
        """Attaches to a run by id."""
        return Run(self, run_id)

    def runs(self) -> list[dict[str, Any]]:
        """Returns the controller's runs: run_id, status, steps, cause, directory."""
        reply = self.call(self.stub.ListRuns, pb.ListRunsRequest(), "list runs")
        return [
            {
                "run_id": run.run_id,
                "status": run.status,
                "steps": run.steps,
                "cause": run.cause,
                "directory": run.directory,
            }
            for run in reply.runs
        ]

    def status(self) -> dict[str, Any]:
        """Returns what is up: workers with activity and memory, executions and what they wait for, runs."""
        reply = self.call(self.stub.Status, pb.StatusRequest(), "ask for the status")
        value: dict[str, Any] = json.loads(reply.status_json)
        return value


def connect(
    address: str,
    token: str | None = None,
    token_file: str | Path | None = None,
    *,
    name: str = "",
    weight: float = 1.0,
    lease_s: float = 0.0,
) -> Client:
    """Connects to a controller and shakes hands. Give the cluster token or the file that holds it.

    `weight` is this client's share where clients compete for workers; `lease_s` (0: the controller's default) how long it may be
    silent before what it owns is released.

    Raises AuthenticationError on a wrong token, UnavailableError where nothing listens, VersionMismatchError.
    """
    if token is None:
        if token_file is None:
            raise ConfigError("connect needs the cluster's token", remedy="pass token= or token_file=")
        token = channels.read_token(Path(token_file))
    client = Client(address, token, name=name, weight=weight, lease_s=lease_s)
    ours = version.versions()
    try:
        reply = client.call(client.stub.Hello, pb.HelloRequest(versions=ours), "reach the controller")
        version.check(reply.versions, ours, f"the controller at {address}")
    except BaseException:
        client.close()
        raise
    return client
