"""`waypath plan`: the layouts that workers would report, the plan between them, and what is printed of both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

from waypath.proto import config as configs
from waypath.proto.errors import ConfigError
from waypath.proto.layout import Layout
from waypath.tools import cli, plan
from waypath.workers.mesh import build_mesh, param_shardings
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.decoder import abstract_params, init_params
from waypath.workers.models.placement import trainer_layout
from waypath.workers.trainer.exposure import local_layout

UNEVEN = ModelConfig(33, 24, 40, 2, 9, 3, 4)


def job(tmp_path: Path, **overrides: Any) -> configs.RunConfig:
    base = {
        "model": {"random": {"alphabet": "0123456789>"}},
        "task": {"name": "sort", "prompts_per_step": 3},
        "algorithm": {"group_size": 2},
        "inference": {"slots": 4, "prompt_buckets": [8]},
        "cluster": {"shm_dir": str(tmp_path)},
        "storage": {"run_dir": str(tmp_path / "runs"), "checkpoint_dir": str(tmp_path / "runs")},
    }
    return configs.load(base, overrides)


@pytest.mark.parametrize("mesh", [{"fsdp": 2}, {"fsdp": 4}, {"data": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}, {}])
def test_the_trainer_s_layout_is_the_one_that_trainers_report(mesh: Mapping[str, int]) -> None:
    devices = jax.devices()[: build_size(mesh)]
    shardings = param_shardings(UNEVEN, build_mesh(mesh, devices))
    params = jax.jit(lambda key: init_params(UNEVEN, key), out_shardings=shardings)(jax.random.key(0))
    reported = local_layout(UNEVEN, params, "t")
    planned = trainer_layout(UNEVEN, mesh, [f"t{k}" for k in range(len(devices))])
    assert boxes(planned) == boxes(reported)
    assert {n: (t.shape, t.dtype) for n, t in planned.tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in reported.tensors.items()
    }
    assert abstract_params(UNEVEN).keys() == params.keys()


def build_size(mesh: Mapping[str, int]) -> int:
    size = 1
    for count in mesh.values():
        size *= count
    return size


def boxes(layout: Layout) -> dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]:
    """By tensor: the box of the k-th device, whether devices are one worker's or a worker each."""
    found = {}
    for name, tensor in layout.tensors.items():
        at = [int(s.worker[1:]) if len(s.worker) > 1 else s.device for s in tensor.shards]
        found[name] = sorted((k, s.lower, s.upper) for k, s in zip(at, tensor.shards, strict=True))
    return found


def test_links_bounds_and_paths_of_a_job(tmp_path: Path) -> None:
    found = plan.job_plan(job(tmp_path), gb_per_s={"shared": 2.0})
    size = found.weight_bytes
    told = found.to_json()
    assert told["planned_bytes"] == told["lower_bound_bytes"] == 2 * size  # two replicas, each with every tensor
    assert sum(link["bytes"] for link in told["links"]) == 2 * size
    sent = sum(link["bytes"] for link in told["links"] if link["from"].startswith("trainer"))
    assert sent == size  # the trainer sends one copy
    assert told["bytes_between_machines"] == 0
    assert {entry["path"] for entry in told["links"]} == {"shared"}
    assert told["predicted_s"] == pytest.approx(size / 2e9, rel=0.2)
    assert [(r["replica"], r["path"]) for r in told["replicas"]] == [
        ("inference-0", "shared"),
        ("inference-1", "shared"),
    ]
    text = found.explain()
    assert "generate_0 … generate_2  rollout.generate  one of inference-0, inference-1" in text
    assert "planned ÷ bound 1.000" in text
    assert f'{size:,}  cluster.transfer_path = "auto", both on this machine' in text


def test_replicas_on_another_machine_get_each_byte_once_and_by_stream(tmp_path: Path) -> None:
    found = plan.job_plan(job(tmp_path), {"inference-*": "b"})
    told = found.to_json()
    assert told["bytes_between_machines"] == found.weight_bytes
    ways = {(link["from"], link["path"]) for link in told["links"]}
    assert ways == {
        ("trainer-0", "stream"),
        ("trainer-1", "stream"),
        ("inference-0", "shared"),
        ("inference-1", "shared"),
    }
    assert "trainer-0 is on this machine, inference-0 on b" in found.explain()
    with pytest.raises(ConfigError, match="no worker is called 'gpu-0'; there are trainer-0, trainer-1, inference-0"):
        plan.job_plan(job(tmp_path), {"gpu-0": "b"})


def test_why_memory_is_not_shared(tmp_path: Path) -> None:
    off = plan.job_plan(job(tmp_path, **{"cluster.transfer_path": "stream"}))
    assert off.path("trainer-0", "inference-0") == ("stream", 'cluster.transfer_path = "stream"')
    nowhere = str(tmp_path / "nowhere")
    path, why = plan.job_plan(job(tmp_path, **{"cluster.shm_dir": nowhere})).path("trainer-0", "inference-0")
    assert (path, why) == ("stream", f"cluster.shm_dir = {nowhere!r} is no folder")
    must = job(tmp_path, **{"cluster.shm_dir": nowhere, "cluster.transfer_path": "shared"})
    with pytest.raises(ConfigError, match=r'cluster\.transfer_path = "shared": cluster\.shm_dir'):
        plan.job_plan(must).explain()


def test_the_command_prints_text_or_json_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(job(tmp_path).to_toml())
    assert cli.main(["plan", str(path), "--set", "cluster.transfer_path=stream", "--gb-per-s", "stream=10"]) == cli.DONE
    assert "stream 10 GB/s" in capsys.readouterr().out
    assert cli.main(["plan", str(path), "--json", "--host", "inference-1=b"]) == cli.DONE
    told = json.loads(capsys.readouterr().out)
    assert told["hosts"]["inference-1"] == "b"
    assert [program["name"] for program in told["programs"]] == ["step", "publish", "commit"]
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere.toml"], "cannot read nowhere.toml"),
        (["JOB", "--set", "stepz=3"], "did you mean 'steps'"),
        (["JOB", "--set", "task.name=sums"], "task.name = 'sums'"),
        (["JOB", "--set", "trainer.mesh.fsdp=3"], "has 3 devices, cluster.trainer_processes is 2"),
        (["JOB", "--host", "inference-0"], "expected WORKER=MACHINE"),
        (["JOB", "--gb-per-s", "shared=fast"], "expected PATH=RATE"),
        (["JOB", "--gb-per-s", "pigeon=1"], "PATH one of shared, stream"),
    ],
)
def test_bad_jobs_are_refused_as_by_run(
    argv: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(job(tmp_path).to_toml())
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", *(str(path) if word == "JOB" else word for word in argv)]) == cli.USAGE
    assert message in capsys.readouterr().err
