"""Channels and servers: deadlines, keepalive, message limits and the cluster token, in one place.

Every RPC carries the token in metadata; a server refuses the ones without it before a handler runs. Everything binds to
loopback by default.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from waypath.proto.errors import AuthenticationError, ConfigError, trailer

MAX_MESSAGE_BYTES = 8 << 20
TOKEN_KEY = "waypath-token"

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
)


def new_token(path: Path) -> str:
    """Writes a fresh random token to `path` with mode 0600 and returns it."""
    token = secrets.token_urlsafe(32)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(token)
    return token


def read_token(path: Path) -> str:
    """Returns the token in `path`; raises ConfigError where it is missing, empty or readable by others."""
    try:
        mode = path.stat().st_mode & 0o077
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the cluster token: {error}", remedy="pass the launcher's token file") from None
    if mode:
        raise ConfigError(f"token file {path} is open to others (mode {mode:03o})", remedy=f"chmod 600 {path}")
    if not token:
        raise ConfigError(f"token file {path} is empty")
    return token


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata that every RPC carries."""
    return ((TOKEN_KEY, token),)


def aio_channel(address: str) -> grpc.aio.Channel:
    """Returns an asyncio channel to `address` (host:port)."""
    return grpc.aio.insecure_channel(address, options=OPTIONS)


def channel(address: str) -> grpc.Channel:
    """Returns a blocking channel to `address` (host:port)."""
    return grpc.insecure_channel(address, options=OPTIONS)


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses every RPC whose metadata lacks the cluster token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Hands the call on where the token fits, else answers UNAUTHENTICATED."""
        handler = await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_KEY, "")
        text = given.decode(errors="replace") if isinstance(given, bytes) else given
        if hmac.compare_digest(text.encode(), self._token):
            return handler
        return _refusal(handler)


def _refusal(handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
    error = AuthenticationError(
        "the cluster token is missing or wrong", remedy="pass the token file that the launcher wrote"
    )

    async def refuse(_request: Any, context: Any) -> None:
        context.set_trailing_metadata(trailer(error))
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))

    async def refuse_stream(_request: Any, context: Any) -> Any:
        await refuse(_request, context)
        yield None  # makes this an async generator; abort has raised

    streams_in = bool(handler and handler.request_streaming)
    streams_out = bool(handler and handler.response_streaming)
    if streams_in and streams_out:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if streams_out:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    if streams_in:
        return grpc.stream_unary_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)


def aio_server(token: str) -> grpc.aio.Server:
    """Returns an asyncio server that refuses RPCs without `token`."""
    return grpc.aio.server(interceptors=(TokenGuard(token),), options=OPTIONS)


def bind(server: grpc.aio.Server, address: str) -> int:
    """Binds `server` to `address` (host:port, port 0 for a free one); returns the port.

    Raises ConfigError where the address is taken or is not loopback (mTLS, which that needs, is not built yet).
    """
    host, _, _ = address.rpartition(":")
    if host.strip("[]") not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(f"refusing to bind {address}: only loopback is allowed without mTLS", remedy="use 127.0.0.1")
    try:
        return int(server.add_insecure_port(address))
    except RuntimeError:
        raise ConfigError(f"cannot listen on {address}", remedy="the port is in use; choose another, or 0") from None
