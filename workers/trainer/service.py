"""The trainer service: one policy, its optimizer, its publications and its checkpoints, on one slice.

Owns the train state of this process and the order of what happens to it. Must not know how programs are compiled, rows
packed or bytes moved. Called by the worker runtime, in the same order in every process of the slice: `open` once a run,
then per step `train` → `expose`, and `save`, `export` as the run decides.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from waypath.proto import config as configs
from waypath.proto.codecs import Bundle
from waypath.proto.config import RunConfig
from waypath.proto.errors import CheckpointError, LocalError
from waypath.workers.memory import check_memory, trainer_bytes
from waypath.workers.mesh import build_mesh
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.decoder import init_params
from waypath.workers.models.hf import load_params
from waypath.workers.models.open import open_model
from waypath.workers.models.tokenizer import TextTokenizer
from waypath.workers.service import Call, ServiceContext, method, service
from waypath.workers.tasks.base import load_task
from waypath.workers.trainer.checkpoint import Checkpoints, Counters
from waypath.workers.trainer.export import export
from waypath.workers.trainer.exposure import Exposures, local_layout
from waypath.workers.trainer.packing import MicroBatches, PackedStep, PackShape, collect_groups, pack_step
from waypath.workers.trainer.step import AdamW, Objective, TrainState, UpdateProgram
from waypath.workers.trainer.warm_start import supervised_batches

__all__ = ["TrainerService", "fingerprint"]


@dataclass
class _Opened:
    """What `open` made for a run. `state` is None after a failed update: the parameters are gone."""

    config: RunConfig
    model: ModelConfig
    text: TextTokenizer
    mesh: Mesh
    program: UpdateProgram
    checkpoints: Checkpoints
    state: TrainState | None
    counters: Counters

    def held(self) -> TrainState:
        """The state; LocalError where an update lost it."""
        if self.state is None:
            raise LocalError(
                "the trainer's state was lost in an update that failed", remedy="resume from the last checkpoint"
            )
        return self.state


@service("trainer")
class TrainerService:
    """The trainer's part of a run on one process of its slice."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._run: _Opened | None = None
        self._exposures = Exposures(context)

    @method(lane="jax")
    def open(self, call: Call) -> None:
        """Build mesh, model, optimizer and programs for `options["config"]`, or restore `options["restore"]`.

        `restore` = {"path": a checkpoint, "step": the step it was saved at} or None. Reports layout (JSON form, the boxes
        held here), model_bytes, memory_bytes (by what, per process), fingerprint, policy_version, optimizer_step and restored.
        ModelError over trainer.memory_limit_bytes, CheckpointError where `restore` is unusable.
        """
        if self._run is not None:
            self._exposures.close(call.deadline)
            self._run.checkpoints.close()
            self._run = None
        config = configs.parse(call.options["config"])
        call.activity("reading the model's configuration")
        model, text = open_model(config)
        mesh = build_mesh({str(axis): size for axis, size in config.trainer.mesh.items()})
        memory = trainer_bytes(model, mesh.shape["fsdp"])
        check_memory("trainer", memory, config.trainer.memory_limit_bytes)
        call.activity(f"compiling the update for micro-batches of {config.trainer.micro_batch_rows} rows")
        with call.span("compile"):
            program = build_program(config, model, mesh)
        directory = call.options.get("checkpoint_dir") or config.storage.checkpoint_dir
        checkpoints = Checkpoints(
            directory, keep=config.storage.keep_checkpoints, timeout_s=config.deadlines.checkpoint_s
        )
        restore = call.options.get("restore")
        if restore:
            call.activity(f"restoring {restore['path']}")
            with call.span("checkpoint"):
                state, counters = checkpoints.restore(restore["path"], program.abstract_state())
            if counters.step != int(restore.get("step", counters.step)):
                raise CheckpointError(f"{restore['path']} is of step {counters.step}, expected {restore['step']}")
        else:
            call.activity("loading the model")
            state = program.init(_initial_params(config, model, program))
            counters = Counters(0, 0, 0)
        jax.block_until_ready(state)
        self._run = _Opened(config, model, text, mesh, program, checkpoints, state, counters)
        call.report(
            layout=local_layout(model, state.params, self._context.worker).to_json(),
            model_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)),
            memory_bytes=memory,
            fingerprint=fingerprint(config, mesh),
            policy_version=counters.policy_version,
            optimizer_step=counters.optimizer_step,
            restored=bool(restore),
        )

    @method(lane="jax")
    def warm_start(self, call: Call) -> None:
        """Supervised steps on the task's demonstrations; the optimizer starts afresh afterwards.

        Reports loss (mean −logp a token, last step), first_loss and steps. Policy version and counters stay as they are.
        """
        run, settings = self._opened("warm_start"), self._opened("warm_start").config.warm_start
        task = load_task(run.config.task.name, run.config.task.options, self._context.allow_import)
        self._exposures.close(call.deadline)
        batches = supervised_batches(
            task,
            run.text,
            run.config.sampling.stop,
            run.program.shape,
            seed=run.config.seed,
            steps=settings.steps,
            batch_size=settings.batch_size,
        )
        losses: list[float] = []
        with call.span("train"):
            for step, (batch, scored) in enumerate(batches):
                call.activity(f"warm start, step {step} of {settings.steps}")
                objective = Objective(scored, settings.learning_rate, supervised=True)
                losses.append(self._update(run, batch, objective)["loss"])
        run.state = run.program.init(run.held().params)
        call.report(loss=losses[-1], first_loss=losses[0], steps=len(losses))

    @method(lane="jax")
    def train(self, call: Call) -> None:
        """One RL step: trajectories and rewards → advantages → `minibatches` optimizer updates.

        Inputs: one edge per group from generate, then one per group from score, in the same order. Argument: step.
        Reports the step's metrics, equal on every process. Waits until nobody pulls the policy that it overwrites.
        RewardError for a reward that is not a finite number; LocalError for a step that does not follow this policy
        version, for too stale tokens, and for a loss that is not finite.
        """
        run = self._opened("train")
        step = int(call.options["step"])
        if step != run.counters.policy_version:
            raise LocalError(
                f"step {step} trains policy version {step}, this trainer holds {run.counters.policy_version}"
            )
        with call.span("train"):
            call.activity(f"step {step}: packing")
            packed = self._pack(run, step, call)
            call.activity(f"step {step}: waiting until version {step} has been pulled")
            self._exposures.close(call.deadline)
            call.activity(f"step {step}: {len(packed.updates)} optimizer update(s)")
            found = []
            for update in packed.updates:
                rate = learning_rate(run.config, run.counters.optimizer_step)
                temperature = run.config.sampling.temperature
                found.append(self._update(run, update.batches, Objective(update.denominator, rate, temperature)))
                run.counters = replace(run.counters, optimizer_step=run.counters.optimizer_step + 1)
            run.counters = replace(run.counters, step=step + 1, policy_version=step + 1)
        call.report(**packed.metrics, **merge_metrics(found), optimizer_step=run.counters.optimizer_step)
        call.report(reward_metrics=packed.reward_metrics)

    @method(lane="jax")
    def expose(self, call: Call) -> Bundle:
        """Let peers pull policy version `version` from here, and return names and digests of the boxes held here."""
        run, version = self._opened("expose"), int(call.options["version"])
        if version != run.counters.policy_version:
            raise LocalError(
                f"cannot expose policy version {version}: this trainer holds {run.counters.policy_version}"
            )
        execution = (call.execution_id, call.node_id)
        call.activity(f"exposing policy version {version}")
        with call.span("publish"):
            if self._exposures.holds(version):
                return self._exposures.cached(version, execution)
            self._exposures.close(call.deadline)
            return self._exposures.expose(version, run.model, run.held().params, execution)

    @method(lane="host")
    def exposed(self, call: Call) -> Bundle:
        """What `expose` returned for `version`, while it is exposed (TransferError after); not behind the device thread."""
        return self._exposures.cached(int(call.options["version"]), (call.execution_id, call.node_id))

    @method(lane="jax")
    def save(self, call: Call) -> None:
        """Begin a checkpoint of the present state; ends when it is copied and the one before is on disk.

        CheckpointError where the one before failed. Argument: step (completed steps, for the check that it is this state).
        """
        run = self._opened("save")
        step = int(call.options.get("step", run.counters.step))
        if step != run.counters.step:
            raise LocalError(f"cannot save step {step}: this trainer stands after step {run.counters.step}")
        call.activity(f"saving a checkpoint of step {step}")
        with call.span("checkpoint"):
            run.checkpoints.save(run.held(), run.counters)

    @method(lane="host")
    def save_wait(self, call: Call) -> None:
        """Wait for the checkpoint under way; reports checkpoint (its path). CheckpointError where it failed."""
        run = self._opened("save_wait")
        with call.span("checkpoint"):
            call.report(checkpoint=str(run.checkpoints.wait()))

    @method(lane="jax")
    def export(self, call: Call) -> None:
        """Reports params_digest and, with a non-empty `out_dir`, writes the model there as a Hugging Face directory."""
        run = self._opened("export")
        out_dir = call.options.get("out_dir") or None
        call.activity("exporting the model" if out_dir else "digesting the parameters")
        first = self._context.process_index == 0
        digest = export(run.model, run.mesh, run.held().params, run.text, out_dir, write=first)
        call.report(params_digest=digest, export_dir=out_dir)

    def _opened(self, what: str) -> _Opened:
        if self._run is None:
            raise LocalError(f"trainer.{what} before trainer.open on {self._context.worker}")
        return self._run

    def _pack(self, run: _Opened, step: int, call: Call) -> PackedStep:
        bundles = [edge[0] for edge in call.inputs]
        half = len(bundles) // 2
        settings = run.config.algorithm
        return pack_step(
            collect_groups(bundles[:half], bundles[half:]),
            run.program.shape,
            version=step,
            step=step,
            seed=run.config.seed,
            minibatches=settings.minibatches,
            advantage_eps=settings.advantage_eps,
            shuffle=settings.shuffle_advantages,
            max_staleness=settings.max_staleness,
        )

    def _update(self, run: _Opened, batches: MicroBatches, objective: Objective) -> dict[str, float]:
        state, run.state = run.held(), None
        run.state, metrics = run.program.run(state, batches, objective)
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            run.state = None
            raise LocalError(
                f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']} in optimizer update "
                f"{run.counters.optimizer_step}: the policy's weights are not finite any more",
                remedy="lower optimizer.learning_rate, or resume from an earlier checkpoint",
            )
        return metrics


def build_program(config: RunConfig, model: ModelConfig, mesh: Mesh) -> UpdateProgram:
    """The compiled update of a run: one program for RL and for the warm start."""
    rows = config.trainer.micro_batch_rows
    groups = -(-config.task.prompts_per_step // config.algorithm.minibatches)
    most = max(groups * config.algorithm.group_size, config.warm_start.batch_size if config.warm_start.steps else 0)
    optimizer = config.optimizer
    program = UpdateProgram(
        model,
        mesh,
        PackShape(rows, config.trainer.sequence_tokens, config.sampling.max_new_tokens),
        -(-most // rows),
        AdamW(optimizer.b1, optimizer.b2, optimizer.eps, optimizer.weight_decay, optimizer.max_grad_norm),
        clip=(config.algorithm.clip_low, config.algorithm.clip_high),
        remat=config.trainer.remat,
    )
    program.compile()
    return program


def learning_rate(config: RunConfig, optimizer_step: int) -> float:
    """Of the update after `optimizer_step` updates: rises linearly over the first `warmup_updates`, then stays."""
    warmup = config.optimizer.warmup_updates
    return config.optimizer.learning_rate * min(1.0, (optimizer_step + 1) / max(warmup, 1))


def merge_metrics(found: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its updates.

    loss, grad_norm: mean over updates. kl, entropy, clip_fraction: mean over the tokens that were computed. The log-prob
    differences: of the first update, for it alone sees the parameters that the engines sampled from.
    """
    tokens = [values["tokens"] for values in found]
    total = max(sum(tokens), 1.0)
    merged = {key: sum(v[key] for v in found) / len(found) for key in ("loss", "grad_norm")}
    for key in ("kl", "entropy", "clip_fraction"):
        merged[key] = sum(v[key] * n for v, n in zip(found, tokens, strict=True)) / total
    return merged | {key: found[0][key] for key in ("logprob_diff_mean", "logprob_diff_max")}


def fingerprint(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
    """What the bits of a run depend on beside its config and seed; `id` is short and equal where all of it is."""
    parts: dict[str, Any] = {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "platform": mesh.devices.flat[0].platform,
        "device_kind": mesh.devices.flat[0].device_kind,
        "machine": platform.machine(),
        "threads": os.environ.get("NPROC", ""),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "mesh": {axis: int(size) for axis, size in mesh.shape.items()},
        "micro_batch": [config.trainer.micro_batch_rows, config.trainer.sequence_tokens],
    }
    text = json.dumps(parts, sort_keys=True)
    return {"id": hashlib.sha256(text.encode()).hexdigest()[:16], **parts}


def _initial_params(config: RunConfig, model: ModelConfig, program: UpdateProgram) -> dict[str, Any]:
    shardings = program.shardings.params
    if config.model.path is not None:
        return load_params(config.model.path, model, shardings)
    made: dict[str, Any] = jax.jit(lambda key: init_params(model, key), out_shardings=shardings)(
        jax.random.key(config.seed)
    )
    return made
