"""The embedded engine: continuous batching over fixed-shape lanes, on one device.

Owns the host's picture of every slot, the queue of groups, planning and the recording of drawn tokens. Must not know
tokenizers, tasks, asyncio or transfers. Called by the rollout service on the thread that owns jax.

Theory of operation. A *lane* is a prompt bucket with ``slots`` rows; a group's lane follows from its prompt's length
alone. A group enters a lane when all its samples find a free slot (one that is larger than the lane enters in waves),
in order of submission: no group overtakes another in its lane, so none starves. Admission comes before decoding, lanes
with live rows decode in turn. Every program has one shape, so a sample's tokens and log-probabilities are the same
bits whatever else is in the batch and wherever its row lies.

The host reads back one small array per step of up to ``decode_steps`` tokens, never one per token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from waypath.proto.errors import LocalError, UserError
from waypath.workers.engines import programs
from waypath.workers.engines.programs import AdmitInput, DecodeInput, LaneState
from waypath.workers.engines.protocol import (
    Admission,
    Digests,
    EngineStats,
    FinishReason,
    GroupRequest,
    GroupResult,
    Plan,
    Staging,
)
from waypath.workers.engines.sampling import seed_key
from waypath.workers.engines.shape import EngineShape
from waypath.workers.engines.weights import Params, WeightStore
from waypath.workers.models.config import ModelConfig
from waypath.workers.segments import Memory

__all__ = ["JaxEngine"]

Digester = Callable[[ModelConfig, Params], Digests]


@dataclass
class _Group:
    """A submitted group: what is still to be admitted, and the tokens so far."""

    handle: int
    request: GroupRequest
    submitted: float
    bucket: int
    tokens: list[list[int]] = field(default_factory=list)
    logp: list[list[float]] = field(default_factory=list)
    reasons: list[FinishReason] = field(default_factory=list)
    admitted: int = 0
    finished: int = 0


class _Lane:
    """The rows of one bucket: device state, and the host's mirror of every row."""

    def __init__(self, config: ModelConfig, shape: EngineShape, bucket: int, device: jax.Device) -> None:
        self.admit, self.decode = programs.compile_lane(config, shape, bucket, device)
        self._fresh = (config, shape, bucket, device)
        self.waiting: deque[int] = deque()
        self.clear()

    def clear(self) -> None:
        """Drops every row and makes fresh device state."""
        config, shape, bucket, device = self._fresh
        self.state: LaneState = programs.new_state(config, shape, bucket, device)
        slots = shape.slots
        self.owner: list[tuple[int, int] | None] = [None] * slots
        self.tokens = np.zeros(slots, np.int32)
        self.positions = np.zeros(slots, np.int32)
        self.limits = np.zeros(slots, np.int32)
        self.keys = np.zeros((slots, 2), np.uint32)
        self.temperature = np.ones(slots, np.float32)
        self.greedy = np.zeros(slots, np.bool_)
        self.waiting.clear()

    @property
    def live(self) -> np.ndarray[Any, Any]:
        """bool [slots]."""
        return np.array([owner is not None for owner in self.owner])

    @property
    def free(self) -> list[int]:
        """Slots without a sample, ascending."""
        return [slot for slot, owner in enumerate(self.owner) if owner is None]


class JaxEngine:
    """``EngineProtocol`` on one device; see there for what each method promises and raises.

    ``digest`` maps (config, parameters on device) to {tensor: uint32 [2]}. Building the engine compiles the programs of
    every bucket; weights come with the first publication.
    """

    staging: Staging = "device"

    def __init__(
        self,
        config: ModelConfig,
        shape: EngineShape,
        digest: Digester,
        device: jax.Device | None = None,
        memory: Memory | None = None,
    ) -> None:
        if list(shape.prompt_buckets) != sorted(set(shape.prompt_buckets)):
            raise UserError(f"inference.prompt_buckets = {list(shape.prompt_buckets)}: expected ascending lengths")
        longest = shape.prompt_buckets[-1] + shape.max_new_tokens
        if longest > config.max_position_embeddings:
            raise UserError(
                f"the largest of inference.prompt_buckets + sampling.max_new_tokens = {longest} is more than the "
                f"model's {config.max_position_embeddings} positions"
            )
        self._config, self._shape, self._digest = config, shape, digest
        device = device if device is not None else jax.local_devices()[0]
        self._weights = WeightStore(config, device, memory=memory)
        self._lanes = {bucket: _Lane(config, shape, bucket, device) for bucket in shape.prompt_buckets}
        self._groups: dict[int, _Group] = {}
        self._next_handle = 0
        self._turn = 0  # counts decode steps: lanes take turns
        self._sampled = 0
        self._steps = {"admit": 0, "decode": 0}
        self._seconds = 0.0

    @property
    def version(self) -> int | None:
        """The policy version that serves."""
        return self._weights.version

    @property
    def has_work(self) -> bool:
        """Whether a group is unfinished."""
        return bool(self._groups)

    def submit(self, request: GroupRequest) -> int:
        """Queue a group; see EngineProtocol."""
        what = f"group {request.group_id}"
        if self.version != request.version:
            serving = "no version" if self.version is None else f"version {self.version}"
            raise LocalError(f"{what} asks for policy version {request.version}, this engine serves {serving}")
        length, new = len(request.prompt_ids), request.sampling.max_new_tokens
        buckets = [bucket for bucket in self._lanes if length <= bucket]
        if length < 1 or not buckets:
            raise UserError(
                f"{what}: the prompt has {length} tokens, expected 1 to {max(self._lanes)} "
                "(the largest of inference.prompt_buckets)"
            )
        if not 0 < new <= self._shape.max_new_tokens or request.n < 1:
            raise UserError(
                f"{what}: {request.n} samples of up to {new} tokens; expected at least 1 sample of 1 to "
                f"{self._shape.max_new_tokens} tokens (sampling.max_new_tokens)"
            )
        if not request.sampling.greedy and not request.sampling.temperature > 0:
            raise UserError(f"{what}: temperature {request.sampling.temperature} is not positive; use greedy instead")
        vocab = self._config.vocab_size
        if not all(0 <= token < vocab for token in (*request.prompt_ids, *request.sampling.stop_ids)):
            raise UserError(f"{what}: a prompt or stop token is outside the vocabulary of {vocab}")
        group = _Group(self._next_handle, request, time.perf_counter(), min(buckets))
        self._next_handle += 1
        group.tokens = [[] for _ in range(request.n)]
        group.logp = [[] for _ in range(request.n)]
        group.reasons = ["length"] * request.n
        self._groups[group.handle] = group
        self._lanes[group.bucket].waiting.append(group.handle)
        return group.handle

    def cancel(self, handle: int) -> bool:
        """Drop a group; its slots are free at once."""
        group = self._groups.pop(handle, None)
        if group is None:
            return False
        lane = self._lanes[group.bucket]
        if handle in lane.waiting:
            lane.waiting.remove(handle)
        lane.owner = [None if owner and owner[0] == handle else owner for owner in lane.owner]
        return True

    def reset(self) -> None:
        """Drop every group and cached state."""
        self._groups.clear()
        for lane in self._lanes.values():
            lane.clear()

    def plan(self) -> Plan | None:
        """The next step; see EngineProtocol."""
        for bucket, lane in self._lanes.items():
            admissions = self._admissions(bucket, lane)
            if admissions:
                return Plan("admit", bucket, admissions)
        running = [bucket for bucket, lane in self._lanes.items() if any(lane.owner)]
        return Plan("decode", running[self._turn % len(running)]) if running else None

    def step(self, plan: Plan) -> list[GroupResult]:
        """Carry out ``plan``; see EngineProtocol."""
        if self._weights.params is None:
            raise LocalError("the engine has no weights; the first publication brings version 0")
        started = time.perf_counter()
        lane = self._lanes[plan.bucket]
        finished = self._admit(lane, plan) if plan.kind == "admit" else self._decode(lane)
        self._steps[plan.kind] += 1
        self._seconds += time.perf_counter() - started
        return finished

    def close(self) -> None:
        """Give the weights' memory back; see EngineProtocol."""
        self.reset()
        self._weights.close()

    def begin(self, version: int) -> None:
        """Open the shadow weights; see EngineProtocol."""
        self._weights.begin(version)

    def stage_view(self, tensor: str, lower: tuple[int, ...], upper: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """A writable box of the shadow weights; see EngineProtocol."""
        return self._weights.view(tensor, lower, upper)

    def shadow(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The tensors of the shadow weights; see EngineProtocol."""
        return self._weights.shadow()

    def seal(self) -> Digests:
        """Put the shadow weights on the device and return their digests; see EngineProtocol."""
        found: Digests = self._weights.seal(lambda params: self._digest(self._config, params))
        return found

    def commit(self, version: int) -> None:
        """Swap the sealed weights in; see EngineProtocol. Cached prompts do not outlive a group, so none is stale."""
        if self._groups:
            unfinished = sorted(group.request.group_id for group in self._groups.values())
            raise LocalError(f"cannot commit policy version {version}: groups {unfinished} are unfinished")
        self._weights.commit(version)

    def abort(self) -> None:
        """Drop the shadow weights."""
        self._weights.abort()

    def stats(self) -> EngineStats:
        """Counters; see EngineStats."""
        lanes = self._lanes.values()
        running = {owner[0] for lane in lanes for owner in lane.owner if owner}
        return EngineStats(
            waiting_groups=sum(len(lane.waiting) for lane in lanes),
            running_groups=len(running),
            running_samples=sum(int(lane.live.sum()) for lane in lanes),
            sampled_tokens=self._sampled,
            steps=dict(self._steps),
            step_seconds=self._seconds,
        )

    def _admissions(self, bucket: int, lane: _Lane) -> tuple[Admission, ...]:
        """Groups from the head of the queue that find room, at most as many as are prefilled together."""
        free, found = lane.free, []
        for handle in list(lane.waiting)[: self._shape.prompts(bucket)]:
            group = self._groups[handle]
            size = min(group.request.n - group.admitted, self._shape.slots)
            if size > len(free):
                break
            found.append(Admission(handle, group.admitted, tuple(free[:size])))
            del free[:size]
        return tuple(found)

    def _admit(self, lane: _Lane, plan: Plan) -> list[GroupResult]:
        size, prompts = self._shape.entries, self._shape.prompts(plan.bucket)
        batch = AdmitInput(
            prompts=np.zeros((prompts, plan.bucket), np.int32),
            lengths=np.ones(prompts, np.int32),
            stop=np.zeros((prompts, self._config.vocab_size), np.bool_),
            count=np.int32(sum(len(admission.slots) for admission in plan.admissions)),
            source=np.zeros(size, np.int32),
            slot=np.zeros(size, np.int32),
            seed_keys=np.zeros((size, 2), np.uint32),
            group_ids=np.zeros(size, np.uint32),
            sample_indices=np.zeros(size, np.uint32),
            temperature=np.ones(size, np.float32),
            greedy=np.zeros(size, np.bool_),
        )
        entries: list[tuple[_Group, int, int]] = []
        for p, admission in enumerate(plan.admissions):
            group = self._groups[admission.handle]
            request, sampling = group.request, group.request.sampling
            batch.prompts[p, : len(request.prompt_ids)] = request.prompt_ids
            batch.lengths[p] = len(request.prompt_ids)
            batch.stop[p, sorted(sampling.stop_ids)] = True
            for k, slot in enumerate(admission.slots):
                i, sample = len(entries), admission.first_sample + k
                entries.append((group, sample, slot))
                batch.source[i], batch.slot[i] = p, slot
                batch.seed_keys[i] = seed_key(request.seed)
                batch.group_ids[i], batch.sample_indices[i] = request.group_id, sample
                batch.temperature[i], batch.greedy[i] = sampling.temperature, sampling.greedy
                lane.temperature[slot], lane.greedy[slot] = sampling.temperature, sampling.greedy
            group.admitted += len(admission.slots)
            if group.admitted == request.n:
                lane.waiting.remove(group.handle)
        lane.state, out = lane.admit(self._weights.params, lane.state, batch)
        tokens, logp, keys = jax.device_get(out)
        finished = []
        for i, (group, sample, slot) in enumerate(entries):
            length = len(group.request.prompt_ids)
            lane.owner[slot] = (group.handle, sample)
            lane.keys[slot] = keys[i]
            lane.positions[slot] = length - 1
            lane.limits[slot] = length + group.request.sampling.max_new_tokens - 1
            finished += self._record(lane, slot, int(tokens[i]), float(logp[i]))
        return finished

    def _decode(self, lane: _Lane) -> list[GroupResult]:
        self._turn += 1
        rows = DecodeInput(
            lane.tokens, lane.positions, lane.limits, lane.live, lane.keys, lane.temperature, lane.greedy
        )
        # The program may alias small host arrays; device_get waits for it, so they can be changed afterwards.
        lane.state, out = lane.decode(self._weights.params, lane.state, rows)
        tokens, logp, emitted = jax.device_get(out)
        finished = []
        for k, slot in np.argwhere(emitted):
            finished += self._record(lane, slot, int(tokens[k, slot]), float(logp[k, slot]))
        return finished

    def _record(self, lane: _Lane, slot: int, token: int, logp: float) -> list[GroupResult]:
        """Append a drawn token to its sample; returns the group's result if that was its last token."""
        owner = lane.owner[slot]
        if owner is None:
            raise LocalError(f"slot {slot} drew a token without a sample")
        handle, sample = owner
        group = self._groups[handle]
        group.tokens[sample].append(token)
        group.logp[sample].append(logp)
        self._sampled += 1
        lane.tokens[slot] = token
        lane.positions[slot] += 1
        stopped = token in group.request.sampling.stop_ids
        if not stopped and lane.positions[slot] < lane.limits[slot]:
            return []
        group.reasons[sample] = "stop" if stopped else "length"
        lane.owner[slot] = None
        group.finished += 1
        if group.finished < group.request.n:
            return []
        del self._groups[handle]
        lengths = [len(tokens) for tokens in group.tokens]
        return [
            GroupResult(
                handle=handle,
                group_id=group.request.group_id,
                tokens=tuple(np.array(tokens, np.int32) for tokens in group.tokens),
                logp=tuple(np.array(values, np.float32) for values in group.logp),
                versions=tuple(np.full(n, group.request.version, np.int32) for n in lengths),
                finish_reasons=tuple(group.reasons),
                seconds=time.perf_counter() - group.submitted,
            )
        ]
