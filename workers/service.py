"""What a service is: the decorators, the call it receives and the context it is built with.

Owns the registry of service classes and the objects handed to a service method. Must not know gRPC, protobuf
messages or jax. Called by everyone who writes a service (trainer, rollout, reward, probe) and by the runtime.

A service::

    @service("reward")
    class RewardService:
        def __init__(self, context: ServiceContext) -> None: ...

        @method(lane="host")
        def open(self, call: Call) -> None: ...

        @method(lane="async")
        async def score(self, call: Call, *, threshold: float = 0.5) -> Bundle | None: ...

Keyword-only parameters are typed options (options.py). For a call that says what arrays it gives (`client.service`) the inputs are
`DeviceObject`s, this process's parts of arrays on the slice, and the method returns a tree of arrays, each whole.

One instance lives per worker and service name, made at the first node that names it; `open` configures it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

from waypath.proto import worker_pb2 as pb
from waypath.proto.errors import NotFoundError, WaypathError
from waypath.workers.options import options_of

if TYPE_CHECKING:
    from waypath.proto.codecs import Bundle
    from waypath.workers.mailbox import Mailbox
    from waypath.workers.segments import Memory
    from waypath.workers.store import ObjectStore
    from waypath.workers.transfer import Transfer

__all__ = [
    "Call",
    "DivergedError",
    "Lane",
    "ServiceContext",
    "Span",
    "describe",
    "describe_method",
    "find_service",
    "known_services",
    "lane_of",
    "method",
    "methods_of",
    "service",
]

Lane = Literal["jax", "host", "async"]

T = TypeVar("T")
_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C", bound=type)

_LANE_ATTRIBUTE = "__waypath_lane__"

#: Modules that define the built-in services; imported when the first node names the service, so that a reward
#: worker never imports jax. Another service registers itself when its module is imported.
SERVICE_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "trainer": "waypath.workers.trainer.service",
        "rollout": "waypath.workers.engines.service",
        "reward": "waypath.workers.rewards.service",
        "function": "waypath.workers.functions.service",
        "probe": "waypath.workers.probe",
    }
)

_services: dict[str, type] = {}


@dataclass(frozen=True)
class Span:
    """A named phase on this worker's wall clock, in nanoseconds since the Unix epoch."""

    name: str
    start_ns: int
    end_ns: int


class JaxSubmit(Protocol):
    """Queue a callable on the JAX thread (first in, first out)."""

    def __call__(self, fn: Callable[[], T], /) -> concurrent.futures.Future[T]: ...


class DivergedError(Exception):
    """Work on the devices of several processes broke off in this one with `error`: its peers may wait in a collective for ever.

    The process leaves after it has told of the error, and its world with it.
    """

    def __init__(self, error: WaypathError) -> None:
        super().__init__(str(error))
        self.error = error


def _mailbox() -> Mailbox:
    from waypath.workers.mailbox import Mailbox

    return Mailbox()


async def _no_functions(digest: str) -> AsyncIterator[bytes]:
    raise NotFoundError(f"function {digest}: this worker has no controller to ask")
    yield b""


@dataclass
class ServiceContext:
    """What a service may use of its worker. One per worker, shared by its services.

    `process_index` and `process_count` count the worker's world (0 of 1 for a worker without one). `loop` is
    the network thread's asyncio loop. `submit_jax` queues a function on the one JAX thread, behind what is
    queued there; a worker without jax raises RuntimeError. `world` is the coordination id ("" without one). `mailbox`: what
    clients push here. `jax_has_more()` tells whether work is queued behind what the JAX thread runs now. `fetch_function(digest)` streams the bytes of an uploaded function from the controller.
    `memory`: where buffers that peers send to should lie (None: on the heap).
    """

    worker: str
    role: str
    process_index: int
    process_count: int
    allow_import: tuple[str, ...]
    loop: asyncio.AbstractEventLoop
    submit_jax: JaxSubmit
    store: ObjectStore
    transfer: Transfer
    world: str = ""
    threads: int = 1
    mailbox: Mailbox = field(default_factory=_mailbox)
    jax_has_more: Callable[[], bool] = lambda: True
    fetch_function: Callable[[str], AsyncIterator[bytes]] = _no_functions
    memory: Memory | None = None


@dataclass
class Call:
    """One node execution on this worker.

    `options` are the node's options merged with the execution's arguments (arguments win). `inputs` holds,
    per edge, one Bundle per producing worker in process order. `deadline` is on the `time.monotonic()` clock;
    what overruns it on the jax lane ends the process. The object that a method returns is stored under
    "{execution_id}/{node_id}" and stays on this worker until it is released. `node` is the node as it was installed, `slices`
    the meshes that its program speaks of, `objects` the ids of its inputs. A method of the `function` service that has only
    enqueued its work leaves in `ready` what blocks until it is done.
    """

    execution_id: str
    node_id: str
    options: dict[str, Any]
    inputs: list[list[Bundle]]
    context: ServiceContext
    deadline: float
    result: dict[str, Any] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    on_activity: Callable[[str], None] | None = None
    program_id: str = ""
    node: pb.Node = field(default_factory=pb.Node)
    slices: Mapping[str, pb.MeshSlice] = field(default_factory=dict)
    objects: tuple[str, ...] = ()
    ready: Callable[[], None] | None = None

    def report(self, **result: Any) -> None:
        """Merge JSON-able values into the node's control-road result (at most 256 KiB of JSON together)."""
        self.result.update(result)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a phase (rollout, reward, train, publish, compile, checkpoint, eval); kept on errors too."""
        start_ns = time.time_ns()
        started = time.perf_counter_ns()
        try:
            yield
        finally:
            self.spans.append(Span(name, start_ns, start_ns + time.perf_counter_ns() - started))

    def activity(self, text: str) -> None:
        """Say what this worker does now; shown in `waypath status` from the next heartbeat on."""
        if self.on_activity is not None:
            self.on_activity(text)

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, never negative."""
        return max(0.0, self.deadline - time.monotonic())


def method(lane: Lane) -> Callable[[_F], _F]:
    """Mark a service method `(self, call: Call) -> Bundle | None`.

    "jax": a plain function on the JAX thread, in program order. "host": a plain function in a thread pool.
    "async": an `async def` on the network loop, which it must not block.
    """
    if lane not in get_args(Lane):
        raise ValueError(f"lane {lane!r}: expected one of {', '.join(get_args(Lane))}")

    def mark(function: _F) -> _F:
        if inspect.iscoroutinefunction(function) != (lane == "async"):
            kind = "an async def" if lane == "async" else "a plain def"
            raise TypeError(f"{function.__qualname__}: lane {lane!r} takes {kind}")
        setattr(function, _LANE_ATTRIBUTE, lane)
        return function

    return mark


def service(name: str) -> Callable[[_C], _C]:
    """Register a class under a service name. Registering another class under a taken name is a ValueError."""

    def register(cls: _C) -> _C:
        known = _services.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"service {name!r} is already {known.__module__}.{known.__qualname__}")
        _services[name] = cls
        return cls

    return register


def find_service(name: str) -> type:
    """The class registered under `name`, importing built-in ones. NotFoundError says what is known."""
    if name not in _services and name in SERVICE_MODULES:
        importlib.import_module(SERVICE_MODULES[name])
    try:
        return _services[name]
    except KeyError:
        known = ", ".join(sorted({*_services, *SERVICE_MODULES}))
        raise NotFoundError(f"no service {name!r} on this worker; it knows: {known}") from None


def known_services() -> tuple[str, ...]:
    """Names of the services whose modules were imported, sorted."""
    return tuple(sorted(_services))


def lane_of(cls: type, method_name: str) -> Lane:
    """The lane of a service method. NotFoundError if the class has no such method."""
    lane = getattr(getattr(cls, method_name, None), _LANE_ATTRIBUTE, None)
    if lane is None:
        raise NotFoundError(f"{cls.__name__} has no method {method_name!r}; it has: {', '.join(methods_of(cls))}")
    found: Lane = lane
    return found


def describe(names: Iterable[str]) -> list[pb.Service]:
    """What the controller is told of these services: their methods and the options of each."""
    return [
        pb.Service(name=name, methods=[describe_method(n, getattr(cls, n)) for n in methods_of(cls)])
        for name in names
        for cls in (find_service(name),)
    ]


def describe_method(name: str, function: Callable[..., Any]) -> pb.Method:
    """What the controller is told of a method or function."""
    options = options_of(function)
    return pb.Method(name=name, any_options=options is None, options=() if options is None else options.describe())


def methods_of(cls: type) -> tuple[str, ...]:
    """Names of the marked methods of a service class, sorted."""
    return tuple(n for n in sorted(dir(cls)) if hasattr(getattr(cls, n, None), _LANE_ATTRIBUTE))
