"""Everything about a run that can be checked before a process is started.

Owns the checks that look at this machine: model directory, memory, task, allow-list. The schema's own checks
are in `waypath.proto.config`. Must not load jax or user code. Called by the launcher. Raises UserErrors only.
"""

from pathlib import Path

from waypath.proto import hf_checkpoint
from waypath.proto.config import RandomModel, RunConfig
from waypath.proto.errors import ConfigError, ModelError, TaskError
from waypath.workers.tasks.base import load_task

ADAM_COPIES = 4  # parameters, gradients and two moments, each in the parameters' dtype, sharded over the world
GATHERED_COPIES = 1  # a step gathers the parameters once
STAGING_COPIES = 2  # an engine holds the serving and the staged policy


def check(config: RunConfig) -> None:
    """Raises ConfigError, ModelError or TaskError for what would fail only after minutes of starting."""
    _check_model(config)
    _check_imports(config)
    if ":" not in config.task.name or config.task.name.startswith("jsonl:"):
        task = load_task(config.task.name, config.task.options)
        if not task.rows("train"):
            raise TaskError(f"task {config.task.name!r} has no rows in its train split")
    _check_directory(Path(config.storage.run_dir), "storage.run_dir")


def trainer_bytes(parameter_bytes: int, processes: int) -> int:
    """Bytes of parameters, gradients, AdamW's moments and the gathered parameters in one trainer process."""
    return parameter_bytes * ADAM_COPIES // processes + parameter_bytes * GATHERED_COPIES


def inference_bytes(parameter_bytes: int) -> int:
    """Bytes of the serving and the staged policy in one inference process; the KV cache comes on top."""
    return parameter_bytes * STAGING_COPIES


def random_parameter_bytes(model: RandomModel) -> int:
    """Bytes of a random decoder in float32; its vocabulary is the alphabet and a few special tokens."""
    vocabulary = len(model.alphabet) + 4
    attention = model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size + 2 * model.hidden_size
    embeddings = vocabulary * model.hidden_size * (1 if model.tie_embeddings else 2)
    return 4 * (model.num_layers * layer + embeddings + model.hidden_size)


def _check_model(config: RunConfig) -> None:
    if config.model.random is not None:
        size = random_parameter_bytes(config.model.random)
    else:
        directory = Path(config.model.path or "")
        size = hf_checkpoint.inspect(directory).param_count * 4
    needs = {
        "trainer": (trainer_bytes(size, config.cluster.trainer_processes), config.trainer.memory_limit_bytes),
        "inference": (inference_bytes(size), config.inference.memory_limit_bytes),
    }
    for role, (need, limit) in needs.items():
        if limit and need > limit:
            raise ModelError(
                f"a model of {megabytes(size)} in {config.model.dtype} needs at least {megabytes(need)} "
                f"in each {role} process; {role}.memory_limit_bytes = {limit} ({megabytes(limit)})",
                remedy=f"Raise {role}.memory_limit_bytes, take a smaller model"
                + (" or more trainer processes (cluster.trainer_processes, trainer.mesh)" if role == "trainer" else ""),
            )


def _check_imports(config: RunConfig) -> None:
    named = {"reward.function": config.reward.function}
    if ":" in config.task.name and not config.task.name.startswith("jsonl:"):
        named["task.name"] = config.task.name
    for key, path in named.items():
        if path is None:
            continue
        module, colon, attribute = path.partition(":")
        if not (module and colon and attribute):
            raise ConfigError(f"{key} = {path!r}: expected an import path 'module:attribute'")
        allowed = config.reward.allow_import
        if not any(module == prefix or module.startswith(prefix + ".") for prefix in allowed):
            raise ConfigError(
                f"{key} = {path!r}: module {module!r} is not covered by reward.allow_import = {allowed}",
                remedy=f'Add "{module.split(".")[0]}" to reward.allow_import if you trust that code',
            )


def _check_directory(path: Path, key: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".waypath-write-test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"{key} = {str(path)!r} cannot be written: {error.strerror or error}") from None


def megabytes(count: int) -> str:
    """A byte count for people."""
    return f"{count / 1e6:,.0f} MB" if count >= 10_000_000 else f"{count / 1e6:,.2f} MB"
