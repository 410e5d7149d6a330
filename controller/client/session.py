"""The session of one client: its slices and objects, and the programs that it has installed.

Owns what the controller was told already (uploads, installs). Must not import jax: tracing.py does, loaded at the first use. Called
through `Client`, refs.py and programs.py.
"""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from waypath.controller.allocation import Grant
from waypath.controller.client.refs import Ref, Slice, Symbol
from waypath.controller.client.stream import Pending, SessionStream
from waypath.controller.client.trace import Template, Trace
from waypath.controller.client.transport import DEFAULT_TIMEOUT_S, DataRoad
from waypath.controller.graph import Program, ProgramBuilder
from waypath.controller.graph import Slice as Place
from waypath.controller.nodes import Aval, Leaf
from waypath.controller.specs import check_leaf
from waypath.proto import client_pb2 as pb
from waypath.proto.errors import ConfigError, GraphError

if TYPE_CHECKING:
    from waypath.controller.client.client import Client
    from waypath.controller.client.tracing import Exported

MAX_PROGRAM_BYTES = 7 << 20
CHUNK_BYTES = 1 << 20
PUT_TIMEOUT_S = 300.0
MAX_DROPPED = 64


class ClientSession:
    """The session of one client, opened at its first use."""

    def __init__(self, client: Client, weight: float, lease_s: float, name: str) -> None:
        self._client = client
        self._settings = (name, weight, lease_s)
        self._stream: SessionStream | None = None
        self._data = DataRoad(client.metadata)
        self._installed: set[str] = set()
        self._uploaded: set[str] = set()
        self._puts: dict[tuple[Any, ...], Program] = {}
        self._lock = threading.Lock()
        self.dropped: deque[str] = deque()

    @property
    def stream(self) -> SessionStream:
        """The open session."""
        self._client.check_open()
        with self._lock:
            if self._stream is None:
                name, weight, lease_s = self._settings
                client = self._client
                self._stream = SessionStream(client.stub, client.metadata, client.address, name, weight, lease_s)
            return self._stream

    def close(self) -> None:
        """Ends the session, if there is one."""
        if self._stream is not None:
            self._stream.close()
        self._data.close()

    # Slices

    def slice(
        self,
        devices: int | None,
        mesh: Mapping[str, int] | None,
        kind: str,
        name: str,
        world: str,
        strategy: str,
        exclusive: bool,
        like: Slice | None,
    ) -> Slice:
        """Asks for a slice."""
        sizes = dict(mesh) if mesh is not None else {"x": devices if devices is not None else 1}
        if not all(isinstance(axis, str) and type(size) is int for axis, size in sizes.items()):
            raise ConfigError(f"a mesh has axis names and whole numbers, found {sizes!r}")
        count = math.prod(sizes.values())
        if devices is not None and count != devices:
            raise ConfigError(f"mesh {sizes} has {count} devices, devices = {devices}")
        request = pb.RequestSlice(
            name=name,
            kind=kind,
            axes=list(sizes),
            sizes=list(sizes.values()),
            world=world,
            strategy=strategy,
            exclusive=exclusive,
            workers_of=like.name if like is not None else "",
        )
        message = self.stream.ask(pb.SessionRequest(slice=request)).slice
        grant = Grant(
            message.name,
            self.stream.session_id,
            tuple(message.axes),
            tuple(message.sizes),
            tuple((d.worker, d.local_id) for d in message.devices),
            tuple(w.name for w in message.workers),
            tuple(w.process_index for w in message.workers),
            world,
            message.platform,
            exclusive,
        )
        return Slice(self, grant, {w.name: w.data_addresses[0] for w in message.workers})

    def release_slice(self, slice_: Slice) -> None:
        """Gives a slice back."""
        self.stream.ask(pb.SessionRequest(release_slice=pb.ReleaseSlice(name=slice_.name)))

    # Objects

    def put(self, value: Any, slice_: Slice, spec: Any) -> Ref:
        """Brings arrays to a slice."""
        from waypath.controller.client import tracing

        where = "put"
        arrays, tree = tracing.flatten(value, where)
        if not arrays:
            raise GraphError("there is no array to put", where=where)
        wanted = tracing.specs(spec, tree, [array.shape for array in arrays], where)
        aval = tuple(Leaf(a.shape, a.dtype.name, s) for a, s in zip(arrays, wanted, strict=True))
        self._check_aval(aval, slice_, where)
        key = (slice_.name, aval)
        program = self._puts.get(key)
        if program is None:
            builder = ProgramBuilder("put")
            builder.output(
                builder.call(
                    "function", "put", on=Place(slice_.name), deadline_s=PUT_TIMEOUT_S, node_id="value", gives=aval
                )
            )
            program = self._puts[key] = builder.build()
        (ref,) = self.start(Template(program, (("value", slice_, aval, tree),)), {})
        self._data.push(ref.object_id, arrays, aval, slice_.grant, slice_.addresses)
        return ref

    def transfer(self, source: Ref | Symbol, slice_: Slice, spec: Any) -> Ref | Symbol:
        """The same arrays on another slice, or with other specs."""
        from waypath.controller.client import tracing

        if not isinstance(source, Ref | Symbol):
            raise GraphError(f"transfer: expected a ref, found {type(source).__name__}", remedy="client.put makes one")
        wanted = tracing.specs(spec, source.tree, [leaf.shape for leaf in source.aval], "transfer")
        gives = tuple(Leaf(leaf.shape, leaf.dtype, s) for leaf, s in zip(source.aval, wanted, strict=True))
        self._check_aval(gives, slice_, "transfer")
        if isinstance(source, Symbol):
            trace: Trace = source.trace
            handle = trace.builder.transfer(source.handle, on=Place(slice_.name), takes=source.aval, gives=gives)
            return trace.symbol(handle, slice_, gives, source.tree)
        self.check(source)
        builder = ProgramBuilder("transfer")
        given = builder.param("source", on=Place(source.slice.name), aval=source.aval)
        builder.output(builder.transfer(given, on=Place(slice_.name), takes=source.aval, gives=gives, node_id="value"))
        template = Template(builder.build(), (("value", slice_, gives, source.tree),))
        (ref,) = self.start(template, {"source": source})
        return ref

    def pull(self, ref: Ref, timeout_s: float | None) -> Any:
        """A ref's value."""
        from waypath.controller.client import tracing

        arrays = self._data.pull(
            ref.object_id, ref.aval, ref.slice.grant, ref.slice.addresses, timeout_s or DEFAULT_TIMEOUT_S
        )
        return tracing.unflatten(ref.tree, arrays)

    def delete(self, object_ids: Sequence[str]) -> None:
        """Frees objects."""
        self.stream.tell(pb.SessionRequest(delete=pb.DeleteObjects(object_ids=object_ids)))

    def check(self, ref: Ref) -> None:
        """Raises GraphError where a ref is of another session, or gone."""
        if ref._session is not self:
            raise GraphError(f"object {ref.object_id} belongs to another session: {ref._session.describe()}")
        ref.check()

    def describe(self) -> str:
        """Which session this is."""
        return self._stream.session_id if self._stream is not None else "one that is not open"

    @staticmethod
    def _check_aval(aval: Aval, slice_: Slice, where: str) -> None:
        if slice_.released:
            raise GraphError(f"slice {slice_.name} was released", where=where)
        for leaf in aval:
            check_leaf(leaf, slice_.grant, where)

    # Programs

    def upload(self, exported: Exported) -> None:
        """Hands in a function's bytes, once."""
        if exported.digest in self._uploaded:
            return

        def chunks(data: bytes) -> Any:
            yield pb.UploadChunk(digest=exported.digest)
            for start in range(0, len(data), CHUNK_BYTES):
                yield pb.UploadChunk(data=data[start : start + CHUNK_BYTES])

        stub = self._client.stub
        if not self._client.call(stub.Upload, chunks(b""), "ask for a function").known:
            self._client.call(stub.Upload, chunks(exported.data), "upload a function", timeout=DEFAULT_TIMEOUT_S)
        self._uploaded.add(exported.digest)

    def install(self, program: Program) -> None:
        """Installs a program, once; raises GraphError where it does not fit the cluster, or is too long for a message."""
        if program.program_id in self._installed:
            return
        text = json.dumps(program.to_json(), separators=(",", ":"))
        if len(text) > MAX_PROGRAM_BYTES:
            raise GraphError(
                f"{len(program.nodes):,} nodes are {len(text):,} bytes of JSON; at most {MAX_PROGRAM_BYTES:,} are one program",
                where=f"program {program.name}",
                remedy="Put loops inside a function, or run a shorter program several times",
            )
        self.stream.ask(pb.SessionRequest(install=pb.InstallProgram(program_json=text)))
        self._installed.add(program.program_id)

    def start(self, template: Template, bindings: Mapping[str, Ref]) -> list[Ref]:
        """Executes a program, which is installed if it is not yet; returns its outputs at once."""
        self.install(template.program)
        stream = self.stream
        self._sweep()
        execution_id = stream.new_execution_id()
        message = pb.Submit(
            execution_id=execution_id,
            program_id=template.program.program_id,
            bindings={name: ref.object_id for name, ref in bindings.items()},
        )
        pending: Pending = stream.submit(message)
        for name, to in template.donated:
            bindings[name].donated(f"{to} of execution {execution_id}")
        return [
            Ref(self, f"{execution_id}/{name}", slice_, aval, tree, pending)
            for name, slice_, aval, tree in template.outputs
        ]

    def _sweep(self) -> None:
        """Deletes what this program let go of, in batches."""
        if len(self.dropped) >= MAX_DROPPED:
            self.delete([self.dropped.popleft() for _ in range(len(self.dropped))])
