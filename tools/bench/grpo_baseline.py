"""The baseline of `waypath bench grpo`: the same GRPO step in one process, without a controller.

Owns a plain loop over the same decoder, engine, packing and update program as a run, on one device with two
threads: what a careful single-machine script would do. Must not know controllers, services or sockets. Run by
the benchmark as `python -m waypath.tools.bench.grpo_baseline CONFIG [--steps N] [--set KEY=VALUE]`; it prints
one JSON object a step. Rewards are called in the process, the trainer's weights are copied to the engine in
memory.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from waypath.proto.codecs import Bundle
from waypath.proto.config import RunConfig, load, parse_override
from waypath.workers.engines.jax_engine import EngineShape, JaxEngine
from waypath.workers.engines.protocol import GroupRequest, GroupResult, SamplingParams
from waypath.workers.mesh import build_mesh, param_shardings
from waypath.workers.models import hf, tokenizer
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.decoder import Params, init_params
from waypath.workers.models.views import views
from waypath.workers.tasks.base import DemonstratingTask, PromptStream, Row, Sample, Split, load_task
from waypath.workers.trainer.packing import PackShape, collect_groups, empty_batches, fill_row, pack_step
from waypath.workers.trainer.step import AdamW, Objective, UpdateProgram

THREADS = 2


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step's phases, and what it learned. The first step's train_s includes a compilation."""

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
        self._task = load_task(config.task.name, config.task.options, config.reward.allow_import)
        self._stream = PromptStream(len(self._task.rows("train")), config.seed)
        self._mesh = build_mesh({}, jax.devices()[:1])
        if config.model.random is not None:
            self._tokenizer = tokenizer.char_text_tokenizer(config.model.random.alphabet)
            self._model = _random_model(config, self._tokenizer)
        else:
            self._tokenizer = tokenizer.load(str(config.model.path))
            self._model = hf.load_config(str(config.model.path))
        stop = self._tokenizer.stop_token_mask(config.sampling.stop, self._model.vocab_size)
        self._stop_ids = frozenset(int(i) for i in np.flatnonzero(stop))
        self._shape = PackShape(
            config.trainer.micro_batch_rows, config.trainer.sequence_tokens, config.sampling.max_new_tokens
        )
        rows = config.task.prompts_per_step * config.algorithm.group_size
        most = max(rows, config.warm_start.batch_size if config.warm_start.steps else 0)
        optimizer = config.optimizer
        self._update = UpdateProgram(
            self._model,
            self._mesh,
            self._shape,
            -(-most // self._shape.rows),
            AdamW(optimizer.b1, optimizer.b2, optimizer.eps, optimizer.weight_decay, optimizer.max_grad_norm),
            clip=(config.algorithm.clip_low, config.algorithm.clip_high),
            remat=config.trainer.remat,
        )
        self._updates = 0
        self._engine = JaxEngine(
            self._model,
            EngineShape(
                config.inference.slots * config.inference.replicas,
                tuple(config.inference.prompt_buckets),
                config.sampling.max_new_tokens,
                config.inference.decode_steps,
            ),
            lambda _config, _params: {},
        )
        self._state = self._update.init(self._initial_params())
        self._version = 0

    def warm_start(self) -> float:
        """Supervised steps on the task's demonstrations; returns the last loss per token (0.0 without
        any)."""
        settings = self._config.warm_start
        if not settings.steps:
            return 0.0
        if not isinstance(self._task, DemonstratingTask):
            raise TypeError(f"task {self._config.task.name!r} has no demonstrations for a warm start")
        loss = 0.0
        rng = np.random.default_rng(self._config.seed)
        for _ in range(settings.steps):
            batches = empty_batches(settings.batch_size // self._shape.rows, self._shape)
            scored = 0
            for slot, (prompt, text) in enumerate(self._task.demonstrations(rng, settings.batch_size)):
                ids = self._tokenizer.encode(prompt)
                target = [*self._tokenizer.encode(text), self._tokenizer.eos_ids[0]]
                at = np.arange(len(ids), len(ids) + len(target))
                fill_row(batches, slot, [*ids, *target], at, where=f"demonstration {slot}")
                scored += len(target)
            objective = Objective(float(scored), settings.learning_rate, supervised=True)
            self._state, metrics = self._update.run(self._state, batches, objective)
            loss = metrics["loss"]
        self._state = self._update.init(self._state.params)
        return loss

    def publish(self) -> None:
        """Copies the trainer's parameters into the engine as the current version."""
        self._engine.begin(self._version)
        for view in views(self._model):
            leaf: Any = self._state.params
            for key in view.path:
                leaf = leaf[key]
            whole = np.asarray(leaf)
            target = self._engine.stage_view(view.name, (0,) * len(view.shape), view.shape)
            np.copyto(target, whole if view.index is None else whole[view.index])
        self._engine.seal()
        self._engine.commit(self._version)

    def step(self) -> StepTimes:
        """Sample, score, train, publish."""
        config, step = self._config, self._version
        count = config.task.prompts_per_step
        ids = range(step * count, (step + 1) * count)
        train_rows = self._task.rows("train")
        rows = [train_rows[self._stream.row_index(g)] for g in ids]
        started = time.perf_counter()
        results = self._generate(rows, ids, config.algorithm.group_size, greedy=False)
        sampled = time.perf_counter()
        trajectories = [self._trajectory(row, result) for row, result in zip(rows, results, strict=True)]
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
            self._updates += 1
            settings = config.optimizer
            rate = settings.learning_rate * min(1.0, self._updates / max(1, settings.warmup_updates))
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

    def evaluate(self, split: Split = "eval") -> float:
        """Mean reward of greedy completions of the first `evaluation.prompts` held-out rows."""
        rows = list(self._task.rows(split))[: self._config.evaluation.prompts]
        results = self._generate(rows, range(len(rows)), 1, greedy=True)
        scores = [self._score(self._trajectory(row, result)) for row, result in zip(rows, results, strict=True)]
        return float(np.mean([score.arrays["reward"] for score in scores]))

    def _initial_params(self) -> Params:
        shardings = param_shardings(self._model, self._mesh)
        if self._config.model.path is not None:
            return hf.load_params(self._config.model.path, self._model, shardings)
        make = jax.jit(lambda key: init_params(self._model, key), out_shardings=shardings)
        made: Params = make(jax.random.key(self._config.seed))
        return made

    def _generate(self, rows: Sequence[Row], group_ids: Sequence[int], samples: int, greedy: bool) -> list[GroupResult]:
        sampling = SamplingParams(
            self._config.sampling.temperature, self._config.sampling.max_new_tokens, self._stop_ids, greedy
        )
        for row, group_id in zip(rows, group_ids, strict=True):
            prompt = tuple(self._tokenizer.encode(self._task.prompt(row)))
            self._engine.submit(GroupRequest(group_id, prompt, samples, self._config.seed, sampling, self._version))
        results = []
        while (plan := self._engine.plan()) is not None:
            results += self._engine.step(plan)
        return sorted(results, key=lambda result: result.group_id)

    def _trajectory(self, row: Row, result: GroupResult) -> Bundle:
        prompt = self._task.prompt(row)
        ids = self._tokenizer.encode(prompt)
        n, longest = len(result.tokens), max(map(len, result.tokens))
        shape = (n, len(ids) + longest)
        arrays: dict[str, np.ndarray[Any, Any]] = {
            "tokens": np.zeros(shape, np.int32),
            "length": np.array([len(ids) + len(tokens) for tokens in result.tokens], np.int32),
            "loss_mask": np.zeros(shape, np.uint8),
            "behaviour_logp": np.zeros(shape, np.float32),
            "policy_version": np.full(shape, -1, np.int32),
        }
        texts = []
        for i, tokens in enumerate(result.tokens):
            part = slice(len(ids), len(ids) + len(tokens))
            arrays["tokens"][i, : len(ids)], arrays["tokens"][i, part] = ids, tokens
            arrays["loss_mask"][i, part] = 1
            arrays["behaviour_logp"][i, part] = result.logp[i]
            arrays["policy_version"][i, part] = result.versions[i]
            texts.append(self._tokenizer.decode(tokens[:-1] if int(tokens[-1]) in self._stop_ids else tokens))
        return Bundle(
            {
                "group_id": result.group_id,
                "row": row,
                "prompt": prompt,
                "completions": texts,
                "finish_reasons": list(result.finish_reasons),
            },
            arrays,
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


def _random_model(config: RunConfig, text: tokenizer.TextTokenizer) -> ModelConfig:
    random = config.model.random
    if random is None:
        raise ValueError("the config has no [model.random]")
    return ModelConfig(
        vocab_size=text.vocab_size,
        eos_token_ids=text.eos_ids,
        **random.model_dump(exclude={"alphabet"}),
    )


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
        print(json.dumps(asdict(times)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
