"""The rollout service on one JAX thread: open, publications that verify or do not, and trajectories."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import numpy as np
import pytest

from waypath.proto import config as configs
from waypath.proto.codecs import Bundle
from waypath.proto.errors import LocalError, ModelError, TaskError
from waypath.proto.layout import Layout
from waypath.workers.digest import digest_weights
from waypath.workers.engines.service import RolloutService, compare_digests
from waypath.workers.engines.source import PromptSource, trajectory_arrays
from waypath.workers.models import decoder
from waypath.workers.models.open import open_model
from waypath.workers.models.views import views
from waypath.workers.service import Call, ServiceContext
from waypath.workers.store import ObjectStore
from waypath.workers.tasks.sort import SortTask
from waypath.workers.transfer import Landed, PullStats, Transfer, Write

T = TypeVar("T")

CONFIG = configs.load(
    {
        "seed": 3,
        "model": {
            "random": {
                "alphabet": "0123456789>\n",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_layers": 2,
                "num_heads": 2,
                "num_kv_heads": 1,
                "head_dim": 8,
            }
        },
        "task": {"name": "sort", "prompts_per_step": 2},
        "algorithm": {"group_size": 4},
        "sampling": {"max_new_tokens": 5, "stop": ["\n"]},
        "inference": {"slots": 8, "prompt_buckets": [8], "decode_steps": 3, "replicas": 2},
        "trainer": {"sequence_tokens": 16},
    }
)
MODEL, TEXT = open_model(CONFIG)


@functools.cache
def weights(seed: int) -> dict[str, Any]:
    params: dict[str, Any] = decoder.init_params(MODEL, jax.random.key(seed))
    return params


def tensor(params: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
    view = next(view for view in views(MODEL) if view.name == name)
    leaf = functools.reduce(lambda node, key: node[key], view.path, cast(Any, params))
    return np.asarray(leaf if view.index is None else leaf[view.index])


class FakeTransfer:
    """Serves `source` as policy/VERSION; with `damage`, flips one value on the way."""

    def __init__(self) -> None:
        self.source = weights(0)
        self.damage = False

    async def pull_slices(
        self, name: str, copies: Iterable[Mapping[str, Any]], write: Write, *, timeout_s: float, landed: Landed
    ) -> PullStats:
        total = 0
        for copy in copies:
            lower, upper = tuple(copy["lower"]), tuple(copy["upper"])
            box = tuple(slice(a, b) for a, b in zip(lower, upper, strict=True))
            target = write(copy["tensor"], lower, upper)
            target[...] = tensor(self.source, copy["tensor"])[box]
            if self.damage and copy["tensor"] == "model.norm.weight":
                target[1] += 1
            landed(copy["tensor"], lower, upper)
            total += target.nbytes
        return PullStats(total, 0.1, {"trainer-0": total})

    def path(self, source: str) -> str:
        return "shared"


@dataclass
class Replica:
    """A rollout service whose JAX thread is a pool of one."""

    service: RolloutService
    context: ServiceContext
    transfer: FakeTransfer

    def call(self, options: dict[str, Any], inputs: list[list[Bundle]] | None = None) -> Call:
        return Call("x", "n", options, inputs or [], self.context, time.monotonic() + 60)

    async def open(self) -> dict[str, Any]:
        call = self.call({"config": CONFIG.to_json()})
        await asyncio.wrap_future(self.context.submit_jax(lambda: self.service.open(call)))
        return call.result

    async def stage(self, version: int, seed: int) -> dict[str, Any]:
        self.transfer.source = weights(seed)
        copies = [
            {"tensor": v.name, "source": "trainer-0", "lower": [0] * len(v.shape), "upper": list(v.shape)}
            for v in views(MODEL)
        ]
        digests = digest_weights(MODEL, weights(seed))
        names = sorted(digests)
        parts = [np.stack([digests[name] for name in names]), np.zeros((len(names), 2), np.uint32)]
        parts[0][0] -= np.uint32(5)  # two processes, whose parts add up
        parts[1][0] += np.uint32(5)
        exposed = [Bundle({"tensors": names, "version": version}, {"digests": part}) for part in parts]
        call = self.call({"version": version, "copies": copies}, [exposed])
        await self.service.stage(call)
        return call.result

    async def commit(self, version: int) -> dict[str, Any]:
        call = self.call({"version": version})
        await self.service.commit(call)
        return call.result

    async def generate(self, version: int, offset: int = 0, **options: Any) -> tuple[Bundle, Call]:
        call = self.call(
            {"split": "train", "group_size": 4, "greedy": False, **options}
            | {"offset": offset, "step": 6, "first_group_id": 10, "version": version}
        )
        return await self.service.generate(call), call


@functools.cache
def _jax_thread() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(1)


def with_replica(scenario: Callable[[Replica], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        thread, transfer = _jax_thread(), FakeTransfer()

        def submit(fn: Callable[[], T], /) -> concurrent.futures.Future[T]:
            return thread.submit(fn)

        context = ServiceContext(
            worker="inference-0",
            role="inference",
            process_index=0,
            process_count=1,
            allow_import=(),
            loop=asyncio.get_running_loop(),
            submit_jax=submit,
            store=ObjectStore(),
            transfer=cast(Transfer, transfer),
        )
        replica = Replica(RolloutService(context), context, transfer)
        async with asyncio.timeout(200):
            await scenario(replica)

    asyncio.run(main())


def test_a_replica_from_open_to_its_second_version() -> None:
    async def scenario(replica: Replica) -> None:
        opened = await replica.open()
        layout = Layout.from_json(opened["layout"])
        assert {name: t.shape for name, t in layout.tensors.items()} == {v.name: v.shape for v in views(MODEL)}
        assert opened["eval_rows"] > 0 and opened["staging"] == "device"

        early = asyncio.create_task(replica.generate(0))  # waits for its weights
        staged = await replica.stage(0, seed=0)
        assert staged["verified"] and "mismatch" not in staged
        assert staged["publish_bytes"] == 4 * sum(int(np.prod(v.shape)) for v in views(MODEL))
        assert not early.done()
        assert (await replica.commit(0))["stall_s"] >= 0
        bundle, call = await early
        check_trajectory(bundle, version=0)
        assert call.result["tokens"] == int(bundle.arrays["loss_mask"].sum())
        assert [span.name for span in call.spans] == ["rollout"]

        again, _ = await replica.generate(0)
        other, _ = await replica.generate(0, offset=1)
        assert same(bundle, again) and other.meta["group_id"] == 11
        greedy, call = await replica.generate(0, first_group_id=0, split="eval", greedy=True, group_size=1)
        assert greedy.arrays["tokens"].shape[0] == 1 and [span.name for span in call.spans] == ["eval"]

        await replica.stage(1, seed=1)
        assert same((await replica.generate(0))[0], bundle), "staged weights do not serve"
        running = asyncio.create_task(replica.generate(0))
        await asyncio.sleep(0)
        late, _ = await asyncio.gather(running, replica.commit(1))
        assert same(late[0], bundle), "a commit waits for groups of the version before"
        new, _ = await replica.generate(1)
        check_trajectory(new, version=1)
        assert not same(new, bundle)
        with pytest.raises(LocalError, match="asks for policy version 0, which was replaced"):
            await replica.generate(0)

        replica.transfer.damage = True
        refused = await replica.stage(2, seed=0)
        assert refused["verified"] is False
        assert refused["mismatch"] == "digests of 1 tensors differ, such as model.norm.weight"
        with pytest.raises(LocalError, match="nothing is staged"):
            await replica.commit(2)
        assert same((await replica.generate(1))[0], new), "the version before serves on"
        replica.transfer.damage = False
        assert (await replica.stage(2, seed=0))["verified"]
        await replica.service.abort(replica.call({"version": 2}))
        assert (await replica.stage(2, seed=0))["verified"]
        assert (await replica.stage(3, seed=0))["verified"], "what was never committed gives way"
        await replica.commit(3)
        await replica.commit(3)
        third, _ = await replica.generate(3)
        assert np.array_equal(third.arrays["behaviour_logp"], bundle.arrays["behaviour_logp"])

    with_replica(scenario)


def test_what_is_staged_is_dropped_with_its_controller_and_the_version_before_serves_on() -> None:
    async def scenario(replica: Replica) -> None:
        await replica.open()
        replica.service.controller_lost()  # nothing is staged
        await replica.stage(0, seed=0)
        await replica.commit(0)
        before, _ = await replica.generate(0)
        assert (await replica.stage(1, seed=1))["verified"]
        replica.service.controller_lost()
        with pytest.raises(LocalError, match="cannot commit policy version 1: nothing is staged"):
            await replica.commit(1)
        assert same((await replica.generate(0))[0], before)
        assert (await replica.stage(1, seed=2))["verified"], "the next controller publishes again"
        await replica.commit(1)
        late = asyncio.create_task(replica.generate(1))
        replica.service.controller_lost()
        assert not same((await late)[0], before)

    with_replica(scenario)


def same(one: Bundle, two: Bundle) -> bool:
    return one.meta == two.meta and all(one.arrays[name].tobytes() == two.arrays[name].tobytes() for name in one.arrays)


def check_trajectory(bundle: Bundle, version: int) -> None:
    arrays, meta = bundle.arrays, bundle.meta
    prompt = TEXT.encode(meta["prompt"])
    n, width = arrays["tokens"].shape
    assert n == 4 and width == arrays["length"].max()
    assert {name: str(array.dtype) for name, array in arrays.items()} == {
        "tokens": "int32",
        "length": "int32",
        "loss_mask": "uint8",
        "behaviour_logp": "float32",
        "policy_version": "int32",
    }
    assert meta["group_id"] == 10 and meta["prompt_id"] == meta["row"]["prompt_id"] and meta["step"] == 6
    for i, length in enumerate(arrays["length"]):
        on = arrays["loss_mask"][i] == 1
        assert np.flatnonzero(on).tolist() == list(range(len(prompt), length))
        assert arrays["tokens"][i, : len(prompt)].tolist() == prompt
        assert np.all(arrays["tokens"][i, length:] == 0)
        assert np.all(arrays["policy_version"][i] == np.where(on, version, -1))
        assert np.all(arrays["behaviour_logp"][i, on] < 0) and np.all(arrays["behaviour_logp"][i, ~on] == 0)
        assert "\n" not in meta["completions"][i]
        completion = arrays["tokens"][i, len(prompt) : length].tolist()
        stopped = completion[-1] in (*TEXT.encode("\n"), *TEXT.eos_ids)
        assert meta["finish_reasons"][i] == ("stop" if stopped else "length")
        assert meta["completions"][i] == TEXT.decode(completion).split("\n")[0]


def test_a_call_before_open_says_so() -> None:
    async def scenario(replica: Replica) -> None:
        with pytest.raises(LocalError, match=r"rollout\.generate before rollout\.open on inference-0"):
            await replica.generate(0)

    with_replica(scenario)


def test_an_engine_over_the_memory_limit_is_refused_before_it_is_built() -> None:
    async def scenario(replica: Replica) -> None:
        config = CONFIG.to_json()
        config["inference"]["memory_limit_bytes"] = 1000
        with pytest.raises(ModelError, match=r"bytes in each inference process .*memory_limit_bytes = 1,000"):
            replica.service.open(replica.call({"config": config}))

    with_replica(scenario)


class Prompts(SortTask):
    """The sort task, its prompts made by the test."""

    def __init__(self, prompt: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__()
        self.row_prompt = prompt

    def prompt(self, row: dict[str, Any]) -> Any:
        return self.row_prompt(row)


def with_task(monkeypatch: pytest.MonkeyPatch, prompt: Callable[[dict[str, Any]], Any]) -> None:
    monkeypatch.setattr("waypath.workers.engines.source.load_task", lambda *_: Prompts(prompt))


def test_a_prompt_that_blocks_does_not_block_the_network_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, loop_runs = threading.Event(), threading.Event()

    def prompt(row: dict[str, Any]) -> str:
        asked.set()
        assert loop_runs.wait(30), "the network loop stood still"
        return f"{row['digits']}>"

    with_task(monkeypatch, prompt)

    async def scenario(replica: Replica) -> None:
        await replica.open()
        await replica.stage(0, seed=0)
        await replica.commit(0)
        generating = asyncio.create_task(replica.generate(0))
        assert await asyncio.to_thread(asked.wait, 30), "nobody asked for a prompt"
        loop_runs.set()
        check_trajectory((await generating)[0], version=0)

    with_replica(scenario)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (lambda row: row["n"], r"prompt\(row\) raised KeyError: 'n'"),
        (lambda row: 7, r"prompt\(row\) returned int, expected text"),
        (lambda row: "1x", "its prompt '1x' has 'x', which the tokenizer lacks"),
        (lambda row: "", "its prompt has 0 tokens"),
    ],
)
def test_a_prompt_that_cannot_be_used_names_task_and_row(
    prompt: Callable[[dict[str, Any]], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_task(monkeypatch, prompt)
    source = PromptSource(CONFIG, MODEL, TEXT, ())
    with pytest.raises(TaskError, match=rf"task 'sort', train row '\d+': {message}"):
        source.prompt(7, "train")


def test_rows_that_cannot_be_used_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_task(monkeypatch, lambda row: "1")
    monkeypatch.setattr(Prompts, "rows", lambda self, split: [{"prompt_id": "a", "n": {1}}])
    with pytest.raises(TaskError, match=r"train row 'a': a row is a JSON object: .*set"):
        PromptSource(CONFIG, MODEL, TEXT, ()).prompt(0, "train")
    monkeypatch.setattr(Prompts, "rows", lambda self, split: {}["rows"])
    with pytest.raises(TaskError, match=r"task 'sort': rows\('train'\) raised KeyError"):
        PromptSource(CONFIG, MODEL, TEXT, ())


def test_a_prompt_that_is_too_long_is_named() -> None:
    config = configs.load(CONFIG.to_json(), {"inference.prompt_buckets": [2, 3]})
    source = PromptSource(config, MODEL, TEXT, ())
    with pytest.raises(TaskError, match=r"task 'sort', train row '\d+': its prompt has \d+ tokens, expected 1 to 3"):
        source.prompt(7, "train")


def test_a_completion_ends_before_what_stopped_it() -> None:
    source = PromptSource(CONFIG, MODEL, TEXT, ())
    ids = TEXT.encode("31\n")
    assert source.completion(ids, "stop") == "31"
    assert source.completion(ids[:2], "length") == "31"
    assert source.completion([*ids[:2], TEXT.eos_ids[0]], "stop") == "31"
    assert source.completion([TEXT.eos_ids[0]], "stop") == ""


def test_trajectory_arrays_by_hand() -> None:
    arrays = trajectory_arrays(
        [7, 8],
        [np.array([1, 2, 3], np.int32), np.array([4], np.int32)],
        [np.array([-1, -2, -3], np.float32), np.array([-4], np.float32)],
        [np.array([5, 5, 5], np.int32), np.array([5], np.int32)],
    )
    assert arrays["tokens"].tolist() == [[7, 8, 1, 2, 3], [7, 8, 4, 0, 0]]
    assert arrays["length"].tolist() == [5, 3]
    assert arrays["loss_mask"].tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]]
    assert arrays["behaviour_logp"].tolist() == [[0, 0, -1, -2, -3], [0, 0, -4, 0, 0]]
    assert arrays["policy_version"].tolist() == [[-1, -1, 5, 5, 5], [-1, -1, 5, -1, -1]]


def test_digests_of_another_version_or_of_other_tensors_do_not_compare() -> None:
    one = np.ones((1, 2), np.uint32)
    part = Bundle({"tensors": ["a"], "version": 3}, {"digests": one})
    assert compare_digests({"a": one[0] * 2}, [part, part], 3) == ""
    assert "digests of 1 tensors differ, such as a" in compare_digests({"a": one[0]}, [part, part], 3)
    assert "1 tensors are on one side only, such as b" in compare_digests({"a": one[0], "b": one[0]}, [part], 3)
    assert "exposed policy version 3, expected 4" in compare_digests({"a": one[0]}, [part], 4)
