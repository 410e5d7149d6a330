"""Programs from Python: functions on slices, called one by one or traced into a program that is installed once.

Every call is a program. A function called on refs is a program of one node, named by its content, so that equal calls install it
once; inside a traced function the same call adds a node to the program being built. Must not import jax: tracing.py does,
loaded at the first use. Called through `Client`.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from waypath.controller.allocation import Grant
from waypath.controller.client.refs import Ref, Slice, Symbol
from waypath.controller.client.stream import Pending, SessionStream
from waypath.controller.client.transport import DEFAULT_TIMEOUT_S, DataRoad
from waypath.controller.graph import Handle, Program, ProgramBuilder
from waypath.controller.graph import Slice as Place
from waypath.controller.nodes import Aval, Leaf
from waypath.controller.specs import check_leaf, device_bytes, nbytes
from waypath.proto import client_pb2 as pb
from waypath.proto.codecs import dump_json
from waypath.proto.errors import ConfigError, GraphError

if TYPE_CHECKING:
    from waypath.controller.client.client import Client
    from waypath.controller.client.tracing import Exported

MAX_PROGRAM_BYTES = 7 << 20
CHUNK_BYTES = 1 << 20
PUT_TIMEOUT_S = 300.0
FUNCTION_TIMEOUT_S = 1800.0
"""A call's deadline counts from its dispatch and covers its compilation and what is ahead of it; a collective that its peers
never enter ends with it.
"""
MAX_DROPPED = 64


@dataclass
class _Template:
    """An installed program: what each output is."""

    program: Program
    outputs: tuple[tuple[str, Slice, Aval, Any], ...]
    donated: tuple[tuple[str, str], ...] = ()
    result: Any = None


class Programs:
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
        count = functools.reduce(lambda a, b: a * b, sizes.values(), 1)
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
        (ref,) = self._start(_Template(program, (("value", slice_, aval, tree),)), {})
        self._data.push(ref.object_id, arrays, aval, slice_.grant, slice_.addresses)
        return ref

    def transfer(self, source: Ref | Symbol, slice_: Slice, spec: Any) -> Ref | Symbol:
        """The same arrays on another slice, or with other specs."""
        from waypath.controller.client import tracing

        wanted = tracing.specs(spec, source.tree, [leaf.shape for leaf in source.aval], "transfer")
        gives = tuple(Leaf(leaf.shape, leaf.dtype, s) for leaf, s in zip(source.aval, wanted, strict=True))
        self._check_aval(gives, slice_, "transfer")
        if isinstance(source, Symbol):
            trace: _Trace = source.trace
            handle = trace.builder.transfer(source.handle, on=Place(slice_.name), takes=source.aval, gives=gives)
            return Symbol(trace, handle, slice_, gives, source.tree)
        self.check(source)
        builder = ProgramBuilder("transfer")
        given = builder.param("source", on=Place(source.slice.name), aval=source.aval)
        builder.output(builder.transfer(given, on=Place(slice_.name), takes=source.aval, gives=gives, node_id="value"))
        template = _Template(builder.build(), (("value", slice_, gives, source.tree),))
        (ref,) = self._start(template, {"source": source})
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
        if ref._programs is not self:
            raise GraphError(f"object {ref.object_id} belongs to another session: {ref._programs.describe()}")
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

    def start(
        self, template: _Template, bindings: Mapping[str, Ref], args: Mapping[str, Any] | None = None
    ) -> list[Ref]:
        """Executes an installed program; returns its outputs."""
        return self._start(template, bindings, args)

    def _start(
        self, template: _Template, bindings: Mapping[str, Ref], args: Mapping[str, Any] | None = None
    ) -> list[Ref]:
        self.install(template.program)
        stream = self.stream
        self._sweep()
        execution_id = stream.new_execution_id()
        message = pb.Submit(
            execution_id=execution_id,
            program_id=template.program.program_id,
            args_json=dump_json(dict(args)) if args else "",
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


class Function:
    """A JAX function on a slice. Call it on refs, or on arrays (which are put first); returns refs at once."""

    def __init__(
        self,
        programs: Programs,
        fun: Callable[..., Any],
        slice_: Slice,
        in_specs: Any,
        out_specs: Any,
        donate: Sequence[int],
        name: str,
        debug_nans: bool,
        deadline_s: float,
    ) -> None:
        self._deadline_s = deadline_s
        self._programs = programs
        self._fun = fun
        self.slice = slice_
        self._in_specs = in_specs
        self._out_specs = out_specs
        self._donate = tuple(donate)
        self.name = name or getattr(fun, "__name__", "function").strip("<>")
        self._debug_nans = debug_nans
        self._exported: dict[tuple[Any, ...], Exported] = {}
        self._templates: dict[tuple[Any, ...], _Template] = {}

    def __call__(self, *args: Any) -> Any:
        """One ref, or a tuple of refs where the function returns a tuple.

        Raises GraphError on arguments of other shapes, dtypes, specs or slices than the function takes, before anything is sent;
        what the function raises while it is traced passes as it is.
        """
        trace = next((arg.trace for arg in args if isinstance(arg, Symbol)), None) or _Trace.current()
        if any(not 0 <= k < len(args) for k in self._donate):
            raise GraphError(f"donate {list(self._donate)} of {len(args)} arguments", where=f"function {self.name}")
        held = [self._argument(k, arg, trace) for k, arg in enumerate(args)]
        exported = self._export(held)
        if trace is not None:
            handles = self._node(trace.builder, [arg.handle for arg in held], held, exported)
            trace.functions.append(exported)
            made: list[Any] = [
                Symbol(trace, handle, self.slice, aval, tree)
                for handle, (aval, tree) in zip(handles, exported.outputs, strict=True)
            ]
        else:
            made = list(self._run(held, exported))
        return tuple(made) if exported.is_tuple else made[0]

    def _argument(self, position: int, arg: Any, trace: _Trace | None) -> Any:
        where = f"function {self.name}, argument {position}"
        if trace is not None:
            if not isinstance(arg, Symbol):
                raise GraphError(
                    f"expected an object of the program being traced, found {type(arg).__name__}", where=where
                )
            if arg.trace is not trace:
                raise GraphError(f"{arg} belongs to another trace", where=where)
        elif not isinstance(arg, Ref):
            arg = self._programs.put(arg, self.slice, self._spec(position))
        else:
            self._programs.check(arg)
        if arg.slice is not self.slice and arg.slice.name != self.slice.name:
            raise GraphError(
                f"{arg!r} lies on slice {arg.slice.name}, the function runs on {self.slice.name}",
                where=where,
                remedy="Bring it there with client.transfer",
            )
        from waypath.controller.client import tracing

        wanted = tracing.specs(self._spec(position), arg.tree, [leaf.shape for leaf in arg.aval], where)
        for leaf, spec in zip(arg.aval, wanted, strict=True):
            check_leaf(Leaf(leaf.shape, leaf.dtype, spec), self.slice.grant, where)
            if leaf.spec != spec:
                raise GraphError(
                    f"expected {Leaf(leaf.shape, leaf.dtype, spec)}, found {leaf}",
                    where=where,
                    remedy="client.transfer brings it to another spec",
                )
        return arg

    def _spec(self, position: int) -> Any:
        if isinstance(self._in_specs, tuple):
            if position >= len(self._in_specs):
                raise GraphError(
                    f"in_specs has {len(self._in_specs)} entries, argument {position} none",
                    where=f"function {self.name}",
                )
            return self._in_specs[position]
        return self._in_specs

    def _export(self, held: Sequence[Any]) -> Exported:
        from waypath.controller.client import tracing

        key = tuple((arg.aval, arg.tree) for arg in held)
        exported = self._exported.get(key)
        if exported is None:
            grant = self.slice.grant
            exported = self._exported[key] = tracing.export_function(
                self._fun,
                [(arg.aval, arg.tree) for arg in held],
                self._out_specs,
                grant.axes,
                grant.sizes,
                grant.platform,
                f"function {self.name}",
            )
            for aval, _ in exported.outputs:
                for leaf in aval:
                    check_leaf(leaf, grant, f"function {self.name}, output")
            self._programs.upload(exported)
        return exported

    def _node(
        self, builder: ProgramBuilder, handles: Sequence[Handle], held: Sequence[Any], exported: Exported
    ) -> tuple[Handle, ...]:
        return builder.function(
            exported.digest,
            *handles,
            on=Place(self.slice.name),
            takes=[arg.aval for arg in held],
            gives=[aval for aval, _ in exported.outputs],
            donates=self._donate,
            options={"debug_nans": True} if self._debug_nans else None,
            deadline_s=self._deadline_s,
            name=self.name,
        )

    def _run(self, held: Sequence[Ref], exported: Exported) -> list[Ref]:
        names = {ref.object_id: f"x{k}" for k, ref in reversed(list(enumerate(held)))}
        key = (tuple(names[ref.object_id] for ref in held), exported.digest)
        template = self._templates.get(key)
        if template is None:
            builder = ProgramBuilder(self.name)
            params = {names[ref.object_id]: ref for ref in held}
            handles = {
                name: builder.param(name, on=Place(self.slice.name), aval=ref.aval) for name, ref in params.items()
            }
            outputs = self._node(builder, [handles[names[ref.object_id]] for ref in held], held, exported)
            for output in outputs:
                builder.output(output)
            template = self._templates[key] = _Template(
                builder.build(),
                tuple(
                    (handle.node_id, self.slice, aval, tree)
                    for handle, (aval, tree) in zip(outputs, exported.outputs, strict=True)
                ),
                tuple((names[held[k].object_id], f"function {self.name}") for k in self._donate),
            )
        return self._programs.start(template, {names[ref.object_id]: ref for ref in held})


@dataclass
class _Trace:
    """A program being built by calls."""

    builder: ProgramBuilder
    functions: list[Exported] = field(default_factory=list)

    _stack = threading.local()

    @classmethod
    def current(cls) -> _Trace | None:
        """The innermost trace of this thread."""
        stack = getattr(cls._stack, "traces", [])
        return stack[-1] if stack else None

    def __enter__(self) -> _Trace:
        self._stack.traces = [*getattr(self._stack, "traces", []), self]
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.traces = self._stack.traces[:-1]


class TracedProgram:
    """A Python function over refs as a program: traced and installed at the first call with arguments of a kind, executed by
    id afterwards. Loops unroll. It returns a ref, or a tuple, list or dict of them.
    """

    def __init__(self, programs: Programs, fun: Callable[..., Any], name: str) -> None:
        self._programs = programs
        self._fun = fun
        self.name = name or getattr(fun, "__name__", "program").strip("<>")
        self._templates: dict[tuple[Any, ...], _Template] = {}

    def __call__(self, *args: Ref) -> Any:
        """Starts an execution; returns at once."""
        template = self._template(args)
        for ref in args:
            self._programs.check(ref)
        refs = self._programs.start(template, {f"x{k}": ref for k, ref in enumerate(args)})
        by_name = {name: ref for (name, *_), ref in zip(template.outputs, refs, strict=True)}
        return _map(lambda symbol: by_name[symbol.handle.node_id], template.result)

    def program(self, *args: Ref) -> Program:
        """The program for arguments like these, not yet installed."""
        return self._template(args).program

    def explain(self, *args: Ref) -> str:
        """Nodes, shapes, shardings, places, and the bytes that each takes on a device or moves."""
        template = self._template(args)
        program = template.program
        slices = {ref.slice.name: ref.slice for ref in args} | {s.name: s for _, s, _, _ in template.outputs}
        for symbol_slice in self._slices:
            slices.setdefault(symbol_slice.name, symbol_slice)
        lines = [f"program {program.program_id}: {len(program.nodes)} nodes, {len(program.params)} parameters"]
        total: dict[str, int] = {}
        moved = 0
        for name in (*program.by_param, *program.by_id):
            aval, place = program.aval_of(name), program.place_of(name)
            node = program.by_id.get(name)
            grant = slices[place.name].grant if place.name in slices else None
            on_device = device_bytes(aval, grant) if grant is not None and aval else 0
            total[place.name] = total.get(place.name, 0) + on_device
            what = "param" if node is None else node.kind
            text = "; ".join(map(str, aval)) or (f"{len(node.gives)} outputs" if node is not None else "")
            inputs = f" ← {', '.join(node.inputs)}" if node is not None and node.inputs else ""
            line = f"  {name:<20} {what:<9} {place.name:<16} {text}{inputs}  {on_device:,} B a device"
            if node is not None and node.kind == "transfer":
                moved += nbytes(aval)
                line += f", moves at most {nbytes(aval):,} B"
            if node is not None and node.donates:
                line += f", consumes {', '.join(node.inputs[k] for k in node.donates)}"
            lines.append(line)
        for name, count in total.items():
            workers = ", ".join(slices[name].workers) if name in slices else "?"
            lines.append(f"  slice {name} ({workers}): at most {count:,} B a device")
        lines.append(f"  moved between slices: at most {moved:,} B")
        return "\n".join(lines)

    def _template(self, args: Sequence[Ref]) -> _Template:
        for position, ref in enumerate(args):
            if not isinstance(ref, Ref):
                raise GraphError(
                    f"argument {position}: expected a ref, found {type(ref).__name__}", where=f"program {self.name}"
                )
        if len({ref.object_id for ref in args}) < len(args):
            raise GraphError("an object is passed twice", where=f"program {self.name}")
        key = tuple((ref.slice.name, ref.aval, ref.tree) for ref in args)
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = self._trace(args)
        return template

    def _trace(self, args: Sequence[Ref]) -> _Template:
        builder = ProgramBuilder(self.name)
        with _Trace(builder) as trace:
            symbols = [
                Symbol(
                    trace,
                    builder.param(f"x{k}", on=Place(ref.slice.name), aval=ref.aval),
                    ref.slice,
                    ref.aval,
                    ref.tree,
                )
                for k, ref in enumerate(args)
            ]
            result = self._fun(*symbols)
        outputs: dict[str, tuple[str, Slice, Aval, Any]] = {}

        def note(symbol: Any) -> Any:
            if not isinstance(symbol, Symbol) or symbol.trace is not trace:
                raise GraphError(
                    f"returns {type(symbol).__name__}, expected objects of this program", where=f"program {self.name}"
                )
            builder.output(symbol.handle)
            outputs[symbol.handle.node_id] = (symbol.handle.node_id, symbol.slice, symbol.aval, symbol.tree)
            return symbol

        _map(note, result)
        program = builder.build()
        self._slices = [symbol[1] for symbol in outputs.values()]
        donated = [
            (node.inputs[k], f"node {node.node_id}")
            for node in program.nodes
            for k in node.donates
            if node.inputs[k] in program.by_param
        ]
        return _Template(program, tuple(outputs.values()), tuple(donated), result)

    _slices: Sequence[Slice] = ()


def _map(fun: Callable[[Any], Any], value: Any) -> Any:
    """`fun` on everything in nested tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        return type(value)(_map(fun, item) for item in value)
    if isinstance(value, dict):
        return {key: _map(fun, item) for key, item in value.items()}
    return fun(value)
