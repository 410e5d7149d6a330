"""The floor of `waypath bench dispatch`: bidirectional gRPC streams that do nothing.

    python -m waypath.tools.bench.echo --port-file FILE                      answers every message with itself
    python -m waypath.tools.bench.echo --port-file FILE --forward A,B,…      sends it on to all of these, answers when all have

The second is the road of a command: client, controller, workers and back. Channel options are those of the real thing.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from waypath.proto import channel

METHOD = "/waypath.bench.Echo/Stream"


async def serve(port_file: Path, forward: list[str]) -> None:
    """Serves until it is killed."""

    async def stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        channels = [channel.aio_channel(address) for address in forward]
        calls: list[Any] = [c.stream_stream(METHOD)() for c in channels]  # type: ignore[call-arg]
        async for request in requests:
            for call in calls:
                await call.write(request)
            for call in calls:
                await call.read()
            yield request

    server = grpc.aio.server(options=channel.OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("waypath.bench.Echo", {"Stream": handler}),))
    port = channel.bind(server, "127.0.0.1:0")
    await server.start()
    part = port_file.with_suffix(".part")
    part.write_text(f"{port}\n")
    part.rename(port_file)
    await server.wait_for_termination()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--forward", default="")
    options = parser.parse_args()
    asyncio.run(serve(options.port_file, [a for a in options.forward.split(",") if a]))


if __name__ == "__main__":
    main()
