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
