"""Slices and refs: what a client holds of the cluster.

A ref names an object that workers hold, or will: it exists as soon as the call that makes it returns. Must not know jax; trees
are opaque. Made by session.py and programs.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from waypath.controller.allocation import Grant
from waypath.controller.checks import described
from waypath.controller.client.transport import check_size
from waypath.controller.client.waiting import in_thread
from waypath.controller.nodes import Aval
from waypath.proto.errors import GraphError

if TYPE_CHECKING:
    from waypath.controller.client.session import ClientSession
    from waypath.controller.client.stream import Pending


class Slice:
    """A named mesh of devices that belongs to this session. `release` it, or use it as a context manager."""

    def __init__(self, session: ClientSession, grant: Grant, addresses: Mapping[str, str]) -> None:
        self._session = session
        self.grant = grant
        self.addresses = dict(addresses)
        self.released = False

    @property
    def name(self) -> str:
        """Its name in the cluster."""
        return self.grant.name

    @property
    def mesh(self) -> dict[str, int]:
        """Axis → size."""
        return dict(zip(self.grant.axes, self.grant.sizes, strict=True))

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers whose devices it has, in process order."""
        return self.grant.workers

    @property
    def abstract_mesh(self) -> Any:
        """Its `jax.sharding.AbstractMesh`, for shard_map inside functions."""
        from waypath.controller.client import tracing

        return tracing.abstract_mesh(self.grant.axes, self.grant.sizes)

    def release(self) -> None:
        """Gives the devices back; executions on them are cancelled, objects there are lost."""
        if not self.released:
            self.released = True
            self._session.release_slice(self)

    def __enter__(self) -> Slice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Slice({self.name!r}, mesh={self.mesh}, workers={list(self.workers)})"


class Ref:
    """An object on a slice: a tree of arrays whose shapes are known and whose values are with the workers.

    It is deleted when nobody in this program holds it any more, or by `delete`.
    """

    def __init__(
        self, session: ClientSession, object_id: str, slice_: Slice, aval: Aval, tree: Any, pending: Pending
    ) -> None:
        self._session = session
        self.object_id = object_id
        self.slice = slice_
        self.aval = aval
        self.tree = tree
        self._pending = pending
        self._gone = ""
        self._finalizer = weakref.finalize(self, session.dropped.append, object_id)

    def wait(self, timeout_s: float | None = None) -> Ref:
        """Returns when the value is there. Raises what kept it from being computed, with the worker's traceback as
        `remote_traceback`, or DeadlineError.
        """
        self._pending.wait(timeout_s)
        return self

    def result(self, timeout_s: float | None = None) -> Any:
        """The value, as numpy arrays in the tree that was put or returned; pulled from the workers, each box once.

        Raises as `wait`; GraphError over `transport.MAX_RESULT_BYTES`, or where the object was deleted or donated.
        """
        self.check()
        check_size(self.object_id, self.aval)
        self.wait(timeout_s)
        return self._session.pull(self, timeout_s)

    def __await__(self) -> Generator[Any, None, Any]:
        """`await ref` is its `result()`, without blocking the loop."""
        return in_thread(self.result).__await__()

    def reports(self) -> dict[str, dict[str, Any]]:
        """What the nodes of the execution reported, by node and worker, once it is done."""
        self.wait()
        return self._pending.results

    def delete(self) -> None:
        """Frees the object, after those that read it already."""
        if self._finalizer.detach() is not None and not self._gone:
            self._gone = "was deleted"
            self._session.delete([self.object_id])

    def check(self) -> None:
        """Raises GraphError where nothing may read the object any more."""
        if self._gone:
            raise GraphError(f"object {self.object_id} {self._gone}")
        if self.slice.released:
            raise GraphError(f"object {self.object_id} was lost with slice {self.slice.name}")

    def donated(self, to: str) -> None:
        """Somebody consumes it."""
        self._gone = f"was donated to {to}"
        self._finalizer.detach()

    def __repr__(self) -> str:
        return f"Ref({self.object_id}: {described(self.aval)} on {self.slice.name})"


class Symbol:
    """An object of a program that is being traced. Means something only inside that trace."""

    def __init__(self, trace: Any, handle: Any, slice_: Slice, aval: Aval, tree: Any) -> None:
        self.trace = trace
        self.handle = handle
        self.slice = slice_
        self.aval = aval
        self.tree = tree

    def __bool__(self) -> bool:
        raise GraphError(f"{self!r} has no value while the program is traced: a program cannot branch on one")

    def __repr__(self) -> str:
        return f"Symbol({self.handle.node_id}: {described(self.aval)} on {self.slice.name})"
