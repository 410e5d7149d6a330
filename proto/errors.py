"""The exception tree, and how an error crosses a process border.

Owns every class that Waypath raises on purpose, its gRPC status, and its form in a message (`waypath.v1.Error`).
Knows nothing of the controller or the workers. Three faults are kept apart: *user* (a config, a reward function),
*local* (this process: a full disk, a bad frame) and *remote* (a peer failed; its traceback travels as text).
"""

from __future__ import annotations

import traceback as _traceback
from typing import Any, ClassVar

import grpc

from waypath.proto import common_pb2 as pb


class WaypathError(Exception):
    """Base class. `message` says what, where, expected, found; `remedy` says what to do next."""

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, *, remedy: str = "", where: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.where = where
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}. {self.remedy}" if self.remedy else text


class UserError(WaypathError):
    """Something that the user wrote has to change."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class ConfigError(UserError):
    """A key of the run configuration is unknown, mistyped or impossible together with another."""


class ModelError(UserError):
    """A model directory is missing, damaged, unsupported, or too large for the configured memory."""


class GraphError(UserError):
    """A program is not valid: an unknown reference, a cycle, a slice that does not exist."""


class TaskError(UserError):
    """A task or data set cannot be loaded or has an unusable row."""


class RewardError(UserError):
    """A reward function raised, hung, died or returned something that is not a reward."""


class FunctionError(UserError):
    """A function of a program raised on a worker, or returned a NaN that is looked for."""


class NotFoundError(UserError):
    """A run, program or object by that name does not exist."""

    status = grpc.StatusCode.NOT_FOUND


class AuthenticationError(UserError):
    """The cluster token is missing or wrong."""

    status = grpc.StatusCode.UNAUTHENTICATED


class VersionMismatchError(UserError):
    """Two processes speak different protocols or run different library versions."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class NameTakenError(UserError):
    """A live worker already has that name."""

    status = grpc.StatusCode.ALREADY_EXISTS


class LocalError(WaypathError):
    """This process could not do its part."""


class ProtocolError(LocalError):
    """A message, frame or chunk that the protocol does not allow."""

    status = grpc.StatusCode.DATA_LOSS


class JournalError(LocalError):
    """The journal cannot be read or written."""


class CheckpointError(LocalError):
    """A checkpoint cannot be written, found or read."""


class IllegalTransitionError(LocalError):
    """An event that the state machine does not allow; the message holds the object's history."""


class TransferError(LocalError):
    """Tensor or trajectory bytes could not be moved or do not verify."""


class DeadlineError(LocalError):
    """A wait ended without what it waited for; the message names the cause."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class RemoteError(WaypathError):
    """A peer failed with an exception of its own; `remote_traceback` holds its text."""


class WorkerLostError(RemoteError):
    """A worker that held needed state is gone."""

    status = grpc.StatusCode.UNAVAILABLE


class UnavailableError(RemoteError):
    """A peer cannot be reached."""

    status = grpc.StatusCode.UNAVAILABLE


class CancelledError(RemoteError):
    """The work was cancelled on request."""

    status = grpc.StatusCode.CANCELLED


def _tree(cls: type[WaypathError]) -> dict[str, type[WaypathError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found.update(_tree(child))
    return found


def to_message(error: BaseException, where: str = "") -> pb.Error:
    """Returns the message form of any exception. Exceptions that are not ours become `RemoteError` with their traceback."""
    text = "".join(_traceback.format_exception(error))
    if isinstance(error, WaypathError):
        return pb.Error(
            kind=type(error).__name__,
            message=error.message,
            remedy=error.remedy,
            where=error.where or where,
            traceback=error.remote_traceback or text,
        )
    return pb.Error(kind="RemoteError", message=f"{type(error).__name__}: {error}", where=where, traceback=text)


def from_message(message: pb.Error) -> WaypathError:
    """Returns the exception that `message` describes; an unknown kind becomes `RemoteError`."""
    cls = _tree(WaypathError).get(message.kind, RemoteError)
    return cls(message.message, remedy=message.remedy, where=message.where, remote_traceback=message.traceback)


ERROR_TRAILER = "waypath-error-bin"


def trailer(error: BaseException) -> tuple[tuple[str, bytes], ...]:
    """Returns the gRPC trailing metadata that carries `error` (its traceback cut to fit a header)."""
    message = to_message(error)
    message.traceback = message.traceback[-2000:]
    message.message = message.message[:3000]
    return ((ERROR_TRAILER, message.SerializeToString()),)


def from_rpc_error(error: grpc.RpcError, doing: str) -> WaypathError:
    """Returns the exception behind a failed RPC: ours where the peer sent one, else by status code.

    `doing` completes "could not …" and names the peer.
    """
    if isinstance(error, (grpc.aio.AioRpcError, grpc.Call)):
        metadata, code, details = error.trailing_metadata(), error.code(), error.details()
    else:
        return RemoteError(f"could not {doing}: {error}")
    pairs: Any = metadata or ()
    for key, value in pairs:
        if key == ERROR_TRAILER:
            raw = value.encode("latin-1") if isinstance(value, str) else value
            return from_message(pb.Error.FromString(raw))
    by_code: dict[grpc.StatusCode, type[WaypathError]] = {
        grpc.StatusCode.UNAVAILABLE: UnavailableError,
        grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
        grpc.StatusCode.NOT_FOUND: NotFoundError,
        grpc.StatusCode.CANCELLED: CancelledError,
    }
    return by_code.get(code, RemoteError)(f"could not {doing}: {code.name}: {details}")
