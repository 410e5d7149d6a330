from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ObjectId(_message.Message):
    __slots__ = ("execution_id", "node_id")
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    execution_id: str
    node_id: str
    def __init__(self, execution_id: _Optional[str] = ..., node_id: _Optional[str] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("objects", "puller")
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    PULLER_FIELD_NUMBER: _ClassVar[int]
    objects: _containers.RepeatedCompositeFieldContainer[ObjectId]
    puller: str
    def __init__(self, objects: _Optional[_Iterable[_Union[ObjectId, _Mapping]]] = ..., puller: _Optional[str] = ...) -> None: ...

class ArrayHeader(_message.Message):
    __slots__ = ("name", "dtype", "shape", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    bytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., bytes: _Optional[int] = ...) -> None: ...

class BundleHeader(_message.Message):
    __slots__ = ("meta_json", "arrays")
    META_JSON_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    meta_json: str
    arrays: _containers.RepeatedCompositeFieldContainer[ArrayHeader]
    def __init__(self, meta_json: _Optional[str] = ..., arrays: _Optional[_Iterable[_Union[ArrayHeader, _Mapping]]] = ...) -> None: ...

class PullChunk(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: ObjectHeader
    payload: Payload
    def __init__(self, header: _Optional[_Union[ObjectHeader, _Mapping]] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ...) -> None: ...

class ObjectHeader(_message.Message):
    __slots__ = ("object", "bundle", "payload_bytes")
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    object: ObjectId
    bundle: BundleHeader
    payload_bytes: int
    def __init__(self, object: _Optional[_Union[ObjectId, _Mapping]] = ..., bundle: _Optional[_Union[BundleHeader, _Mapping]] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("data", "crc32c")
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    crc32c: int
    def __init__(self, data: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class Slice(_message.Message):
    __slots__ = ("tensor", "lower", "upper", "dtype")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    LOWER_FIELD_NUMBER: _ClassVar[int]
    UPPER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    tensor: str
    lower: _containers.RepeatedScalarFieldContainer[int]
    upper: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, tensor: _Optional[str] = ..., lower: _Optional[_Iterable[int]] = ..., upper: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SlicesRequest(_message.Message):
    __slots__ = ("name", "puller", "slices", "object", "relayed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PULLER_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    name: str
    puller: str
    slices: _containers.RepeatedCompositeFieldContainer[Slice]
    object: bool
    relayed: bool
    def __init__(self, name: _Optional[str] = ..., puller: _Optional[str] = ..., slices: _Optional[_Iterable[_Union[Slice, _Mapping]]] = ..., object: _Optional[bool] = ..., relayed: _Optional[bool] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("pid", "fd", "nonce", "bytes")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    nonce: bytes
    bytes: int
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., nonce: _Optional[bytes] = ..., bytes: _Optional[int] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("offset", "strides")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    offset: int
    strides: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offset: _Optional[int] = ..., strides: _Optional[_Iterable[int]] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("wanted", "segment", "targets")
    WANTED_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    wanted: SlicesRequest
    segment: Segment
    targets: _containers.RepeatedCompositeFieldContainer[Target]
    def __init__(self, wanted: _Optional[_Union[SlicesRequest, _Mapping]] = ..., segment: _Optional[_Union[Segment, _Mapping]] = ..., targets: _Optional[_Iterable[_Union[Target, _Mapping]]] = ...) -> None: ...

class Written(_message.Message):
    __slots__ = ("slices",)
    SLICES_FIELD_NUMBER: _ClassVar[int]
    slices: int
    def __init__(self, slices: _Optional[int] = ...) -> None: ...

class Streamed(_message.Message):
    __slots__ = ("ticket", "port")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    port: int
    def __init__(self, ticket: _Optional[bytes] = ..., port: _Optional[int] = ...) -> None: ...

class SliceChunk(_message.Message):
    __slots__ = ("slice", "offset", "data", "crc32c")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    slice: int
    offset: int
    data: bytes
    crc32c: int
    def __init__(self, slice: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...
