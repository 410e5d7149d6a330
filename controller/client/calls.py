"""What a client can call on a slice: a JAX function of its own, a function or a service's method that workers know by name.

Every call is a program. Called on refs it is a program of one node, named by its content, so that equal calls install it once;
inside a traced function the same call adds a node to the program being built. Must not import jax: tracing.py does, loaded at the
first use. Called through `Client`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from waypath.controller.client.refs import Ref, Slice, Symbol
from waypath.controller.client.session import ClientSession
from waypath.controller.client.trace import Template, Trace
from waypath.controller.graph import Handle, ProgramBuilder
from waypath.controller.graph import Slice as Place
from waypath.controller.nodes import Aval, Leaf, dump_options
from waypath.controller.specs import check_leaf, device_bytes
from waypath.proto.errors import GraphError
from waypath.proto.names import REGISTERED

CALL_DEADLINE_S = 1800.0
"""A call's deadline counts from its dispatch and covers its compilation and what is ahead of it; a collective that its peers
never enter ends with it.
"""

AS_IT_IS = object()
"""In the place of a spec: the argument may be split in any way."""


@dataclass(frozen=True)
class Outputs:
    """What a call gives: (aval, tree) of each output, one of them or a tuple; `key` tells calls of one kind apart."""

    outputs: tuple[tuple[Aval, Any], ...]
    is_tuple: bool
    key: str


class AddNode(Protocol):
    """Adds a call's node to a program; returns a handle an output."""

    def __call__(
        self, builder: ProgramBuilder, handles: Sequence[Handle], takes: Sequence[Aval], /
    ) -> Sequence[Handle]: ...


class SliceCall:
    """The part that all calls share: arguments checked, a node added or a program of one node run."""

    def __init__(
        self, session: ClientSession, slice_: Slice, what: str, name: str, in_specs: Any, donate: Sequence[int] | int
    ) -> None:
        if not isinstance(slice_, Slice):
            raise GraphError(f"expected a slice, found {type(slice_).__name__}", where=f"{what} {name}")
        self._session = session
        self.slice = slice_
        self.name = name
        self._what = f"{what} {name}"
        self._in_specs = in_specs
        self._donate = (donate,) if isinstance(donate, int) else tuple(donate)
        self._templates: dict[tuple[Any, ...], Template] = {}

    def _hold(self, args: Sequence[Any]) -> tuple[Trace | None, list[Any]]:
        """The trace that a call belongs to, if any, and its arguments as refs, or as objects of that trace."""
        trace = Trace.current()
        stale = next((arg for arg in args if isinstance(arg, Symbol) and trace is None), None)
        if stale is not None:
            raise GraphError(f"{stale} belongs to a program whose tracing has ended", where=self._what)
        if any(not 0 <= k < len(args) for k in self._donate):
            raise GraphError(f"donate {list(self._donate)} of {len(args)} arguments", where=self._what)
        return trace, [self._argument(k, arg, trace) for k, arg in enumerate(args)]

    def _finish(self, trace: Trace | None, held: Sequence[Any], given: Outputs, add: AddNode) -> Any:
        """Adds the node to the trace, or runs it; one ref or a tuple of them."""
        made: list[Any]
        self._check_donated(held, given)
        if trace is None:
            made = list(self._run(held, given, add))
        else:
            handles = add(trace.builder, [arg.handle for arg in held], [arg.aval for arg in held])
            made = [
                trace.symbol(handle, self.slice, aval, tree)
                for handle, (aval, tree) in zip(handles, given.outputs, strict=True)
            ]
        return tuple(made) if given.is_tuple else made[0]

    def _argument(self, position: int, arg: Any, trace: Trace | None) -> Any:
        where = f"{self._what}, argument {position}"
        spec = self._spec(position)
        if trace is not None:
            if not isinstance(arg, Symbol):
                raise GraphError(
                    f"expected an object of the program being traced, found {type(arg).__name__}", where=where
                )
            if arg.trace is not trace:
                raise GraphError(f"{arg} belongs to another trace", where=where)
        elif not isinstance(arg, Ref):
            arg = self._session.put(arg, self.slice, None if spec is AS_IT_IS else spec)
        else:
            self._session.check(arg)
        if arg.slice.name != self.slice.name:
            raise GraphError(
                f"{arg!r} lies on slice {arg.slice.name}, the call runs on {self.slice.name}",
                where=where,
                remedy="Bring it there with client.transfer",
            )
        if spec is AS_IT_IS:
            return arg
        from waypath.controller.client import tracing

        wanted = tracing.specs(spec, arg.tree, [leaf.shape for leaf in arg.aval], where)
        for leaf, one in zip(arg.aval, wanted, strict=True):
            check_leaf(Leaf(leaf.shape, leaf.dtype, one), self.slice.grant, where)
            if leaf.spec != one:
                raise GraphError(
                    f"expected {Leaf(leaf.shape, leaf.dtype, one)}, found {leaf}",
                    where=where,
                    remedy="client.transfer brings it to another spec",
                )
        return arg

    def _spec(self, position: int) -> Any:
        if isinstance(self._in_specs, tuple):
            if position >= len(self._in_specs):
                raise GraphError(
                    f"in_specs has {len(self._in_specs)} entries, argument {position} none", where=self._what
                )
            return self._in_specs[position]
        return self._in_specs

    def _check_donated(self, held: Sequence[Any], given: Outputs) -> None:
        """An array can only become one of its own size; what cannot is found here, and not by XLA on all workers."""
        if not self._donate:
            return
        grant = self.slice.grant
        free = Counter(device_bytes((leaf,), grant) for aval, _ in given.outputs for leaf in aval)
        for k in self._donate:
            for leaf in held[k].aval:
                size = device_bytes((leaf,), grant)
                if not free[size]:
                    raise GraphError(
                        f"argument {k} cannot be donated: no output is left that has the {size:,} bytes a device of {leaf}",
                        where=self._what,
                    )
                free[size] -= 1

    def _check_outputs(self, outputs: Sequence[tuple[Aval, Any]]) -> None:
        for aval, _ in outputs:
            for leaf in aval:
                check_leaf(leaf, self.slice.grant, f"{self._what}, output")

    def _run(self, held: Sequence[Ref], given: Outputs, add: AddNode) -> list[Ref]:
        names = {ref.object_id: f"x{k}" for k, ref in reversed(list(enumerate(held)))}
        key = (tuple((names[ref.object_id], ref.aval) for ref in held), given.key)
        template = self._templates.get(key)
        if template is None:
            builder = ProgramBuilder(self.name)
            avals = {ref.object_id: ref.aval for ref in held}
            handles = {
                oid: builder.param(names[oid], on=Place(self.slice.name), aval=aval) for oid, aval in avals.items()
            }
            outputs = add(builder, [handles[ref.object_id] for ref in held], [ref.aval for ref in held])
            for output in outputs:
                builder.output(output)
            template = self._templates[key] = Template(
                builder.build(),
                tuple(
                    (handle.node_id, self.slice, aval, tree)
                    for handle, (aval, tree) in zip(outputs, given.outputs, strict=True)
                ),
                tuple((names[held[k].object_id], self._what) for k in self._donate),
            )
        return self._session.start(template, {names[ref.object_id]: ref for ref in held})


class Function(SliceCall):
    """A JAX function on a slice. Call it on refs, or on arrays (which are put first); returns refs at once."""

    def __init__(
        self,
        session: ClientSession,
        fun: Callable[..., Any],
        slice_: Slice,
        in_specs: Any,
        out_specs: Any,
        donate: Sequence[int] | int,
        name: str,
        debug_nans: bool,
        deadline_s: float,
    ) -> None:
        name = name or getattr(fun, "__name__", "function").strip("<>")
        super().__init__(session, slice_, "function", name, in_specs, donate)
        self._fun = fun
        self._out_specs = out_specs
        self._options = {"debug_nans": True} if debug_nans else None
        self._deadline_s = deadline_s
        self._exported: dict[tuple[Any, ...], Outputs] = {}

    def __call__(self, *args: Any) -> Any:
        """One ref, or a tuple of refs where the function returns a tuple.

        Raises GraphError on arguments of other shapes, dtypes, specs or slices than the function takes, before anything is sent;
        what the function raises while it is traced passes as it is.
        """
        trace, held = self._hold(args)
        given = self._export(held)

        def add(builder: ProgramBuilder, handles: Sequence[Handle], takes: Sequence[Aval]) -> Sequence[Handle]:
            return builder.function(
                given.key,
                *handles,
                on=Place(self.slice.name),
                takes=takes,
                gives=[aval for aval, _ in given.outputs],
                donates=self._donate,
                options=self._options,
                deadline_s=self._deadline_s,
                name=self.name,
            )

        return self._finish(trace, held, given, add)

    def _export(self, held: Sequence[Any]) -> Outputs:
        from waypath.controller.client import tracing

        key = tuple((arg.aval, arg.tree) for arg in held)
        given = self._exported.get(key)
        if given is None:
            grant = self.slice.grant
            exported = tracing.export_function(
                self._fun,
                key,
                self._out_specs,
                grant.axes,
                grant.sizes,
                grant.platform,
                self._what,
                self._check_outputs,
            )
            self._session.upload(exported)
            given = self._exported[key] = Outputs(exported.outputs, exported.is_tuple, exported.digest)
        return given


class RegisteredFunction(SliceCall):
    """A pure JAX function that the slice's workers know by name. Call it on refs or arrays, with its options by name."""

    def __init__(
        self,
        session: ClientSession,
        name: str,
        slice_: Slice,
        gives: Any,
        in_specs: Any,
        out_specs: Any,
        donate: Sequence[int] | int,
        deadline_s: float,
    ) -> None:
        from waypath.controller.client import tracing

        super().__init__(session, slice_, "function", name, in_specs, donate)
        self._outputs = tracing.promised(gives, out_specs, self._what)
        self._is_tuple = isinstance(gives, tuple)
        self._check_outputs(self._outputs)
        self._deadline_s = deadline_s

    def __call__(self, *args: Any, **options: Any) -> Any:
        """One ref, or a tuple of refs where `gives` is one. Raises GraphError on wrong arguments or options."""
        trace, held = self._hold(args)

        def add(builder: ProgramBuilder, handles: Sequence[Handle], takes: Sequence[Aval]) -> Sequence[Handle]:
            return builder.function(
                f"{REGISTERED}{self.name}",
                *handles,
                on=Place(self.slice.name),
                takes=takes,
                gives=[aval for aval, _ in self._outputs],
                donates=self._donate,
                options={"options": options} if options else None,
                deadline_s=self._deadline_s,
                name=self.name,
            )

        given = Outputs(self._outputs, self._is_tuple, dump_options(self.name, options))
        return self._finish(trace, held, given, add)


class Method(SliceCall):
    """A method of a service on the slice's workers, which all run it. Call it on refs or arrays, with its options by name."""

    def __init__(
        self,
        session: ClientSession,
        service: str,
        method: str,
        slice_: Slice,
        gives: Any,
        in_specs: Any,
        out_specs: Any,
        deadline_s: float,
    ) -> None:
        from waypath.controller.client import tracing

        super().__init__(session, slice_, "method", f"{service}.{method}", in_specs, ())
        self._service, self._method = service, method
        self._output = tracing.promised_one(gives, out_specs, self._what)
        self._check_outputs([self._output])
        self._deadline_s = deadline_s

    def __call__(self, *args: Any, **options: Any) -> Any:
        """A ref; what the method reports is in its `reports()`. Raises GraphError on wrong arguments or options."""
        trace, held = self._hold(args)

        def add(builder: ProgramBuilder, handles: Sequence[Handle], takes: Sequence[Aval]) -> Sequence[Handle]:
            handle = builder.call(
                self._service,
                self._method,
                *handles,
                on=Place(self.slice.name),
                options=options,
                deadline_s=self._deadline_s,
                takes=takes,
                gives=self._output[0],
            )
            return (handle,)

        given = Outputs((self._output,), False, dump_options(self.name, options))
        return self._finish(trace, held, given, add)


class Service:
    """A service of the slice's workers, by name: state that lives there, one instance a worker. Methods are called like functions."""

    def __init__(self, session: ClientSession, name: str, slice_: Slice) -> None:
        self._session = session
        self.name = name
        self.slice = slice_

    def method(
        self,
        name: str,
        gives: Any = None,
        in_specs: Any = AS_IT_IS,
        out_specs: Any = None,
        *,
        deadline_s: float = CALL_DEADLINE_S,
    ) -> Method:
        """A method. `gives`: the tree of arrays that it returns (anything with shape and dtype), split by `out_specs`; None: nothing."""
        return Method(self._session, self.name, name, self.slice, gives, in_specs, out_specs, deadline_s)
