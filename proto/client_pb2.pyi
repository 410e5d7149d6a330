from waypath.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _common_pb2.Versions
    def __init__(self, versions: _Optional[_Union[_common_pb2.Versions, _Mapping]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("versions", "cluster_id", "epoch")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    versions: _common_pb2.Versions
    cluster_id: str
    epoch: int
    def __init__(self, versions: _Optional[_Union[_common_pb2.Versions, _Mapping]] = ..., cluster_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class StartRunRequest(_message.Message):
    __slots__ = ("config_json", "resume_run", "run_id")
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    RESUME_RUN_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    config_json: str
    resume_run: str
    run_id: str
    def __init__(self, config_json: _Optional[str] = ..., resume_run: _Optional[str] = ..., run_id: _Optional[str] = ...) -> None: ...

class StartRunReply(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRunsReply(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[RunSummary]
    def __init__(self, runs: _Optional[_Iterable[_Union[RunSummary, _Mapping]]] = ...) -> None: ...

class RunSummary(_message.Message):
    __slots__ = ("run_id", "status", "steps", "cause", "directory")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    status: str
    steps: int
    cause: str
    directory: str
    def __init__(self, run_id: _Optional[str] = ..., status: _Optional[str] = ..., steps: _Optional[int] = ..., cause: _Optional[str] = ..., directory: _Optional[str] = ...) -> None: ...

class WatchRunRequest(_message.Message):
    __slots__ = ("run_id", "from_step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    from_step: int
    def __init__(self, run_id: _Optional[str] = ..., from_step: _Optional[int] = ...) -> None: ...

class RunUpdate(_message.Message):
    __slots__ = ("metrics_json", "result_json", "phase")
    METRICS_JSON_FIELD_NUMBER: _ClassVar[int]
    RESULT_JSON_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    metrics_json: str
    result_json: str
    phase: str
    def __init__(self, metrics_json: _Optional[str] = ..., result_json: _Optional[str] = ..., phase: _Optional[str] = ...) -> None: ...

class CancelRunRequest(_message.Message):
    __slots__ = ("run_id", "checkpoint")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    checkpoint: bool
    def __init__(self, run_id: _Optional[str] = ..., checkpoint: _Optional[bool] = ...) -> None: ...

class CancelRunReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExportRunRequest(_message.Message):
    __slots__ = ("run_id", "out")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    out: str
    def __init__(self, run_id: _Optional[str] = ..., out: _Optional[str] = ...) -> None: ...

class ExportRunReply(_message.Message):
    __slots__ = ("export_dir", "params_digest")
    EXPORT_DIR_FIELD_NUMBER: _ClassVar[int]
    PARAMS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    export_dir: str
    params_digest: str
    def __init__(self, export_dir: _Optional[str] = ..., params_digest: _Optional[str] = ...) -> None: ...

class SamplesRequest(_message.Message):
    __slots__ = ("run_id", "step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("sample_json",)
    SAMPLE_JSON_FIELD_NUMBER: _ClassVar[int]
    sample_json: str
    def __init__(self, sample_json: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("status_json",)
    STATUS_JSON_FIELD_NUMBER: _ClassVar[int]
    status_json: str
    def __init__(self, status_json: _Optional[str] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("request", "open", "slice", "release_slice", "install", "submit", "cancel", "delete", "alive")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_SLICE_FIELD_NUMBER: _ClassVar[int]
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DELETE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    request: int
    open: OpenSession
    slice: RequestSlice
    release_slice: ReleaseSlice
    install: InstallProgram
    submit: Submit
    cancel: CancelExecution
    delete: DeleteObjects
    alive: KeepAlive
    def __init__(self, request: _Optional[int] = ..., open: _Optional[_Union[OpenSession, _Mapping]] = ..., slice: _Optional[_Union[RequestSlice, _Mapping]] = ..., release_slice: _Optional[_Union[ReleaseSlice, _Mapping]] = ..., install: _Optional[_Union[InstallProgram, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[CancelExecution, _Mapping]] = ..., delete: _Optional[_Union[DeleteObjects, _Mapping]] = ..., alive: _Optional[_Union[KeepAlive, _Mapping]] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("request", "opened", "slice", "installed", "done", "error", "events")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    INSTALLED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    request: int
    opened: SessionOpened
    slice: SliceGrant
    installed: Installed
    done: Done
    error: _common_pb2.Error
    events: ExecutionEvents
    def __init__(self, request: _Optional[int] = ..., opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., slice: _Optional[_Union[SliceGrant, _Mapping]] = ..., installed: _Optional[_Union[Installed, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., events: _Optional[_Union[ExecutionEvents, _Mapping]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("name", "weight", "lease_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: float
    lease_s: float
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[float] = ..., lease_s: _Optional[float] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("session", "lease_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    session: str
    lease_s: float
    def __init__(self, session: _Optional[str] = ..., lease_s: _Optional[float] = ...) -> None: ...

class RequestSlice(_message.Message):
    __slots__ = ("name", "kind", "axes", "sizes", "world", "strategy", "exclusive", "workers_of")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AXES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    EXCLUSIVE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_OF_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    axes: _containers.RepeatedScalarFieldContainer[str]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    world: str
    strategy: str
    exclusive: bool
    workers_of: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., axes: _Optional[_Iterable[str]] = ..., sizes: _Optional[_Iterable[int]] = ..., world: _Optional[str] = ..., strategy: _Optional[str] = ..., exclusive: _Optional[bool] = ..., workers_of: _Optional[str] = ...) -> None: ...

class SliceGrant(_message.Message):
    __slots__ = ("name", "axes", "sizes", "devices", "workers", "platform")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AXES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    name: str
    axes: _containers.RepeatedScalarFieldContainer[str]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    devices: _containers.RepeatedCompositeFieldContainer[SliceDevice]
    workers: _containers.RepeatedCompositeFieldContainer[SliceWorker]
    platform: str
    def __init__(self, name: _Optional[str] = ..., axes: _Optional[_Iterable[str]] = ..., sizes: _Optional[_Iterable[int]] = ..., devices: _Optional[_Iterable[_Union[SliceDevice, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[SliceWorker, _Mapping]]] = ..., platform: _Optional[str] = ...) -> None: ...

class SliceDevice(_message.Message):
    __slots__ = ("worker", "local_id")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ID_FIELD_NUMBER: _ClassVar[int]
    worker: str
    local_id: int
    def __init__(self, worker: _Optional[str] = ..., local_id: _Optional[int] = ...) -> None: ...

class SliceWorker(_message.Message):
    __slots__ = ("name", "data_addresses", "process_index")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_INDEX_FIELD_NUMBER: _ClassVar[int]
    name: str
    data_addresses: _containers.RepeatedScalarFieldContainer[str]
    process_index: int
    def __init__(self, name: _Optional[str] = ..., data_addresses: _Optional[_Iterable[str]] = ..., process_index: _Optional[int] = ...) -> None: ...

class ReleaseSlice(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class InstallProgram(_message.Message):
    __slots__ = ("program_json",)
    PROGRAM_JSON_FIELD_NUMBER: _ClassVar[int]
    program_json: str
    def __init__(self, program_json: _Optional[str] = ...) -> None: ...

class Installed(_message.Message):
    __slots__ = ("program_id",)
    PROGRAM_ID_FIELD_NUMBER: _ClassVar[int]
    program_id: str
    def __init__(self, program_id: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("execution_id", "program_id", "args_json", "bindings")
    class BindingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_ID_FIELD_NUMBER: _ClassVar[int]
    ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    BINDINGS_FIELD_NUMBER: _ClassVar[int]
    execution_id: str
    program_id: str
    args_json: str
    bindings: _containers.ScalarMap[str, str]
    def __init__(self, execution_id: _Optional[str] = ..., program_id: _Optional[str] = ..., args_json: _Optional[str] = ..., bindings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CancelExecution(_message.Message):
    __slots__ = ("execution_id", "reason")
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    execution_id: str
    reason: str
    def __init__(self, execution_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DeleteObjects(_message.Message):
    __slots__ = ("object_ids",)
    OBJECT_IDS_FIELD_NUMBER: _ClassVar[int]
    object_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, object_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class KeepAlive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExecutionEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[ExecutionEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[ExecutionEvent, _Mapping]]] = ...) -> None: ...

class ExecutionEvent(_message.Message):
    __slots__ = ("execution_id", "outcome", "error", "results_json")
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RESULTS_JSON_FIELD_NUMBER: _ClassVar[int]
    execution_id: str
    outcome: str
    error: _common_pb2.Error
    results_json: str
    def __init__(self, execution_id: _Optional[str] = ..., outcome: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., results_json: _Optional[str] = ...) -> None: ...

class UploadChunk(_message.Message):
    __slots__ = ("digest", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: str
    data: bytes
    def __init__(self, digest: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...
