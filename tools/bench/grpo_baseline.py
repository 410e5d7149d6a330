"""The baseline of `waypath bench grpo`: the same GRPO step in one process, without a controller.

Owns a plain loop over the same decoder, engine, packing and update program as a run, on one device with two
threads: what a careful single-machine script would do. Must not know controllers, services or sockets. Run by
the benchmark as `python -m waypath.tools.bench.grpo_baseline CONFIG [--steps N] [--set KEY=VALUE]`; it prints
one JSON object a step. Rewards are called in the process, the trainer's weights are copied to the engine in
memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from waypath.proto.codecs import Bundle
from waypath.proto.config import RunConfig, load, parse_override
from waypath.workers.engines.jax_engine import JaxEngine
from waypath.workers.engines.protocol import GroupRequest, GroupResult
from waypath.workers.engines.shape import engine_shape
from waypath.workers.engines.source import Prompt, PromptSource, trajectory_arrays
from waypath.workers.mesh import build_mesh, param_shardings
from waypath.workers.models import hf
from waypath.workers.models.decoder import Params, init_params
from waypath.workers.models.open import open_model
from waypath.workers.models.views import leaf_at, views
from waypath.workers.tasks.base import Sample, load_task
from waypath.workers.trainer.packing import collect_groups, pack_step
from waypath.workers.trainer.service import build_program, learning_rate
from waypath.workers.trainer.step import Objective
from waypath.workers.trainer.warm_start import supervised_batches

THREADS = 2


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step's phases, and what it learned."""

    step: int
    rollout_s: float
    reward_s: float
    train_s: float
    publish_s: float
    step_s: float
    rollout_tokens: int
    trained_rows: int
    reward_mean: float
    grad_norm: float
    entropy: float


class GrpoBaseline:
    """One job in one process."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        allowed = config.reward.allow_import
        self._task = load_task(config.task.name, config.task.options, allowed)
        self._mesh = build_mesh({}, jax.devices()[:1])
        self._model, self._tokenizer = open_model(config)
        self._source = PromptSource(config, self._model, self._tokenizer, allowed)
        self._update = build_program(config, self._model, self._mesh)
        self._shape = self._update.shape
        self._updates = 0
        shape = engine_shape(config)
        shape = dataclasses.replace(shape, slots=shape.slots * config.inference.replicas)
        self._engine = JaxEngine(self._model, shape, lambda _config, _params: {})
        self._state = self._update.init(self._initial_params())
        self._version = 0

    def warm_start(self) -> float:
        """Supervised steps on the task's demonstrations; returns the last loss per token (0.0 without
        any)."""
        settings = self._config.warm_start
        batches = supervised_batches(
            self._task,
            self._tokenizer,
            self._config.sampling.stop,
            self._shape,
            seed=self._config.seed,
            steps=settings.steps,
            batch_size=settings.batch_size,
        )
        loss = 0.0
        for batch, scored in batches if settings.steps else ():
            objective = Objective(scored, settings.learning_rate, supervised=True)
            self._state, metrics = self._update.run(self._state, batch, objective)
            loss = metrics["loss"]
        self._state = self._update.init(self._state.params)
        return loss

    def publish(self) -> None:
        """Copies the trainer's parameters into the engine as the current version."""
        self._engine.begin(self._version)
        for view in views(self._model):
            whole = np.asarray(leaf_at(self._state.params, view.path))
            target = self._engine.stage_view(view.name, (0,) * len(view.shape), view.shape)
            np.copyto(target, whole if view.index is None else whole[view.index])
        self._engine.seal()
        self._engine.commit(self._version)

    def step(self) -> StepTimes:
        """Sample, score, train, publish."""
        config, step = self._config, self._version
        count = config.task.prompts_per_step
        ids = range(step * count, (step + 1) * count)
        started = time.perf_counter()
        prompts = {g: self._source.prompt(g, "train") for g in ids}
        results = self._generate(prompts, config.algorithm.group_size, greedy=False)
        sampled = time.perf_counter()
        trajectories = [self._trajectory(prompts[result.group_id], result) for result in results]
        scores = [self._score(bundle) for bundle in trajectories]
        scored = time.perf_counter()
        packed = pack_step(
            collect_groups(trajectories, scores),
            self._shape,
            version=step,
            step=step,
            seed=config.seed,
            minibatches=config.algorithm.minibatches,
            advantage_eps=config.algorithm.advantage_eps,
            shuffle=config.algorithm.shuffle_advantages,
        )
        found: dict[str, float] = {}
        for update in packed.updates:
            rate = learning_rate(config, self._updates)
            self._updates += 1
            objective = Objective(update.denominator, rate, config.sampling.temperature)
            self._state, metrics = self._update.run(self._state, update.batches, objective)
            found = found or metrics
        trained = time.perf_counter()
        self._version = step + 1
        self.publish()
        ended = time.perf_counter()
        return StepTimes(
            step=step,
            rollout_s=sampled - started,
            reward_s=scored - sampled,
            train_s=trained - scored,
            publish_s=ended - trained,
            step_s=ended - started,
            rollout_tokens=sum(len(tokens) for result in results for tokens in result.tokens),
            trained_rows=int(packed.metrics["trained_rows"]),
            reward_mean=packed.metrics["reward_mean"],
            grad_norm=found["grad_norm"],
            entropy=found["entropy"],
        )

    def evaluate(self) -> float:
        """Mean reward of greedy completions of the first `evaluation.prompts` held-out rows."""
        count = min(self._config.evaluation.prompts, self._source.rows("eval"))
        prompts = {g: self._source.prompt(g, "eval") for g in range(count)}
        results = self._generate(prompts, 1, greedy=True)
        scores = [self._score(self._trajectory(prompts[result.group_id], result)) for result in results]
        return float(np.mean([score.arrays["reward"] for score in scores]))

    def _initial_params(self) -> Params:
        shardings = param_shardings(self._model, self._mesh)
        if self._config.model.path is not None:
            return hf.load_params(self._config.model.path, self._model, shardings)
        make = jax.jit(lambda key: init_params(self._model, key), out_shardings=shardings)
        made: Params = make(jax.random.key(self._config.seed))
        return made

    def _generate(self, prompts: Mapping[int, Prompt], samples: int, greedy: bool) -> list[GroupResult]:
        sampling, seed = self._source.sampling(greedy), self._config.seed
        for group_id, prompt in prompts.items():
            self._engine.submit(GroupRequest(group_id, prompt.ids, samples, seed, sampling, self._version))
        results = []
        while (plan := self._engine.plan()) is not None:
            results += self._engine.step(plan)
        return sorted(results, key=lambda result: result.group_id)

    def _trajectory(self, prompt: Prompt, result: GroupResult) -> Bundle:
        reasons = list(result.finish_reasons)
        texts = [
            self._source.completion(tokens.tolist(), reason)
            for tokens, reason in zip(result.tokens, reasons, strict=True)
        ]
        return Bundle(
            {
                "group_id": result.group_id,
                "row": prompt.row,
                "prompt": prompt.text,
                "completions": texts,
                "finish_reasons": reasons,
            },
            trajectory_arrays(prompt.ids, result.tokens, result.logp, result.versions),
        )

    def _score(self, bundle: Bundle) -> Bundle:
        meta = bundle.meta
        samples = [
            Sample(meta["prompt"], text, meta["row"], meta["group_id"], i, meta["finish_reasons"][i])
            for i, text in enumerate(meta["completions"])
        ]
        values = self._task.reward(samples, **self._config.reward.options)
        reward = [value if isinstance(value, int | float) else value["reward"] for value in values]
        return Bundle({"group_id": meta["group_id"]}, {"reward": np.array(reward, np.float32)})


def run_baseline(config: RunConfig, steps: int, log: Callable[[str], None] = lambda _text: None) -> Iterator[StepTimes]:
    """Warm start, publish, then `steps` steps; yields each step's times. Compiles before the first step."""
    job = GrpoBaseline(config)
    started = time.perf_counter()
    loss = job.warm_start()
    log(f"warm start: {time.perf_counter() - started:.1f} s, loss {loss:.3f} a token")
    job.publish()
    log(f"greedy accuracy before: {job.evaluate():.3f}")
    for _ in range(steps):
        yield job.step()
    log(f"greedy accuracy after: {job.evaluate():.3f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON object a step, and remarks as {"remark": text}."""
    parser = argparse.ArgumentParser(prog="grpo_baseline", description="GRPO in one process")
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    arguments = parser.parse_args(argv)
    os.environ["NPROC"] = str(THREADS)  # read when jax makes its CPU client
    config = load(arguments.config, dict(parse_override(text) for text in arguments.overrides))

    def log(text: str) -> None:
        print(json.dumps({"remark": text}), flush=True)

    for times in run_baseline(config, arguments.steps or config.steps, log):
        print(json.dumps(dataclasses.asdict(times)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
