"""Programs from Python: a function over refs, traced into a graph that is installed once and executed by id.

Must not import jax. Called through `Client`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from waypath.controller.client.refs import Ref, Slice, Symbol
from waypath.controller.client.session import ClientSession
from waypath.controller.client.trace import Template, Trace
from waypath.controller.explain import table
from waypath.controller.graph import Program, ProgramBuilder
from waypath.controller.graph import Slice as Place
from waypath.controller.nodes import Aval
from waypath.controller.specs import device_bytes, nbytes
from waypath.proto.errors import GraphError


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
        rows = []
        total: dict[str, int] = {}
        moved = 0
        for name in (*program.by_param, *program.by_id):
            aval, place = program.aval_of(name), program.place_of(name)
            node = program.by_id.get(name)
            on_device = device_bytes(aval, slices[place.name].grant)
            total[place.name] = total.get(place.name, 0) + on_device
            what = "param" if node is None else node.kind
            text = "; ".join(map(str, aval)) or (f"{len(node.gives)} outputs" if node is not None else "")
            notes = [f"{on_device:,} B a device"]
            if node is not None and node.kind == "transfer":
                moved += nbytes(aval)
                notes.append(f"moves at most {nbytes(aval):,} B")
            if node is not None and node.donates:
                notes.append(f"consumes {', '.join(node.inputs[k] for k in node.donates)}")
            reads = ", ".join(node.inputs) if node is not None else ""
            rows.append((name, what, place.name, text, reads, ", ".join(notes)))
        lines += table(("node", "kind", "slice", "value", "reads", "bytes"), rows)
        for name, count in total.items():
            lines.append(f"slice {name} ({', '.join(slices[name].workers)}): at most {count:,} B a device")
        lines.append(f"moved between slices: at most {moved:,} B")
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
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(fun, item) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_map(fun, item) for item in value)
    if isinstance(value, dict):
        return {key: _map(fun, item) for key, item in value.items()}
    return fun(value)
