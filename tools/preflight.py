"""Everything about a run that can be checked before a process is started.

Owns the checks that look at this machine: model directory, memory, allow-list, task, prompts, folders. The schema's own
checks are in `waypath.proto.config`; what a check needs to know of models and tasks it asks the code that the workers run.
Must not load jax or user code. Called by the launcher. Raises UserErrors only.
"""

from pathlib import Path
from typing import Literal, get_args

from waypath.proto.config import AnyConfig, ClusterConfig, RunConfig
from waypath.proto.errors import ConfigError
from waypath.workers.engines.shape import engine_shape
from waypath.workers.engines.source import PromptSource
from waypath.workers.memory import check_memory, engine_bytes, trainer_bytes
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.open import open_model
from waypath.workers.models.tokenizer import TextTokenizer
from waypath.workers.tasks.base import demonstrating

PROMPTS = 10_000  # rows of a split whose prompts are made here: seconds at most; workers check every prompt they use
Split = Literal["train", "eval"]


def check(config: AnyConfig) -> None:
    """Raises ConfigError, ModelError or TaskError for what would fail only after minutes of starting."""
    if isinstance(config, ClusterConfig):
        _check_directory(Path(config.storage.run_dir), "storage.run_dir")
        return
    model, text = open_model(config)
    check_memory("trainer", trainer_bytes(model, config.trainer.mesh.get("fsdp", 1)), config.trainer.memory_limit_bytes)
    check_memory("inference", engine_bytes(model, engine_shape(config)), config.inference.memory_limit_bytes)
    text.stop_token_mask(config.sampling.stop, model.vocab_size)
    _check_imports(config)
    if not _imported(config.task.name):
        _check_task(config, model, text)
    _check_directory(Path(config.storage.run_dir), "storage.run_dir")
    _check_directory(Path(config.storage.checkpoint_dir), "storage.checkpoint_dir")


def _imported(task: str) -> bool:
    """Whether the task is user code, which runs in workers only."""
    return ":" in task and not task.startswith("jsonl:")


def _check_task(config: RunConfig, model: ModelConfig, text: TextTokenizer) -> None:
    source = PromptSource(config, model, text, ())
    if config.warm_start.steps:
        demonstrating(source.task, config.warm_start.steps)
    splits: tuple[Split, ...] = get_args(Split)
    for split in splits:
        for index in range(min(source.rows(split), PROMPTS)):
            source.row_prompt(index, split)


def _check_imports(config: RunConfig) -> None:
    named = {"reward.function": config.reward.function}
    if _imported(config.task.name):
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
