"""Typed options: what a worker says of them, what it accepts, and what the controller refuses beforehand."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from waypath.controller import commands as c
from waypath.controller.catalogue import Option, check_named
from waypath.controller.connection import catalogue
from waypath.controller.graph import ProgramBuilder, Slice
from waypath.controller.resources import Resources
from waypath.controller.scheduler import Scheduler
from waypath.proto import worker_pb2 as pb
from waypath.proto.errors import ConfigError, GraphError
from waypath.workers.options import options_of
from waypath.workers.service import describe_method


def sample(self: Any, call: Any, *, count: int, rate: float = 0.5, mode: Literal["a", "b"] = "a") -> None:
    """A method with options."""


def plain(self: Any, call: Any) -> None:
    """A method that reads them itself."""


def test_options_are_the_keyword_only_parameters() -> None:
    options = options_of(sample)
    assert options is not None and options_of(plain) is None
    assert options.bind({"count": 3, "mode": "b"}, "w") == {"count": 3, "mode": "b"}
    for given, message in (
        ({}, "option 'count' is missing; it takes: count, rate, mode"),
        ({"count": 1, "size": 2}, "no option 'size'"),
        ({"count": "many"}, "option count = 'many'.*integer"),
        ({"count": 1, "mode": "c"}, "option mode = 'c'.*'a' or 'b'"),
    ):
        with pytest.raises(ConfigError, match=message):
            options.bind(given, "w")


def test_the_controller_refuses_what_a_worker_would_before_anything_is_sent() -> None:
    register = pb.Register(services=[pb.Service(name="s", methods=[describe_method("sample", sample)])])
    found = catalogue(register)
    assert found == {"s": {"sample": {"count": Option("int", True), "rate": Option("float"), "mode": Option("")}}}
    scheduler = Scheduler(Resources({"a": ["w"]}, {}))
    scheduler.handle(c.WorkerJoined("w", "i", catalogue=found))

    def refused(service: str, method: str, **options: Any) -> str:
        builder = ProgramBuilder("p")
        builder.call(service, method, on=Slice("a"), options=options)
        with pytest.raises(GraphError) as raised:
            scheduler.handle(c.ExecutionSubmitted("e", builder.build(), {}))
        assert not scheduler.running and not scheduler.queue
        return str(raised.value)

    assert "w has no service 't'; it has: s" in refused("t", "sample")
    assert "w has no method s. 'simple'; it has: sample" in refused("s", "simple")
    assert "option 'count' is missing" in refused("s", "sample")
    assert "option count: expected int, found 1.5" in refused("s", "sample", count=1.5)
    assert "option rate: expected float, found True" in refused("s", "sample", count=1, rate=True)
    assert "no option 'rat'" in refused("s", "sample", count=1, rat=1)
    builder = ProgramBuilder("p")
    builder.call("s", "sample", on=Slice("a"), options={"count": 1, "rate": 2, "mode": ["unchecked here"]})
    assert any(
        isinstance(command, c.Execute) for command in scheduler.handle(c.ExecutionSubmitted("e", builder.build(), {}))
    )


def test_a_worker_that_says_nothing_of_itself_is_not_judged() -> None:
    builder = ProgramBuilder("p")
    builder.call("anything", "at_all", on=Slice("a"))
    check_named(builder.build().nodes[0], {}, "w", "here")
