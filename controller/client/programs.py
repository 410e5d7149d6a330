"""Programs from Python: functions on slices, called one by one or traced into a program that is installed once.

Every call is a program. A function called on refs is a program of one node, named by its content, so that equal calls install it
once; inside a traced function the same call adds a node to the program being built. Must not import jax: tracing.py does,
loaded at the first use. Called through `Client`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from waypath.controller.client.refs import Ref, Slice, Symbol
from waypath.controller.client.session import ClientSession
from waypath.controller.client.trace import Template, Trace
from waypath.controller.graph import Handle, Program, ProgramBuilder
from waypath.controller.graph import Slice as Place
from waypath.controller.nodes import Aval, Leaf
from waypath.controller.specs import check_leaf, device_bytes, nbytes
from waypath.proto.errors import GraphError

if TYPE_CHECKING:
    from waypath.controller.client.tracing import Exported

FUNCTION_TIMEOUT_S = 1800.0
"""A call's deadline counts from its dispatch and covers its compilation and what is ahead of it; a collective that its peers
never enter ends with it.
"""


class Function:
    """A JAX function on a slice. Call it on refs, or on arrays (which are put first); returns refs at once."""

    def __init__(
        self,
        session: ClientSession,
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
        self._session = session
        self._fun = fun
        self.slice = slice_
        self._in_specs = in_specs
        self._out_specs = out_specs
        self._donate = tuple(donate)
        self.name = name or getattr(fun, "__name__", "function").strip("<>")
        self._debug_nans = debug_nans
        self._exported: dict[tuple[Any, ...], Exported] = {}
        self._templates: dict[tuple[Any, ...], Template] = {}

    def __call__(self, *args: Any) -> Any:
        """One ref, or a tuple of refs where the function returns a tuple.

        Raises GraphError on arguments of other shapes, dtypes, specs or slices than the function takes, before anything is sent;
        what the function raises while it is traced passes as it is.
        """
        trace = next((arg.trace for arg in args if isinstance(arg, Symbol)), None) or Trace.current()
        if any(not 0 <= k < len(args) for k in self._donate):
            raise GraphError(f"donate {list(self._donate)} of {len(args)} arguments", where=f"function {self.name}")
        held = [self._argument(k, arg, trace) for k, arg in enumerate(args)]
        exported = self._export(held)
        if trace is not None:
            handles = self._node(trace.builder, [arg.handle for arg in held], held, exported)
            made: list[Any] = [
                trace.symbol(handle, self.slice, aval, tree)
                for handle, (aval, tree) in zip(handles, exported.outputs, strict=True)
            ]
        else:
            made = list(self._run(held, exported))
        return tuple(made) if exported.is_tuple else made[0]

    def _argument(self, position: int, arg: Any, trace: Trace | None) -> Any:
        where = f"function {self.name}, argument {position}"
        if trace is not None:
            if not isinstance(arg, Symbol):
                raise GraphError(
                    f"expected an object of the program being traced, found {type(arg).__name__}", where=where
                )
            if arg.trace is not trace:
                raise GraphError(f"{arg} belongs to another trace", where=where)
        elif not isinstance(arg, Ref):
            arg = self._session.put(arg, self.slice, self._spec(position))
        else:
            self._session.check(arg)
        if arg.slice.name != self.slice.name:
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
            self._session.upload(exported)
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
            handles = {
                oid: builder.param(name, on=Place(self.slice.name), aval=ref.aval)
                for oid, (name, ref) in {ref.object_id: (names[ref.object_id], ref) for ref in held}.items()
            }
            outputs = self._node(builder, [handles[ref.object_id] for ref in held], held, exported)
            for output in outputs:
                builder.output(output)
            template = self._templates[key] = Template(
                builder.build(),
                tuple(
                    (handle.node_id, self.slice, aval, tree)
                    for handle, (aval, tree) in zip(outputs, exported.outputs, strict=True)
                ),
                tuple((names[held[k].object_id], f"function {self.name}") for k in self._donate),
            )
        return self._session.start(template, {names[ref.object_id]: ref for ref in held})


class TracedProgram:
    """A Python function over refs as a program: traced and installed at the first call with arguments of a kind, executed by
    id afterwards. Loops unroll. It returns a ref, or a tuple, list or dict of them.
    """

    def __init__(self, session: ClientSession, fun: Callable[..., Any], name: str) -> None:
        self._session = session
        self._fun = fun
        self.name = name or getattr(fun, "__name__", "program").strip("<>")
        self._templates: dict[tuple[Any, ...], Template] = {}

    def __call__(self, *args: Ref) -> Any:
        """Starts an execution; returns at once."""
        template = self._template(args)
        for ref in args:
            self._session.check(ref)
        refs = self._session.start(template, {f"x{k}": ref for k, ref in enumerate(args)})
        by_name = {name: ref for (name, *_), ref in zip(template.outputs, refs, strict=True)}
        return _map(lambda symbol: by_name[symbol.handle.node_id], template.result)

    def program(self, *args: Ref) -> Program:
        """The program for arguments like these, not yet installed."""
        return self._template(args).program

    def explain(self, *args: Ref) -> str:
        """Nodes, shapes, shardings, places, and the bytes that each takes on a device or moves."""
        template = self._template(args)
        program = template.program
        slices = {slice_.name: slice_ for slice_ in template.slices}
        lines = [f"program {program.program_id}: {len(program.nodes)} nodes, {len(program.params)} parameters"]
        total: dict[str, int] = {}
        moved = 0
        for name in (*program.by_param, *program.by_id):
            aval, place = program.aval_of(name), program.place_of(name)
            node = program.by_id.get(name)
            on_device = device_bytes(aval, slices[place.name].grant)
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
            lines.append(f"  slice {name} ({', '.join(slices[name].workers)}): at most {count:,} B a device")
        lines.append(f"  moved between slices: at most {moved:,} B")
        return "\n".join(lines)

    def _template(self, args: Sequence[Ref]) -> Template:
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

    def _trace(self, args: Sequence[Ref]) -> Template:
        builder = ProgramBuilder(self.name)
        with Trace(builder) as trace:
            symbols = [
                trace.symbol(
                    builder.param(f"x{k}", on=Place(ref.slice.name), aval=ref.aval), ref.slice, ref.aval, ref.tree
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
        donated = [
            (node.inputs[k], f"node {node.node_id}")
            for node in program.nodes
            for k in node.donates
            if node.inputs[k] in program.by_param
        ]
        return Template(program, tuple(outputs.values()), tuple(donated), result, tuple(trace.slices.values()))


def _map(fun: Callable[[Any], Any], value: Any) -> Any:
    """`fun` on everything in nested tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        return type(value)(_map(fun, item) for item in value)
    if isinstance(value, dict):
        return {key: _map(fun, item) for key, item in value.items()}
    return fun(value)
