from waypath.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ControllerMessage(_message.Message):
    __slots__ = ("epoch", "sequence", "releases", "welcome", "install", "execute", "relocate", "cancel", "peers", "shutdown", "abort_world", "ask")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_FIELD_NUMBER: _ClassVar[int]
    RELOCATE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    ABORT_WORLD_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    releases: _containers.RepeatedCompositeFieldContainer[Release]
    welcome: Welcome
    install: Install
    execute: Execute
    relocate: Relocate
    cancel: Cancel
    peers: Peers
    shutdown: Shutdown
    abort_world: AbortWorld
    ask: Ask
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., releases: _Optional[_Iterable[_Union[Release, _Mapping]]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., install: _Optional[_Union[Install, _Mapping]] = ..., execute: _Optional[_Union[Execute, _Mapping]] = ..., relocate: _Optional[_Union[Relocate, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., abort_world: _Optional[_Union[AbortWorld, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("acknowledged", "register", "ack", "nack", "node", "heartbeat")
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    acknowledged: int
    register: Register
    ack: Ack
    nack: Nack
    node: NodeEvent
    heartbeat: Heartbeat
    def __init__(self, acknowledged: _Optional[int] = ..., register: _Optional[_Union[Register, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ..., node: _Optional[_Union[NodeEvent, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("worker", "incarnation", "role", "world", "process_index", "process_count", "host_id", "boot_id", "pid", "devices", "data_addresses", "services", "transfer_paths", "staging", "versions")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    PROCESS_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROCESS_COUNT_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_PATHS_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: str
    role: str
    world: str
    process_index: int
    process_count: int
    host_id: str
    boot_id: str
    pid: int
    devices: _containers.RepeatedCompositeFieldContainer[_common_pb2.Device]
    data_addresses: _containers.RepeatedScalarFieldContainer[str]
    services: _containers.RepeatedCompositeFieldContainer[Service]
    transfer_paths: _containers.RepeatedScalarFieldContainer[str]
    staging: str
    versions: _common_pb2.Versions
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., world: _Optional[str] = ..., process_index: _Optional[int] = ..., process_count: _Optional[int] = ..., host_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., pid: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[_common_pb2.Device, _Mapping]]] = ..., data_addresses: _Optional[_Iterable[str]] = ..., services: _Optional[_Iterable[_Union[Service, _Mapping]]] = ..., transfer_paths: _Optional[_Iterable[str]] = ..., staging: _Optional[str] = ..., versions: _Optional[_Union[_common_pb2.Versions, _Mapping]] = ...) -> None: ...

class Service(_message.Message):
    __slots__ = ("name", "methods")
    NAME_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    name: str
    methods: _containers.RepeatedCompositeFieldContainer[Method]
    def __init__(self, name: _Optional[str] = ..., methods: _Optional[_Iterable[_Union[Method, _Mapping]]] = ...) -> None: ...

class Method(_message.Message):
    __slots__ = ("name", "any_options", "options")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ANY_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    any_options: bool
    options: _containers.RepeatedCompositeFieldContainer[Option]
    def __init__(self, name: _Optional[str] = ..., any_options: _Optional[bool] = ..., options: _Optional[_Iterable[_Union[Option, _Mapping]]] = ...) -> None: ...

class Option(_message.Message):
    __slots__ = ("name", "kind", "required")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    required: bool
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., required: _Optional[bool] = ...) -> None: ...

class FetchFunctionRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class FunctionChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("cluster_id", "versions")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    versions: _common_pb2.Versions
    def __init__(self, cluster_id: _Optional[str] = ..., versions: _Optional[_Union[_common_pb2.Versions, _Mapping]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node_id", "kind", "service", "method", "inputs", "options_json", "deadline_s", "donates", "takes", "gives", "steps", "exports", "slice", "sources")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    DONATES_FIELD_NUMBER: _ClassVar[int]
    TAKES_FIELD_NUMBER: _ClassVar[int]
    GIVES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    EXPORTS_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    kind: str
    service: str
    method: str
    inputs: _containers.RepeatedScalarFieldContainer[str]
    options_json: str
    deadline_s: float
    donates: _containers.RepeatedScalarFieldContainer[int]
    takes: _containers.RepeatedCompositeFieldContainer[Aval]
    gives: _containers.RepeatedCompositeFieldContainer[Aval]
    steps: _containers.RepeatedCompositeFieldContainer[Node]
    exports: _containers.RepeatedScalarFieldContainer[str]
    slice: str
    sources: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_id: _Optional[str] = ..., kind: _Optional[str] = ..., service: _Optional[str] = ..., method: _Optional[str] = ..., inputs: _Optional[_Iterable[str]] = ..., options_json: _Optional[str] = ..., deadline_s: _Optional[float] = ..., donates: _Optional[_Iterable[int]] = ..., takes: _Optional[_Iterable[_Union[Aval, _Mapping]]] = ..., gives: _Optional[_Iterable[_Union[Aval, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., exports: _Optional[_Iterable[str]] = ..., slice: _Optional[str] = ..., sources: _Optional[_Iterable[str]] = ...) -> None: ...

class Aval(_message.Message):
    __slots__ = ("leaves",)
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    leaves: _containers.RepeatedCompositeFieldContainer[Leaf]
    def __init__(self, leaves: _Optional[_Iterable[_Union[Leaf, _Mapping]]] = ...) -> None: ...

class Leaf(_message.Message):
    __slots__ = ("shape", "dtype", "spec")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    spec: _containers.RepeatedCompositeFieldContainer[Axes]
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., spec: _Optional[_Iterable[_Union[Axes, _Mapping]]] = ...) -> None: ...

class Axes(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class MeshSlice(_message.Message):
    __slots__ = ("name", "axes", "sizes", "devices")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AXES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    name: str
    axes: _containers.RepeatedScalarFieldContainer[str]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    devices: _containers.RepeatedCompositeFieldContainer[MeshDevice]
    def __init__(self, name: _Optional[str] = ..., axes: _Optional[_Iterable[str]] = ..., sizes: _Optional[_Iterable[int]] = ..., devices: _Optional[_Iterable[_Union[MeshDevice, _Mapping]]] = ...) -> None: ...

class MeshDevice(_message.Message):
    __slots__ = ("worker", "local_id", "process_index")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_INDEX_FIELD_NUMBER: _ClassVar[int]
    worker: str
    local_id: int
    process_index: int
    def __init__(self, worker: _Optional[str] = ..., local_id: _Optional[int] = ..., process_index: _Optional[int] = ...) -> None: ...

class Install(_message.Message):
    __slots__ = ("program_id", "name", "nodes", "slices")
    PROGRAM_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    program_id: str
    name: str
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    slices: _containers.RepeatedCompositeFieldContainer[MeshSlice]
    def __init__(self, program_id: _Optional[str] = ..., name: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., slices: _Optional[_Iterable[_Union[MeshSlice, _Mapping]]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("node_id", "attempt")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    attempt: int
    def __init__(self, node_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Location(_message.Message):
    __slots__ = ("node_id", "workers", "object_id")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    OBJECT_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    workers: _containers.RepeatedScalarFieldContainer[str]
    object_id: str
    def __init__(self, node_id: _Optional[str] = ..., workers: _Optional[_Iterable[str]] = ..., object_id: _Optional[str] = ...) -> None: ...

class Execute(_message.Message):
    __slots__ = ("execution_id", "program_id", "args_json", "nodes", "locations", "gang_sequence")
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_ID_FIELD_NUMBER: _ClassVar[int]
    ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    GANG_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    execution_id: str
    program_id: str
    args_json: str
    nodes: _containers.RepeatedCompositeFieldContainer[Assignment]
    locations: _containers.RepeatedCompositeFieldContainer[Location]
    gang_sequence: int
    def __init__(self, execution_id: _Optional[str] = ..., program_id: _Optional[str] = ..., args_json: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[Assignment, _Mapping]]] = ..., locations: _Optional[_Iterable[_Union[Location, _Mapping]]] = ..., gang_sequence: _Optional[int] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("execution_id", "nodes")
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    execution_id: str
    nodes: _containers.RepeatedCompositeFieldContainer[Assignment]
    def __init__(self, execution_id: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[Assignment, _Mapping]]] = ...) -> None: ...

class Relocate(_message.Message):
    __slots__ = ("execution_id", "location")
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    execution_id: str
    location: Location
    def __init__(self, execution_id: _Optional[str] = ..., location: _Optional[_Union[Location, _Mapping]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("execution_id", "node_ids", "kept")
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    execution_id: str
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    kept: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, execution_id: _Optional[str] = ..., node_ids: _Optional[_Iterable[str]] = ..., kept: _Optional[_Iterable[str]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("execution_id", "reason")
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    execution_id: str
    reason: str
    def __init__(self, execution_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("worker", "incarnation", "data_addresses", "host_id")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: str
    data_addresses: _containers.RepeatedScalarFieldContainer[str]
    host_id: str
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., data_addresses: _Optional[_Iterable[str]] = ..., host_id: _Optional[str] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("peers", "gone")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    gone: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., gone: _Optional[_Iterable[str]] = ...) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ("reason", "grace_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    reason: str
    grace_s: float
    def __init__(self, reason: _Optional[str] = ..., grace_s: _Optional[float] = ...) -> None: ...

class AbortWorld(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("expected", "found", "reason")
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    expected: int
    found: int
    reason: str
    def __init__(self, expected: _Optional[int] = ..., found: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class NodeEvent(_message.Message):
    __slots__ = ("execution_id", "node_id", "attempt", "state", "result_json", "object_bytes", "spans", "error", "export_bytes")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[NodeEvent.State]
        FINISHED: _ClassVar[NodeEvent.State]
        FAILED: _ClassVar[NodeEvent.State]
        CANCELLED: _ClassVar[NodeEvent.State]
    STATE_UNSPECIFIED: NodeEvent.State
    FINISHED: NodeEvent.State
    FAILED: NodeEvent.State
    CANCELLED: NodeEvent.State
    class ExportBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESULT_JSON_FIELD_NUMBER: _ClassVar[int]
    OBJECT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EXPORT_BYTES_FIELD_NUMBER: _ClassVar[int]
    execution_id: str
    node_id: str
    attempt: int
    state: NodeEvent.State
    result_json: str
    object_bytes: int
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.Span]
    error: _common_pb2.Error
    export_bytes: _containers.ScalarMap[str, int]
    def __init__(self, execution_id: _Optional[str] = ..., node_id: _Optional[str] = ..., attempt: _Optional[int] = ..., state: _Optional[_Union[NodeEvent.State, str]] = ..., result_json: _Optional[str] = ..., object_bytes: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.Span, _Mapping]]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., export_bytes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("activity", "waits", "rss_bytes", "store_bytes", "egress_bytes", "nodes")
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EGRESS_BYTES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    activity: str
    waits: _containers.RepeatedScalarFieldContainer[str]
    rss_bytes: int
    store_bytes: int
    egress_bytes: int
    nodes: int
    def __init__(self, activity: _Optional[str] = ..., waits: _Optional[_Iterable[str]] = ..., rss_bytes: _Optional[int] = ..., store_bytes: _Optional[int] = ..., egress_bytes: _Optional[int] = ..., nodes: _Optional[int] = ...) -> None: ...
