"""The version handshake: what two processes must agree on before they work together."""

from __future__ import annotations

from importlib import metadata

from waypath.proto import common_pb2 as pb
from waypath.proto.errors import VersionMismatchError

PROTOCOL = 2


def versions(jax: str = "", platform: str = "") -> pb.Versions:
    """Returns this process's versions; `jax` and `platform` stay empty where jax is not loaded."""
    return pb.Versions(protocol=PROTOCOL, package=metadata.version("waypath"), jax=jax, platform=platform)


def check(theirs: pb.Versions, ours: pb.Versions, who: str) -> None:
    """Raises VersionMismatchError unless protocol and package agree, and jax and platform where both sides have them."""
    for name in ("protocol", "package", "jax", "platform"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other and (name in ("protocol", "package") or (mine and other)):
            raise VersionMismatchError(
                f"{who} has {name} {other!r}, expected {mine!r}",
                remedy="install the same Waypath and jax in every process of the cluster",
            )
