"""The programs of a GRPO run, built from its configuration.

One function a program, each returning a valid `Program`. Everything that changes from step to step is an argument of the
execution, so a program is installed once and executed by id. Must not know: sockets, files, time.

    open       trainer.open, rollout.open per replica, reward.open per reward worker
    step       generate_g → score_g (g = 0 … prompts_per_step − 1) → train
    publish    expose → stage_<replica>, one per replica; replicas pull from each other too
    join       expose → stage_<replica>, for one that comes late
    commit     commit_<replica>
    abort      abort_<replica>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from waypath.controller.graph import Handle, Pool, Program, ProgramBuilder, Slice
from waypath.proto.config import RunConfig

TRAINER = Slice("trainer")
INFERENCE = Pool("inference")
REWARD = Pool("reward")

Copies = Mapping[str, Sequence[Mapping[str, Any]]]
"""By replica: its slice copies in JSON form (`SliceCopy.to_json`)."""


def _generate_s(config: RunConfig) -> float:
    """Steps that overlap queue for the same engines."""
    return config.deadlines.generate_s * (1 + config.algorithm.max_staleness)


def _score_s(config: RunConfig) -> float:
    """A score is told to its worker together with the groups that it reads, and these may have to run again."""
    limits, overlap = config.deadlines, 1 + config.algorithm.max_staleness
    return (limits.generate_s + limits.score_s) * overlap + config.cluster.rejoin_timeout_s


def _step_s(config: RunConfig) -> float:
    """From a step's dispatch until it has trained: behind the steps in flight, with one wait for a worker to come back."""
    return _score_s(config) + config.deadlines.train_s * (1 + config.algorithm.max_staleness)


def open_trainer(config: RunConfig, run_id: str, restore: Mapping[str, Any] | None) -> Program:
    """Loads or initialises the model on the trainer slice, or restores `restore` = {"path", "step"}.

    The run's checkpoints go to `<storage.checkpoint_dir>/<run id>/checkpoints`.
    """
    builder = ProgramBuilder("open-trainer")
    options = {
        "config": config.to_json(),
        "restore": dict(restore) if restore else None,
        "checkpoint_dir": f"{config.storage.checkpoint_dir.rstrip('/')}/{run_id}/checkpoints",
    }
    builder.call("trainer", "open", on=TRAINER, options=options, deadline_s=config.deadlines.open_s, node_id="open")
    return builder.build()


def open_member(config: RunConfig, service: str, slice_name: str) -> Program:
    """Opens `service` on one inference or reward worker."""
    builder = ProgramBuilder(f"open-{slice_name}")
    builder.call(
        service,
        "open",
        on=Slice(slice_name),
        options={"config": config.to_json()},
        deadline_s=config.deadlines.open_s,
        node_id="open",
    )
    return builder.build()


def warm_start(config: RunConfig) -> Program:
    """Supervised steps on the task's demonstrations."""
    builder = ProgramBuilder("warm-start")
    builder.call("trainer", "warm_start", on=TRAINER, deadline_s=config.deadlines.warm_start_s, node_id="warm_start")
    return builder.build()


def _groups(
    builder: ProgramBuilder, config: RunConfig, count: int, **options: Any
) -> tuple[list[Handle], list[Handle]]:
    groups, scores = [], []
    for offset in range(count):
        group = builder.call(
            "rollout",
            "generate",
            on=INFERENCE,
            options={"offset": offset, **options},
            deadline_s=_generate_s(config),
            node_id=f"generate_{offset}",
        )
        groups.append(group)
        scores.append(
            builder.call(
                "reward",
                "score",
                group,
                on=REWARD,
                options={"offset": offset},
                deadline_s=_score_s(config),
                node_id=f"score_{offset}",
            )
        )
    return groups, scores


def step(config: RunConfig) -> Program:
    """One GRPO step: a node per group, then one train node. Arguments: step, first_group_id, version, samples."""
    builder = ProgramBuilder("step")
    groups, scores = _groups(
        builder,
        config,
        config.task.prompts_per_step,
        split="train",
        greedy=False,
        group_size=config.algorithm.group_size,
    )
    builder.call("trainer", "train", *groups, *scores, on=TRAINER, deadline_s=_step_s(config), node_id="train")
    return builder.build()


def evaluate(config: RunConfig, prompts: int) -> Program:
    """Greedy completions of the first `prompts` held-out rows, scored. Arguments: step, first_group_id, version."""
    builder = ProgramBuilder("evaluate")
    _groups(builder, config, prompts, split="eval", greedy=True, group_size=1)
    return builder.build()


def publish(config: RunConfig, copies: Copies, *, ahead: bool = False) -> Program:
    """Stages the trainer's policy on the replicas that are keys of `copies` (their slice copies). Argument: version.

    A replica that fails or is lost meanwhile is dropped: the others go on. `ahead` is said of a version that a step in flight
    will make.
    """
    builder = ProgramBuilder("publish")
    deadline_s = config.deadlines.publish_s
    if ahead:  # waits in the trainer's gang order behind the steps that are in flight
        deadline_s += _step_s(config)
    source = builder.call("trainer", "expose", on=TRAINER, deadline_s=deadline_s, node_id="expose")
    _stage(builder, config, source, copies, deadline_s)
    return builder.build()


def join(config: RunConfig, copies: Copies, peer: str = "") -> Program:
    """Stages a version that is out already: from what the trainer still exposes, without its device thread, or from replicas
    that serve it, of which `peer` tells the digests. Argument: version.
    """
    builder = ProgramBuilder("join")
    deadline_s = config.deadlines.publish_s
    service, place = ("rollout", Slice(peer)) if peer else ("trainer", TRAINER)
    source = builder.call(service, "exposed", on=place, deadline_s=deadline_s, node_id="expose")
    _stage(builder, config, source, copies, deadline_s)
    return builder.build()


def _stage(builder: ProgramBuilder, config: RunConfig, source: Handle, copies: Copies, deadline_s: float) -> None:
    for replica, items in copies.items():
        builder.call(
            "rollout",
            "stage",
            source,
            on=Slice(replica),
            options={"copies": [dict(item) for item in items]},
            deadline_s=deadline_s + config.deadlines.publish_s,
            on_worker_lost="drop",
            node_id=f"stage_{replica}",
        )


def commit(config: RunConfig, replicas: Sequence[str]) -> Program:
    """Commits the staged version on `replicas`; drops one that fails. Argument: version."""
    builder = ProgramBuilder("commit")
    for replica in replicas:
        builder.call(
            "rollout",
            "commit",
            on=Slice(replica),
            deadline_s=config.deadlines.publish_s + _generate_s(config),
            on_worker_lost="drop",
            node_id=f"commit_{replica}",
        )
    return builder.build()


def abort(config: RunConfig, replicas: Sequence[str]) -> Program:
    """Lets `replicas` drop what they have staged; drops one that fails. Argument: version."""
    builder = ProgramBuilder("abort")
    for replica in replicas:
        builder.call(
            "rollout",
            "abort",
            on=Slice(replica),
            deadline_s=config.deadlines.publish_s,
            on_worker_lost="drop",
            node_id=f"abort_{replica}",
        )
    return builder.build()


def save(config: RunConfig) -> Program:
    """Saves a checkpoint; `save_wait` ends when it is complete on disk. Argument: step."""
    builder = ProgramBuilder("save")
    limit = config.deadlines.checkpoint_s
    saved = builder.call("trainer", "save", on=TRAINER, deadline_s=limit, node_id="save")
    builder.call("trainer", "save_wait", saved, on=TRAINER, deadline_s=2 * limit, node_id="save_wait")
    return builder.build()


def export(config: RunConfig) -> Program:
    """Digests the parameters and, with a non-empty out_dir, writes them as a Hugging Face directory. Argument: out_dir."""
    builder = ProgramBuilder("export")
    builder.call("trainer", "export", on=TRAINER, deadline_s=config.deadlines.checkpoint_s, node_id="export")
    return builder.build()
