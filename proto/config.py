"""The run configuration: its schema, its TOML form with `--set`, and every check that needs no process.

Read by the client and the launcher before anything starts, and again by the controller. Unknown keys, wrong types and
impossible combinations raise ConfigError naming the key, the value and what is allowed. Must not load jax.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from waypath.proto.errors import ConfigError

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _local(path: str) -> str:
    if "://" in path:
        raise ValueError(f"{path!r} is a URI; only folders that this machine mounts are supported")
    return path


def _recordable(options: dict[str, Any]) -> dict[str, Any]:
    """The options of user code are written to config.toml and sent as JSON: they hold what both can say."""
    for key, value in options.items():
        _check_recordable(value, key)
    return options


def _check_recordable(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{path} has the key {key!r}; keys are text")
            _check_recordable(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_recordable(item, f"{path}.{index}")
    elif not isinstance(value, str | bool | int | float):
        raise ValueError(
            f"{path} = {value!r} is {type(value).__name__}, which config.toml cannot hold; text, numbers, "
            "booleans, lists and tables can be; leave out what is not set"
        )


LocalPath = Annotated[str, AfterValidator(_local)]
Options = Annotated[dict[str, Any], AfterValidator(_recordable)]


class Section(BaseModel):
    """A table of the configuration: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RandomModel(Section):
    """A small decoder with random weights and a character tokenizer, instead of a directory."""

    alphabet: str
    hidden_size: PositiveInt = 96
    intermediate_size: PositiveInt = 256
    num_layers: PositiveInt = 3
    num_heads: PositiveInt = 2
    num_kv_heads: PositiveInt = 1
    head_dim: PositiveInt = 48
    qk_norm: bool = True
    tie_embeddings: bool = True
    rope_theta: PositiveFloat = 10_000.0

    @model_validator(mode="after")
    def _one_token_a_character(self) -> Self:
        if repeated := sorted({c for c in self.alphabet if self.alphabet.count(c) > 1}):
            raise ValueError(f"alphabet {self.alphabet!r} repeats {', '.join(map(repr, repeated))}")
        return self


class ModelSection(Section):
    """What is trained: `path`, a Hugging Face directory, or `random`."""

    path: LocalPath | None = None
    random: RandomModel | None = None
    dtype: Literal["float32"] = "float32"

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.random is None):
            raise ValueError("give exactly one of model.path (a Hugging Face directory) and [model.random]")
        return self


class TaskSection(Section):
    """Prompts and their reward. `name`: a built-in, `jsonl:FILE`, or an import path `module:attribute`."""

    name: str
    prompts_per_step: PositiveInt = 8
    options: Options = {}


class AlgorithmSection(Section):
    """The policy-gradient conventions of a run; docs/algorithms.md has the formulas."""

    preset: Literal["grpo"] = "grpo"
    group_size: Annotated[int, Field(ge=2)] = 8
    max_staleness: NonNegativeInt = 0
    advantage_eps: PositiveFloat = 1e-6
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    minibatches: PositiveInt = 1
    shuffle_advantages: bool = False


class OptimizerSection(Section):
    """AdamW with linear warm-up and clipping by global norm."""

    learning_rate: PositiveFloat = 1e-5
    b1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    b2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    warmup_updates: NonNegativeInt = 0
    max_grad_norm: PositiveFloat = 1.0


class SamplingSection(Section):
    """How completions are sampled. `stop` strings have one character each; EOS always stops."""

    max_new_tokens: PositiveInt = 16
    temperature: PositiveFloat = 1.0
    stop: list[Annotated[str, Field(min_length=1, max_length=1)]] = []


class WarmStartSection(Section):
    """Supervised steps on the task's demonstrations before RL; 0 steps: none."""

    steps: NonNegativeInt = 0
    batch_size: PositiveInt = 128
    learning_rate: PositiveFloat = 3e-3


class ProcessesSection(Section):
    """What holds for every process of a local cluster.

    `transfer_path`: how a process gets weights from another on its machine: "shared": through shared memory in `shm_dir`, "stream":
    over TCP, "auto": the first where it can be had. `heartbeat_timeout_s`: a worker that is silent for so long is lost, and a process that
    stands stopped (SIGSTOP) for so long is killed.
    """

    threads: PositiveInt = 1
    max_restarts: NonNegativeInt = 5
    rejoin_timeout_s: PositiveFloat = 120.0
    heartbeat_timeout_s: Annotated[float, Field(ge=3.0)] = 45.0
    compilation_cache: LocalPath = ".cache/jax"
    transfer_path: Literal["auto", "shared", "stream"] = "auto"
    shm_dir: LocalPath = "/dev/shm"


class ClusterSection(ProcessesSection):
    """Processes of a local cluster; read by the launcher, ignored where a cluster is already up."""

    trainer_processes: PositiveInt = 2
    inference_processes: PositiveInt = 2
    reward_processes: PositiveInt = 1


class BareClusterSection(ProcessesSection):
    """A cluster that has no processes of a run's own."""

    trainer_processes: Literal[0] = 0
    inference_processes: Literal[0] = 0
    reward_processes: Literal[0] = 0


class ComputeSection(Section):
    """Workers for programs: `worlds` JAX worlds of `processes` processes with `devices` CPU devices each.

    They import the modules `services`, which define services and functions for programs to name; `allow_import` must cover them.
    """

    worlds: NonNegativeInt = 0
    processes: PositiveInt = 1
    devices: PositiveInt = 1
    services: list[str] = []
    allow_import: list[str] = []


class TrainerSection(Section):
    """The trainer slice. One micro-batch has one fixed shape, [micro_batch_rows, sequence_tokens], in all processes together."""

    mesh: dict[Literal["data", "fsdp"], PositiveInt] = {"fsdp": 2}
    micro_batch_rows: PositiveInt = 8
    sequence_tokens: PositiveInt = 64
    remat: bool = False
    checkpoint_every: NonNegativeInt = 5
    memory_limit_bytes: NonNegativeInt = 0


class InferenceSection(Section):
    """The rollout engines. Every device program has one shape fixed here: slots x (bucket + max_new_tokens)."""

    replicas: PositiveInt = 2
    engine: Literal["jax"] = "jax"
    slots: PositiveInt = 32
    prompt_buckets: Annotated[list[PositiveInt], Field(min_length=1)] = [32]
    decode_steps: PositiveInt = 4
    memory_limit_bytes: NonNegativeInt = 0


class PublishSection(Section):
    """How a policy version reaches the replicas. Where none verifies it is staged again, `attempts` times in all."""

    attempts: PositiveInt = 2


class RewardSection(Section):
    """How rewards are computed. `function` (module:attribute) replaces the task's own.

    A group may take `timeout_s` for each of its samples; that is at most `deadlines.score_s`, so that a function that hangs
    is told of with its name and sample.
    """

    function: str | None = None
    options: Options = {}
    timeout_s: PositiveFloat = 5.0
    processes: PositiveInt = 1
    allow_import: list[str] = []


class StorageSection(Section):
    """Where a run is kept. `checkpoint_dir` must be reachable by every trainer process."""

    run_dir: LocalPath = "runs"
    checkpoint_dir: LocalPath = "runs"
    keep_checkpoints: PositiveInt = 2
    export: bool = True


class EvaluationSection(Section):
    """Greedy accuracy on held-out prompts before and after the run."""

    prompts: NonNegativeInt = 64


class LogSection(Section):
    """What is written beside metrics.jsonl."""

    samples_per_step: NonNegativeInt = 4
    tensorboard: bool = True
    trace: bool = True


class DeadlineSection(Section):
    """Seconds that a phase may take before the run fails with its cause."""

    open_s: PositiveFloat = 300.0
    warm_start_s: PositiveFloat = 900.0
    generate_s: PositiveFloat = 300.0
    score_s: PositiveFloat = 300.0
    train_s: PositiveFloat = 600.0
    publish_s: PositiveFloat = 120.0
    checkpoint_s: PositiveFloat = 300.0


class RunConfig(Section):
    """One training job.

    It ends after `steps`, or once the mean reward of its last three steps, taken together, reaches `stop_at_reward`.
    """

    seed: NonNegativeInt = 0
    steps: PositiveInt = 24
    stop_at_reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    model: ModelSection
    task: TaskSection
    algorithm: AlgorithmSection = AlgorithmSection()
    optimizer: OptimizerSection = OptimizerSection()
    sampling: SamplingSection = SamplingSection()
    warm_start: WarmStartSection = WarmStartSection()
    cluster: ClusterSection = ClusterSection()
    compute: ComputeSection = ComputeSection()
    trainer: TrainerSection = TrainerSection()
    inference: InferenceSection = InferenceSection()
    publish: PublishSection = PublishSection()
    reward: RewardSection = RewardSection()
    storage: StorageSection = StorageSection()
    evaluation: EvaluationSection = EvaluationSection()
    log: LogSection = LogSection()
    deadlines: DeadlineSection = DeadlineSection()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        devices = 1
        for size in self.trainer.mesh.values():
            devices *= size
        if devices != self.cluster.trainer_processes:
            raise ValueError(
                f"trainer.mesh {self.trainer.mesh} has {devices} devices, cluster.trainer_processes is "
                f"{self.cluster.trainer_processes}; on CPU each process brings one device, so they must be equal"
            )
        if self.trainer.micro_batch_rows % devices:
            raise ValueError(
                f"trainer.micro_batch_rows = {self.trainer.micro_batch_rows} is not divisible by the {devices} devices of trainer.mesh"
            )
        if self.inference.slots % self.algorithm.group_size:
            raise ValueError(
                f"inference.slots = {self.inference.slots} is not a multiple of algorithm.group_size = {self.algorithm.group_size}"
            )
        longest = max(self.inference.prompt_buckets) + self.sampling.max_new_tokens
        if self.trainer.sequence_tokens < longest:
            raise ValueError(
                f"trainer.sequence_tokens = {self.trainer.sequence_tokens} is less than the longest trajectory: "
                f"max(inference.prompt_buckets) + sampling.max_new_tokens = {longest}"
            )
        if self.inference.replicas != self.cluster.inference_processes:
            raise ValueError(
                f"inference.replicas = {self.inference.replicas}, cluster.inference_processes = "
                f"{self.cluster.inference_processes}; the jax engine has one replica a process, so they must be equal"
            )
        if self.algorithm.max_staleness > 1:
            raise ValueError(
                f"algorithm.max_staleness = {self.algorithm.max_staleness}: 0 (on-policy) and 1 (one step overlaps) are "
                "allowed; a replica stages one policy version at a time"
            )
        if self.algorithm.minibatches > self.task.prompts_per_step:
            raise ValueError(
                f"algorithm.minibatches = {self.algorithm.minibatches} is more than task.prompts_per_step = {self.task.prompts_per_step}"
            )
        if self.reward.timeout_s * self.algorithm.group_size > self.deadlines.score_s:
            raise ValueError(
                f"reward.timeout_s = {self.reward.timeout_s:g} for each of algorithm.group_size = {self.algorithm.group_size} "
                f"samples is more than deadlines.score_s = {self.deadlines.score_s:g}: lower the first or raise the last"
            )
        if self.warm_start.steps and self.warm_start.batch_size % self.trainer.micro_batch_rows:
            raise ValueError(
                f"warm_start.batch_size = {self.warm_start.batch_size} is not a multiple of trainer.micro_batch_rows = {self.trainer.micro_batch_rows}"
            )
        return self

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form, which `parse` accepts."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_toml(self) -> str:
        """Returns the resolved configuration as TOML, which `load` accepts."""
        return _toml(self.to_json())


class ClusterConfig(Section):
    """A cluster for programs alone: `waypath up FILE`, where FILE names neither a model nor a task."""

    cluster: BareClusterSection = BareClusterSection()
    compute: ComputeSection = ComputeSection(worlds=1)
    storage: StorageSection = StorageSection()
    reward: RewardSection = RewardSection()


AnyConfig = RunConfig | ClusterConfig


def load_cluster(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> AnyConfig:
    """Reads the configuration of a cluster: a run's, or one that names neither a model nor a task. Raises as `load`."""
    raw = _read(source, overrides)
    return _parse(ClusterConfig, raw) if raw.keys().isdisjoint({"model", "task"}) else _parse(RunConfig, raw)


def load(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Reads a configuration from a TOML file or a mapping, applies dotted `overrides`, and checks it.

    Raises ConfigError naming the key, the value and what is allowed.
    """
    return parse(_read(source, overrides))


def _read(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    if isinstance(source, Mapping):
        raw: dict[str, Any] = _copy(source)
    else:
        try:
            raw = tomllib.loads(Path(source).read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {source}: {error.strerror or error}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source} is not TOML: {error}") from None
    for key, value in (overrides or {}).items():
        _assign(raw, key, _copy(value))
    return raw


def parse(raw: Mapping[str, Any]) -> RunConfig:
    """Checks a plain mapping; raises ConfigError listing every fault."""
    return _parse(RunConfig, raw)


_Config = TypeVar("_Config", bound=Section)


def _parse(model: type[_Config], raw: Mapping[str, Any]) -> _Config:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(model, item) for item in error.errors())) from None


def parse_override(text: str) -> tuple[str, Any]:
    """Splits `a.b=value` of the command line; the value is TOML, and a bare word is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r}: expected KEY=VALUE, such as steps=30 or optimizer.learning_rate=1e-5")
    try:
        return key.strip(), tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value


def _assign(raw: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    table = raw
    for parent in parents:
        child = table.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{key}: {parent!r} is not a table")
        table = child
    table[last] = value


def _explain(root: type[BaseModel], item: ErrorDetails) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        allowed = _keys(root, item["loc"][:-1])
        close = difflib.get_close_matches(str(item["loc"][-1]), allowed, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"unknown key {key} = {item['input']!r}: {hint}allowed: {', '.join(sorted(allowed))}"
    if item["type"] == "missing":
        return f"missing key {key}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key} = {item['input']!r}: {message[:1].lower()}{message[1:]}"


def _keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        found = [t for t in (annotation, *get_args(annotation)) if isinstance(t, type) and issubclass(t, BaseModel)]
        if not found:
            return []
        model = found[0]
    return list(model.model_fields)


def _toml(value: Mapping[str, Any], prefix: str = "") -> str:
    scalars = [f"{_key(k)} = {_value(v)}" for k, v in value.items() if not isinstance(v, Mapping) or not _table(v)]
    tables = [(k, v) for k, v in value.items() if isinstance(v, Mapping) and _table(v)]
    parts = ["\n".join(scalars)] if scalars else []
    for key, table in tables:
        name = f"{prefix}{_key(key)}"
        body = _toml(table, f"{name}.")
        parts.append(f"[{name}]\n{body}" if body and not body.startswith("[") else f"[{name}]\n\n{body}")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _table(value: Mapping[str, Any]) -> bool:
    return bool(value)


def _key(key: str) -> str:
    plain = key.replace("-", "").replace("_", "").isalnum() and key.isascii()
    return key if plain else _string(key)


def _string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    for raw, short in (("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r")):
        escaped = escaped.replace(raw, short)
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped) + '"'


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(str(k))} = {_value(v)}" for k, v in value.items()) + " }" if value else "{}"
    return repr(value)
