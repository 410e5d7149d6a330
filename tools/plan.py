"""`waypath plan JOB.toml`: what a run would do and move, without starting a process or reading a weight.

Owns the job's workers by name, the way that each link of its publication would take, and the printed and JSON forms. The
program graph is the run builder's, the layouts are those that trainers and replicas report, the plan is the publication's. Must not
load jax. Called by the CLI; errors are those of `waypath run`.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from waypath.controller import reshard
from waypath.controller.explain import program_rows, table
from waypath.controller.graph import Program
from waypath.controller.runs import programs
from waypath.controller.transfer_plan import Plan
from waypath.proto.config import RunConfig
from waypath.proto.errors import ConfigError
from waypath.tools import preflight
from waypath.workers.memory import parameter_bytes
from waypath.workers.models.open import open_model
from waypath.workers.models.placement import replica_layout, trainer_layout

__all__ = ["GB_PER_S", "JobPlan", "job_plan"]

HERE = "this machine"
GB_PER_S = {"shared": 1.2, "stream": 0.6}
"""What a process receives by each path, measured with `waypath bench transfer` on two busy cores (docs/performance.md): expect more
of a server, and say so with `--gb-per-s`."""


@dataclass(frozen=True)
class JobPlan:
    """A run's programs and what each publication moves."""

    config: RunConfig
    members: Mapping[str, Sequence[str]]
    hosts: Mapping[str, str]
    plan: Plan
    weight_bytes: int
    gb_per_s: Mapping[str, float]

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """The programs of one step, in the order in which they run."""
        replicas = self.members["inference"]
        copies: dict[str, list[Mapping[str, Any]]] = {replica: [] for replica in replicas}
        return (
            programs.step(self.config),
            programs.publish(self.config, copies),
            programs.commit(self.config, replicas),
        )

    def path(self, source: str, destination: str) -> tuple[str, str]:
        """By which path a link goes ("shared" or "stream"), and why."""
        setting = self.config.cluster.transfer_path
        if setting == "stream":
            return "stream", 'cluster.transfer_path = "stream"'
        if self.hosts[source] != self.hosts[destination]:
            return "stream", f"{source} is on {self.hosts[source]}, {destination} on {self.hosts[destination]}"
        if (lack := self._no_segments) and self.hosts[destination] == HERE:
            return "stream", lack
        return "shared", f'cluster.transfer_path = "{setting}", both on {self.hosts[source]}'

    def paths(self, replica: str) -> list[tuple[str, str, int, str]]:
        """How a replica gets its weights: (path, from whom, bytes, why), one for each path and reason."""
        found: dict[tuple[str, str], dict[str, int]] = {}
        for (source, destination), size in self.plan.links.items():
            if destination == replica:
                found.setdefault(self.path(source, destination), {})[source] = size
        return [(path, ", ".join(sizes), sum(sizes.values()), why) for (path, why), sizes in found.items()]

    @cached_property
    def _no_segments(self) -> str:
        """Why this machine's replicas could not have their two sets of weights in shared memory; "" if they could.

        ConfigError where they must.
        """
        directory = Path(self.config.cluster.shm_dir)
        here = [replica for replica in self.members["inference"] if self.hosts[replica] == HERE]
        need = 2 * self.weight_bytes * len(here)
        if not hasattr(os, "O_TMPFILE"):
            lack = "this system has no unnamed files"
        elif not directory.is_dir():
            lack = f"cluster.shm_dir = {str(directory)!r} is no folder"
        else:
            room = os.statvfs(directory)
            free = room.f_bavail * room.f_frsize
            lack = "" if free >= need else f"{directory} has {free:,} bytes free, {len(here)} replicas need {need:,}"
        if lack and self.config.cluster.transfer_path == "shared":
            raise ConfigError(
                f'cluster.transfer_path = "shared": {lack}', remedy='Give it more room, or set it to "auto"'
            )
        return lack

    @property
    def predicted_s(self) -> float:
        """Seconds of moving, without digests and latency."""
        return self.plan.predicted_s(lambda a, b: self.gb_per_s[self.path(a, b)[0]] * 1e9)

    def explain(self) -> str:
        """Returns all of it as text."""
        lines = [f"a step: {', '.join(program.name for program in self.programs)}", ""]
        rows = [row for program in self.programs for row in program_rows(program, self._places)]
        lines += table(("node", "call", "runs on", "reads"), rows)
        replicas = self.members["inference"]
        lines += ["", f"a publication: {len(self.members['trainer'])} trainers → {len(replicas)} replicas", ""]
        rates = ", ".join(f"{path} {rate:g} GB/s" for path, rate in self.gb_per_s.items())
        told = [("predicted", f"{self.predicted_s:.3g} s of moving, a process at {rates}")]
        lines += [self.plan.explain(path=lambda a, b: self.path(a, b)[0], more=told), ""]
        ways = [(r, path, who, f"{size:,}", why) for r in replicas for path, who, size, why in self.paths(r)]
        lines += table(("replica", "path", "from", "bytes", "why"), ways, frozenset({3}))
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Returns all of it as JSON: programs as `Program.to_json`, links and replicas as lists."""
        links = sorted(self.plan.links.items(), key=lambda link: (-link[1], link[0]))
        busiest, sent = self.plan.busiest_sender()
        bound = self.plan.lower_bound_bytes
        return {
            "members": {place: list(workers) for place, workers in self.members.items()},
            "hosts": dict(self.hosts),
            "programs": [program.to_json() for program in self.programs],
            "links": [{"from": a, "to": b, "bytes": size, "path": self.path(a, b)[0]} for (a, b), size in links],
            "replicas": [
                {"replica": r, "path": path, "from": who.split(", "), "bytes": size, "why": why}
                for r in self.members["inference"]
                for path, who, size, why in self.paths(r)
            ],
            "planned_bytes": self.plan.planned_bytes,
            "lower_bound_bytes": bound,
            "ratio": self.plan.planned_bytes / bound if bound else None,
            "copies": self.plan.count,
            "rounds": self.plan.rounds,
            "bytes_between_machines": self.plan.network_bytes,
            "busiest_sender": {"worker": busiest, "bytes": sent},
            "predicted_s": self.predicted_s,
            "gb_per_s": dict(self.gb_per_s),
        }

    @property
    def _places(self) -> dict[str, Sequence[str]]:
        """Workers by the names that the run's programs place nodes on: slices, pools, and a slice for each replica."""
        return {**{worker: (worker,) for worker in self.members["inference"]}, **self.members}


def parse_host(text: str) -> tuple[str, str]:
    """Reads WORKER=MACHINE; ConfigError where it is not that."""
    worker, equals, machine = text.partition("=")
    if not (worker and equals and machine):
        raise ConfigError(f"--host {text!r}: expected WORKER=MACHINE")
    return worker, machine


def parse_rate(text: str) -> tuple[str, float]:
    """Reads PATH=RATE in GB/s; ConfigError where it is not that."""
    path, _, rate = text.partition("=")
    try:
        found = float(rate)
    except ValueError:
        found = 0.0
    if path not in GB_PER_S or not 0 < found < float("inf"):
        raise ConfigError(f"--gb-per-s {text!r}: expected PATH=RATE, PATH one of {', '.join(GB_PER_S)}, RATE above 0")
    return path, found


def job_plan(
    config: RunConfig, hosts: Mapping[str, str] | None = None, gb_per_s: Mapping[str, float] | None = None
) -> JobPlan:
    """Plans a job as `waypath run` would start it: all workers on this machine, but for those that `hosts` moves.

    `hosts`: machine by worker name, or pattern (`inference-*`); ConfigError where one fits no worker. What `preflight.check` raises
    passes through.
    """
    preflight.check(config)
    model, _ = open_model(config)
    counts = {
        "trainer": config.cluster.trainer_processes,
        "inference": config.cluster.inference_processes,
        "reward": config.cluster.reward_processes,
    }
    members = {role: [f"{role}-{k}" for k in range(count)] for role, count in counts.items()}
    workers = [worker for those in members.values() for worker in those]
    on = dict.fromkeys(workers, HERE)
    for pattern, host in (hosts or {}).items():
        named = fnmatch.filter(workers, pattern)
        if not named:
            raise ConfigError(
                f"--host {pattern}={host}: no worker is called {pattern!r}; there are {', '.join(workers)}"
            )
        on |= dict.fromkeys(named, host)
    mesh = {str(axis): size for axis, size in config.trainer.mesh.items()}
    source = trainer_layout(model, mesh, members["trainer"])
    wanted = [replica_layout(model, replica) for replica in members["inference"]]
    plan = reshard.plan(source.on(on), wanted[0].merged(*wanted[1:]).on(on))
    return JobPlan(config, members, on, plan, parameter_bytes(model), {**GB_PER_S, **(gb_per_s or {})})
