"""The rollout service: one engine replica in a worker, from prompts to trajectories, and its share of a publication.

Owns the engine of this worker, its driver and its version gate. Must not know how the engine samples, how the policy is
trained, or who scores the trajectories. Called by the worker runtime: `open` once a run, then per step `generate` for
each group placed here, `stage` while sampling goes on, `commit` (or `abort`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from waypath.proto import config as configs
from waypath.proto.codecs import Bundle
from waypath.proto.config import RunConfig
from waypath.proto.errors import LocalError, TransferError
from waypath.proto.names import policy_name
from waypath.workers.digest import digest_weights
from waypath.workers.engines.driver import EngineDriver
from waypath.workers.engines.gate import VersionGate
from waypath.workers.engines.jax_engine import JaxEngine
from waypath.workers.engines.protocol import Digests, EngineProtocol, GroupRequest, GroupResult
from waypath.workers.engines.relays import Relays
from waypath.workers.engines.shape import engine_shape
from waypath.workers.engines.source import PromptSource, trajectory_arrays
from waypath.workers.memory import check_memory, engine_bytes
from waypath.workers.models.open import open_model
from waypath.workers.models.placement import replica_layout
from waypath.workers.service import Call, ServiceContext, method, service
from waypath.workers.transfer import PullStats

__all__ = ["RolloutService"]

log = logging.getLogger("waypath.worker")


@dataclass
class _Opened:
    """What `open` made for a run."""

    config: RunConfig
    prompts: PromptSource
    prompt_thread: ThreadPoolExecutor  # a task's `prompt` is user code, which may block
    engine: EngineProtocol
    driver: EngineDriver
    gate: VersionGate
    relays: Relays
    staging: bool = False


@service("rollout")
class RolloutService:
    """A rollout replica. It starts without weights: the first publication brings them."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._run: _Opened | None = None

    @method(lane="jax")
    def open(self, call: Call) -> None:
        """Build tokenizer, task, prompt stream and engine for the run config in `options["config"]`.

        Reports layout (JSON form; one device, whole tensors), train_rows, eval_rows, engine, staging and memory_bytes.
        ModelError where the engine would hold more than inference.memory_limit_bytes; what the model directory, the
        task and the engine raise passes through.
        """
        self.close()
        config = configs.parse(call.options["config"])
        call.activity("reading the model's configuration and the task")
        model, text = open_model(config)
        prompts = PromptSource(config, model, text, self._context.allow_import)
        shape = engine_shape(config)
        memory = engine_bytes(model, shape)
        check_memory("inference", memory, config.inference.memory_limit_bytes)
        call.activity(f"compiling the engine for {shape.slots} slots, prompt buckets {list(shape.prompt_buckets)}")
        with call.span("compile"):
            engine = JaxEngine(model, shape, digest_weights, jax.local_devices()[0], self._context.memory)
        context = self._context
        self._run = _Opened(
            config=config,
            prompts=prompts,
            prompt_thread=ThreadPoolExecutor(1, thread_name_prefix="prompt"),
            engine=engine,
            driver=EngineDriver(engine, context.loop, context.submit_jax),
            gate=VersionGate(context.worker),
            relays=Relays(context.store.exposures),
        )
        call.report(
            layout=replica_layout(model, context.worker).to_json(),
            train_rows=prompts.rows("train"),
            eval_rows=prompts.rows("eval"),
            engine=config.inference.engine,
            staging=engine.staging,
            memory_bytes=memory,
        )

    @method(lane="async")
    async def generate(self, call: Call) -> Bundle:
        """Sample the group `first_group_id` + `offset` from exactly policy version `version`.

        Options: offset, split ("train" or "eval"), greedy, group_size; arguments: step, first_group_id, version.
        Waits for the version; DeadlineError says what this replica serves instead. Returns the trajectory bundle
        (arrays of `source.trajectory_arrays`; meta group_id, prompt_id, row, prompt, completions, finish_reasons,
        step) and reports tokens (sampled) and seconds. TaskError for a prompt that does not fit or cannot be made.
        """
        run, options = self._opened("generate"), call.options
        group_id = int(options["first_group_id"]) + int(options.get("offset", 0))
        split = options.get("split", "train")
        version = int(options["version"])
        call.activity(f"group {group_id} waits for policy version {version}: {run.gate.state()}")
        async with run.gate.holding(version, call.deadline, f"group {group_id}"):
            call.activity(f"making the prompt of group {group_id}")
            prompt = await self._context.loop.run_in_executor(run.prompt_thread, run.prompts.prompt, group_id, split)
            request = GroupRequest(
                group_id=group_id,
                prompt_ids=prompt.ids,
                n=int(options.get("group_size", run.config.algorithm.group_size)),
                seed=run.config.seed,
                sampling=run.prompts.sampling(bool(options.get("greedy", False))),
                version=version,
            )
            call.activity(f"sampling group {group_id} from policy version {version}")
            with call.span("eval" if split == "eval" else "rollout"):
                result = await run.driver.sample(request)
                _check_finite(result)
        call.report(tokens=sum(len(tokens) for tokens in result.tokens), seconds=result.seconds)
        return Bundle(
            meta={
                "group_id": group_id,
                "prompt_id": prompt.row.get("prompt_id"),
                "row": prompt.row,
                "prompt": prompt.text,
                "completions": [
                    run.prompts.completion(tokens.tolist(), reason)
                    for tokens, reason in zip(result.tokens, result.finish_reasons, strict=True)
                ],
                "finish_reasons": list(result.finish_reasons),
                "step": options.get("step"),
            },
            arrays=trajectory_arrays(prompt.ids, result.tokens, result.logp, result.versions),
        )

    @method(lane="async")
    async def stage(self, call: Call) -> None:
        """Pull policy version `version` into the shadow weights by `copies`, pass on what peers ask for, and verify it.

        The one input edge holds the expose bundles of all trainer processes, or of a replica that serves the version. Sampling
        goes on meanwhile. What does not verify is pulled once more, from the holders alone. Reports publish_bytes (payload
        received), sources (the same by worker), seconds, verified, and where it is false mismatch. A version that was staged but
        never committed is dropped first. TransferError where bytes are missing or damaged.
        """
        run, version = self._opened("stage"), int(call.options["version"])
        if run.staging:
            raise LocalError(f"cannot stage policy version {version}: another publication is under way")
        run.staging, run.gate.staged = True, None
        call.activity(f"staging policy version {version}")
        copies, mismatch, verified = call.options["copies"], "", False
        sources: Counter[str] = Counter()
        try:
            with call.span("publish"):
                for again in (False, True):
                    if again:
                        log.warning(
                            "policy version %d did not verify, pulling it from the holders: %s", version, mismatch
                        )
                        copies = [{**copy, "source": copy.get("holder") or copy["source"]} for copy in copies]
                        await run.relays.drop(version, TransferError(f"it did not verify: {mismatch}"))
                    stats, found = await self._pull(run, version, copies, call)
                    sources.update(stats.by_source)
                    mismatch = compare_digests(found, call.inputs[0], version)
                    if not mismatch:
                        run.relays.verified(version, found)
                        verified = True
                        break
        finally:
            if not verified:
                await run.relays.drop(
                    version, TransferError(f"replica {self._context.worker} gave version {version} up")
                )
                await run.driver.on_engine(run.engine.abort)
            run.staging, run.gate.staged = False, version if verified else None
        paths = {source: self._context.transfer.path(source) for source in sources}
        call.report(
            publish_bytes=sources.total(), sources=dict(sources), paths=paths, seconds=stats.seconds, verified=verified
        )
        if mismatch:
            call.report(mismatch=mismatch)

    async def _pull(
        self, run: _Opened, version: int, copies: Sequence[Mapping[str, Any]], call: Call
    ) -> tuple[PullStats, Digests]:
        """Fills the shadow weights; returns what arrived and its digests."""
        await run.relays.keep_only(run.gate.serving)
        await run.driver.on_engine(lambda: _restart_staging(run.engine, version))
        arrivals = run.relays.open(version, run.engine.shadow())
        stats = await self._context.transfer.pull_slices(
            policy_name(version), copies, run.engine.stage_view, timeout_s=call.remaining_s, landed=arrivals.land
        )
        return stats, await run.driver.on_engine(run.engine.seal)

    @method(lane="async")
    async def exposed(self, call: Call) -> Bundle:
        """Names and digests of policy version `version`, which this replica serves: a peer that joins pulls it from here."""
        return self._opened("exposed").relays.bundle(int(call.options["version"]))

    @method(lane="async")
    async def commit(self, call: Call) -> None:
        """Let policy version `version` serve, at a token boundary, once no group of an older version is left.

        Reports stall_s: how long the engine stood still for it. A version that serves already is no error.
        """
        run, version = self._opened("commit"), int(call.options["version"])
        if run.gate.serving == version:
            call.report(stall_s=0.0)
            return
        call.activity(f"committing policy version {version}: {run.gate.state()}")
        await run.gate.drained(version, call.deadline)

        def swap() -> float:
            started = time.perf_counter()
            run.engine.commit(version)
            self._context.loop.call_soon_threadsafe(run.gate.commit, version)  # even if this call is cancelled now
            return time.perf_counter() - started

        with call.span("publish"):
            stall_s = await run.driver.on_engine(swap)
        call.report(stall_s=stall_s)

    @method(lane="async")
    async def abort(self, call: Call) -> None:
        """Drop what is staged; the version that serves goes on."""
        run = self._opened("abort")
        if run.staging:
            raise LocalError("cannot abort a publication while its bytes arrive; cancel its stage node")
        await run.relays.keep_only(run.gate.serving)
        await run.driver.on_engine(run.engine.abort)
        run.gate.staged = None

    def controller_lost(self) -> None:
        """Drop what is staged, which nobody will commit any more; the version that serves goes on. On the network loop.

        The drop is queued on the JAX thread at once: ahead of whatever a new controller stages, behind a commit under way.
        """
        run = self._run
        if run is not None and not run.staging and run.gate.staged is not None:
            run.gate.staged = None
            with contextlib.suppress(RuntimeError):  # the JAX thread has stopped: the worker is leaving
                self._context.submit_jax(run.engine.abort)

    def close(self) -> None:
        """Forget the run. A `prompt` that still blocks is left behind on its thread."""
        if self._run is not None:
            self._run.relays.close()
            self._run.engine.close()
            self._run.prompt_thread.shutdown(wait=False, cancel_futures=True)
            self._run = None

    def _opened(self, what: str) -> _Opened:
        if self._run is None:
            raise LocalError(f"rollout.{what} before rollout.open on {self._context.worker}")
        return self._run


def compare_digests(found: Mapping[str, np.ndarray[Any, Any]], exposed: Sequence[Bundle], version: int) -> str:
    """What is wrong with staged weights, "" if nothing: their digests against the sum of the trainer's parts.

    Each exposed bundle has meta {"tensors": names, "version"} and arrays {"digests": uint32 [n, 2]}, the digests of the
    boxes of one trainer process; digests of disjoint boxes add modulo 2^32.
    """
    total: Digests = {}
    for part in exposed:
        if part.meta["version"] != version:
            return f"the trainer exposed policy version {part.meta['version']}, expected {version}"
        for name, value in zip(part.meta["tensors"], part.arrays["digests"], strict=True):
            total[name] = total.get(name, np.zeros(2, np.uint32)) + value
    if total.keys() != found.keys():
        odd = sorted(total.keys() ^ found.keys())
        return f"{len(odd)} tensors are on one side only, such as {odd[0]}"
    wrong = sorted(name for name, value in found.items() if not np.array_equal(value, total[name]))
    return f"digests of {len(wrong)} tensors differ, such as {wrong[0]}" if wrong else ""


def _restart_staging(engine: EngineProtocol, version: int) -> None:
    engine.abort()
    engine.begin(version)


def _check_finite(result: GroupResult) -> None:
    for i, logp in enumerate(result.logp):
        if not np.all(np.isfinite(logp)):
            raise LocalError(
                f"group {result.group_id}, sample {i}: log-probability {logp[~np.isfinite(logp)][0]}; the policy's "
                "weights are not finite, or nearly so",
                remedy="Lower optimizer.learning_rate, or resume from an earlier checkpoint",
            )
