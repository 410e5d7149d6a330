"""The lanes: order on the JAX thread, errors, cancellation, stop."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from waypath.proto.errors import NotFoundError
from waypath.workers import service as services
from waypath.workers.lanes import JaxThread, Lanes, NoJaxThread
from waypath.workers.service import Call, find_service, lane_of, method, methods_of, service


@contextmanager
def running(jax_thread: JaxThread) -> Iterator[None]:
    thread = threading.Thread(target=jax_thread.run, name="the-jax-thread")
    thread.start()
    try:
        yield
    finally:
        jax_thread.stop()
        thread.join()


def call(context: Any = None) -> Call:
    return Call("e", "n", {}, [], context, 0.0)


def test_the_jax_thread_runs_in_the_order_of_submission() -> None:
    jax_thread = JaxThread()
    seen: list[int] = []

    def note(i: int) -> str:
        seen.append(i)
        return threading.current_thread().name

    with running(jax_thread):
        futures = [jax_thread.submit(functools.partial(note, i)) for i in range(50)]
        assert {f.result(10) for f in futures} == {"the-jax-thread"}
    assert seen == list(range(50))


def test_an_exception_goes_to_the_waiter_and_the_thread_goes_on() -> None:
    jax_thread = JaxThread()

    def fail() -> None:
        raise SystemExit("no")

    with running(jax_thread):
        failed = jax_thread.submit(fail)
        with pytest.raises(SystemExit):
            failed.result(10)
        assert jax_thread.submit(lambda: 1).result(10) == 1
    with pytest.raises(RuntimeError, match="stopped"):
        jax_thread.submit(lambda: 1)


def test_busy_s_tells_stuck_from_idle() -> None:
    jax_thread = JaxThread()
    started, go = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        go.wait(10)

    assert jax_thread.busy_s == 0.0
    with running(jax_thread):
        blocked = jax_thread.submit(block)
        assert started.wait(10)
        assert jax_thread.busy_s > 0.0
        go.set()
        blocked.result(10)


def test_each_lane_runs_where_it_says() -> None:
    async def main(lanes: Lanes) -> None:
        async def on_loop(_: Call) -> str:
            return threading.current_thread().name

        def on_thread(_: Call) -> str:
            return threading.current_thread().name

        assert await lanes.run("async", on_loop, call()) == threading.current_thread().name
        assert await lanes.run("jax", on_thread, call()) == "the-jax-thread"
        assert (await lanes.run("host", on_thread, call())).startswith("host")

    jax_thread = JaxThread()
    lanes = Lanes(jax_thread)
    with running(jax_thread):
        asyncio.run(main(lanes))
    lanes.close()


def test_without_jax_the_jax_lane_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no JAX thread"):
        NoJaxThread().submit(lambda: 1)


def test_a_method_needs_a_lane_that_fits_it() -> None:
    with pytest.raises(TypeError, match="takes a plain def"):

        @method(lane="jax")
        async def wrong(_: Call) -> None: ...

    with pytest.raises(TypeError, match="takes an async def"):

        @method(lane="async")
        def wrong_too(_: Call) -> None: ...

    with pytest.raises(ValueError, match="expected one of jax, host, async"):
        method(lane="gpu")  # type: ignore[arg-type]


def test_services_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_services", {})

    @service("counter")
    class Counter:
        @method(lane="host")
        def add(self, call: Call) -> None: ...

        def helper(self) -> None: ...

    assert find_service("counter") is Counter
    assert methods_of(Counter) == ("add",)
    assert lane_of(Counter, "add") == "host"
    with pytest.raises(NotFoundError, match="has no method 'helper'; it has: add"):
        lane_of(Counter, "helper")
    with pytest.raises(NotFoundError, match="no service 'other' on this worker; it knows: counter, function, probe"):
        find_service("other")
    with pytest.raises(ValueError, match="already"):

        @service("counter")
        class Another: ...


def test_spans_and_reports_are_kept_on_errors_too() -> None:
    made = call()
    texts: list[str] = []
    made.on_activity = texts.append
    made.report(loss=1.0)
    made.report(loss=2.0, steps=1)
    made.activity("training")
    with pytest.raises(KeyError), made.span("train"):
        raise KeyError("x")
    (span,) = made.spans
    assert span.name == "train" and span.end_ns >= span.start_ns > 1e18
    assert made.result == {"loss": 2.0, "steps": 1} and texts == ["training"]
