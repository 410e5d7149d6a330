from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Error(_message.Message):
    __slots__ = ("kind", "message", "remedy", "where", "traceback")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    remedy: str
    where: str
    traceback: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., remedy: _Optional[str] = ..., where: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...

class Versions(_message.Message):
    __slots__ = ("protocol", "package", "jax", "platform")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    JAX_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    package: str
    jax: str
    platform: str
    def __init__(self, protocol: _Optional[int] = ..., package: _Optional[str] = ..., jax: _Optional[str] = ..., platform: _Optional[str] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("id", "kind", "coords", "slice_index", "local_id", "memory_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    COORDS_FIELD_NUMBER: _ClassVar[int]
    SLICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    kind: str
    coords: _containers.RepeatedScalarFieldContainer[int]
    slice_index: int
    local_id: int
    memory_bytes: int
    def __init__(self, id: _Optional[int] = ..., kind: _Optional[str] = ..., coords: _Optional[_Iterable[int]] = ..., slice_index: _Optional[int] = ..., local_id: _Optional[int] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("name", "start_ns", "end_ns", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    start_ns: int
    end_ns: int
    detail: str
    def __init__(self, name: _Optional[str] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...
