"""The `waypath` command.

Owns the arguments, the exit codes and which helper does what. Must not know how processes are kept or drawn.
Exit codes: 0 done, 1 the run or the request failed (the cause is printed), 2 a wrong command line or
configuration, 130 interrupted.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from waypath.controller.client.client import Client, RunResult, connect
from waypath.controller.runs import recorded
from waypath.controller.runs.disk import read_lines
from waypath.proto import config as configs
from waypath.proto.config import RunConfig
from waypath.proto.errors import ConfigError, NotFoundError, UserError, WaypathError
from waypath.tools import plan as plans
from waypath.tools import preflight, progress, report
from waypath.tools.follow import FALLBACK_STOP_S, Interrupts, follow, recorded_config, stop_limit_s
from waypath.tools.launch import InterruptedStart, LocalCluster, find_cluster

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
BENCHES = ("dispatch", "grpo", "scale", "transfer")
ENDED = ("done", "failed", "cancelled", "interrupted")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    command: Callable[[argparse.Namespace, Console], int] = arguments.command
    try:
        return command(arguments, console)
    except (InterruptedStart, KeyboardInterrupt):
        print("interrupted; nothing is left running", file=sys.stderr)
        return INTERRUPTED
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except WaypathError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        sys.stderr.close()
        return FAILED


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="waypath", description="RL post-training of language models in JAX, from one controller."
    )
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, function: Callable[[argparse.Namespace, Console], int], about: str) -> Any:
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(command=function)
        return command

    up = add("up", up_command, "Start a controller and workers on this machine and keep them until Ctrl-C.")
    up.add_argument("config", metavar="CONFIG")
    up.add_argument(
        "--listen", default="127.0.0.1:7777", metavar="ADDR", help="port 0: a free one (default: %(default)s)"
    )
    _set_option(up)

    run = add(
        "run",
        run_command,
        "Start a run and follow it to its end, with a local cluster unless --controller is given.",
    )
    run.add_argument("config", metavar="CONFIG", nargs="?")
    run.add_argument("--resume", metavar="RUN", help="go on with an earlier run from its last checkpoint")
    run.add_argument("--plain", action="store_true", help="one line a step, also on a terminal")
    _set_option(run)
    _cluster_options(run)

    plan = add("plan", plan_command, "What a run would do and move, without starting anything.")
    plan.add_argument("config", metavar="CONFIG")
    plan.add_argument("--json", action="store_true", help="programs, links and figures as JSON")
    plan.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="WORKER=MACHINE",
        help="as if the worker (or pattern, such as 'inference-*') were on another machine",
    )
    plan.add_argument(
        "--gb-per-s",
        action="append",
        default=[],
        metavar="PATH=RATE",
        help="what a process receives by a path (shared or stream), for the prediction",
    )
    _set_option(plan)

    status = add("status", status_command, "What the cluster does now.")
    status.add_argument("--json", action="store_true", help="the controller's answer as it is")
    _cluster_options(status)
    _cluster_options(add("runs", runs_command, "List the runs."))
    watch = add("watch", watch_command, "Follow a run; Ctrl-C leaves it running.")
    watch.add_argument("--plain", action="store_true", help="one line a step, also on a terminal")
    cancel = add("cancel", cancel_command, "Stop a run after its step in progress, with a checkpoint.")
    cancel.add_argument("--no-checkpoint", action="store_true", help="stop without writing one")
    export = add("export", export_command, "Write a run's newest parameters as a Hugging Face directory.")
    export.add_argument("--out", required=True, metavar="DIR")
    for command in (watch, cancel, export):
        command.add_argument("run", metavar="RUN")
        _cluster_options(command)

    bench = add("bench", bench_command, "Run a benchmark; its baselines are measured in the same run.")
    bench.add_argument("name", metavar="NAME", help=", ".join(BENCHES))
    bench.add_argument("--json", metavar="FILE", help="write the result there")
    bench.add_argument("--plot", metavar="FILE", help="draw it there (PNG or SVG; needs matplotlib)")
    bench.add_argument("--quick", action="store_true", help="a smoke run, for no figures")
    return top


def _set_option(command: Any) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of CONFIG, such as steps=30",
    )


def _cluster_options(command: Any) -> None:
    command.add_argument("--controller", metavar="ADDR", help="HOST:PORT of a controller")
    command.add_argument("--token-file", metavar="FILE", help="the cluster's token")
    command.add_argument("--run-dir", default="runs", metavar="DIR", help="where local runs are (default: %(default)s)")


def _client(arguments: argparse.Namespace) -> Client:
    if arguments.controller is None:
        return find_cluster(Path(arguments.run_dir))
    if arguments.token_file is None:
        raise ConfigError("--controller needs --token-file", remedy="Pass the file that the launcher wrote")
    return connect(arguments.controller, token_file=Path(arguments.token_file))


def _config(arguments: argparse.Namespace) -> RunConfig:
    """The configuration that CONFIG and --set say, or the recorded one of the run to resume; checked."""
    overrides = dict(configs.parse_override(text) for text in arguments.set)
    if not arguments.resume:
        if arguments.config is None:
            raise ConfigError("give a CONFIG, or --resume RUN")
        return configs.load(arguments.config, overrides)
    if overrides:
        raise ConfigError("a resumed run keeps its configuration: --set and --resume exclude each other")
    if arguments.config is None:
        return _recorded(Path(arguments.run_dir), arguments.resume)
    given = configs.load(arguments.config)
    config = _recorded(Path(given.storage.run_dir), arguments.resume)
    if changes := config_changes(config, given):
        raise ConfigError(
            f"a resumed run keeps its configuration, and {arguments.config} differs from it: {changes}",
            remedy=f"leave it out: waypath run --resume {arguments.resume} --run-dir {given.storage.run_dir}",
        )
    return config


def _recorded(run_dir: Path, run_id: str) -> RunConfig:
    directory = recorded.find(run_dir, run_id)
    recorded.check_idle(directory)
    return configs.load(directory / "config.toml", {"storage.run_dir": str(run_dir)})


def config_changes(recorded: RunConfig, given: RunConfig) -> str:
    """What `given` would change, as "steps: 7 → 9"; "" where nothing."""
    before, now = _flat(recorded.to_json()), _flat(given.to_json())
    keys = sorted(before.keys() | now.keys())
    return "; ".join(f"{key}: {before.get(key)} → {now.get(key)}" for key in keys if before.get(key) != now.get(key))


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def run_command(arguments: argparse.Namespace, console: Console) -> int:
    """`waypath run`: with a cluster of its own, or on a controller that is up."""
    if arguments.controller is not None:
        if arguments.resume and (arguments.config is not None or arguments.set):
            raise ConfigError(
                "a resumed run keeps its configuration, which its controller has: leave CONFIG and --set out"
            )
        config = None if arguments.resume else _config(arguments)
        with _client(arguments) as client, Interrupts() as interrupts:
            run = client.start_run(config, resume=arguments.resume)
            with progress.make_view(console, plain=arguments.plain) as view:
                view.begin(run.id, config.steps if config else 0)
                result = follow(client, run, view, interrupts, stop_on_interrupt=False)
            return _close(console, client, run.id, result, _directory(client, run.id, Path(arguments.run_dir)))
    config = _config(arguments)
    preflight.check(config)
    with Interrupts() as interrupts:
        return _run_locally(config, arguments, console, interrupts)


def _run_locally(config: RunConfig, arguments: argparse.Namespace, console: Console, interrupts: Interrupts) -> int:
    started = time.monotonic()
    view = progress.make_view(console, plain=arguments.plain)
    cluster = LocalCluster(config, on_event=lambda line: view.event(line), interrupted=interrupts)
    with cluster, connect(cluster.address, cluster.token) as client:
        cluster.wait_ready(client)
        starting_s, phases = time.monotonic() - started, report.PhaseClock()
        run = client.start_run(None if arguments.resume else config, resume=arguments.resume)
        directory = cluster.run_dir / run.id
        cluster.adopt_logs(directory)
        console.print(report.summary_table(cluster.rows()))
        with view:
            view.begin(run.id, config.steps)
            result = follow(
                client, run, view, interrupts, failure=cluster.failure, deaths=cluster.trainer_deaths, phases=phases
            )
        windows = phases.windows(time.time_ns())
        code = _close(console, client, run.id, result, directory, windows=windows, starting_s=starting_s)
        if code != DONE:
            place = "" if cluster.run_dir == Path("runs").absolute() else f" --run-dir {report.shown(cluster.run_dir)}"
            console.print(f"go on with: waypath run --resume {run.id}{place}", highlight=False, soft_wrap=True)
        return INTERRUPTED if interrupts() and code != DONE else code


def _close(
    console: Console,
    client: Client,
    run_id: str,
    result: RunResult | None,
    directory: Path,
    *,
    windows: Sequence[report.Window] = (),
    starting_s: float = 0.0,
) -> int:
    if result is None:
        console.print(f"run {run_id} goes on; follow it with: waypath watch {run_id}", highlight=False)
        return INTERRUPTED
    try:
        samples = client.run(run_id).samples()
    except WaypathError:  # the controller is gone; what it wrote is there
        samples = list(read_lines(directory / "samples.jsonl"))
    report.report(console, result, directory, samples, windows=windows, starting_s=starting_s)
    return DONE if result.status == "done" else FAILED


def _directory(client: Client, run_id: str, run_dir: Path) -> Path:
    for run in client.runs():
        if run["run_id"] == run_id and run["directory"]:
            return Path(run["directory"])
    return run_dir / run_id


def up_command(arguments: argparse.Namespace, console: Console) -> int:
    """`waypath up`: a cluster until Ctrl-C; its runs are stopped with a checkpoint."""
    config = configs.load_cluster(arguments.config, dict(configs.parse_override(text) for text in arguments.set))
    preflight.check(config)
    with Interrupts() as interrupts:
        view = progress.View(console)
        cluster = LocalCluster(
            config,
            restart_trainers=True,
            listen=arguments.listen,
            on_event=view.event,
            interrupted=interrupts,
        )
        with cluster, connect(cluster.address, cluster.token) as client:
            cluster.wait_ready(client)
            console.print(report.summary_table(cluster.rows()))
            view.event(f"controller at {cluster.address}, token in {report.shown(cluster.token_file)}")
            view.event(
                f"start a run: waypath run CONFIG --controller {cluster.address}"
                f" --token-file {report.shown(cluster.token_file)}"
            )
            while not interrupts() and cluster.failure() is None:
                cluster.supervisor.pause(0.2)
            if cause := cluster.failure():
                print(f"error: the cluster ended: {cause}", file=sys.stderr)
                return FAILED
            _stop_runs(client, view)
        view.event("stopped; nothing is left running")
        return INTERRUPTED


def _stop_runs(client: Client, view: progress.View) -> None:
    """Cancel what runs with a checkpoint, and wait for it; a second Ctrl-C breaks the wait."""
    limits: dict[str, float] = {}
    for run_id in _active(client):
        try:
            limits[run_id] = stop_limit_s(recorded_config(client, run_id))
        except WaypathError as error:
            limits[run_id] = FALLBACK_STOP_S
            view.event(f"could not read the run's configuration, so the default deadlines hold: {error}")
        view.event(f"stopping run {run_id} with a checkpoint (Ctrl-C again kills)")
        client.run(run_id).cancel(checkpoint=True)
    began = time.monotonic()
    while left := limits.keys() & _active(client):
        limit_s = max(limits[run_id] for run_id in left)
        if time.monotonic() - began > limit_s:
            view.event(f"run {', '.join(sorted(left))} did not stop within {limit_s:.0f} s")
            return
        time.sleep(0.2)


def _active(client: Client) -> set[str]:
    """The runs that this very controller has now; others of its folder may be another's."""
    return {str(run["run_id"]) for run in client.status()["runs"] if run["status"] not in ENDED}


def plan_command(arguments: argparse.Namespace, console: Console) -> int:
    """`waypath plan`: the programs of a step and what a publication moves."""
    config = configs.load(arguments.config, dict(configs.parse_override(text) for text in arguments.set))
    hosts = dict(plans.parse_host(text) for text in arguments.host)
    found = plans.job_plan(config, hosts, dict(plans.parse_rate(text) for text in arguments.gb_per_s))
    print(json.dumps(found.to_json(), indent=2) if arguments.json else found.explain())
    return DONE


def status_command(arguments: argparse.Namespace, console: Console) -> int:
    """`waypath status`."""
    with _client(arguments) as client:
        status = client.status()
        if arguments.json:
            print(json.dumps(status, indent=2))
            return DONE
        console.print(f"controller at {client.address}", highlight=False)
        console.print(progress.worker_table(status))
        if path := progress.publication_path(status):
            console.print(f"policies are published{path}", highlight=False)
        for run in status["runs"]:
            if run["status"] not in ENDED:
                console.print(f"run {run['run_id']} {run['status']}, {run['steps']} steps", highlight=False)
    return DONE


def runs_command(arguments: argparse.Namespace, console: Console) -> int:
    """`waypath runs`: from the controller, or from the folder where none is up."""
    try:
        with _client(arguments) as client:
            runs = client.runs()
    except NotFoundError:
        if arguments.controller is not None:
            raise
        runs = recorded.listing(Path(arguments.run_dir))
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("run", "status", "steps", "cause"):
        table.add_column(heading, overflow="fold")
    for run in runs:
        table.add_row(run["run_id"], run["status"], str(run["steps"]), run["cause"] or "")
    console.print(table)
    return DONE


def watch_command(arguments: argparse.Namespace, console: Console) -> int:
    """`waypath watch`: attach, follow, detach on Ctrl-C."""
    with _client(arguments) as client, Interrupts() as interrupts:
        known = {run["run_id"] for run in client.runs()}
        if arguments.run not in known:
            raise NotFoundError(f"no run {arguments.run!r}; there are: {', '.join(sorted(known)) or 'none'}")
        directory = _directory(client, arguments.run, Path(arguments.run_dir))
        recorded = directory / "config.toml"
        steps = configs.load(recorded).steps if recorded.exists() else 0
        run = client.run(arguments.run)
        with progress.make_view(console, plain=arguments.plain) as view:
            view.begin(run.id, steps)
            result = follow(client, run, view, interrupts, stop_on_interrupt=False)
        return _close(console, client, run.id, result, directory)


def cancel_command(arguments: argparse.Namespace, console: Console) -> int:
    """`waypath cancel`."""
    with _client(arguments) as client:
        client.run(arguments.run).cancel(checkpoint=not arguments.no_checkpoint)
    console.print(f"run {arguments.run} stops after its step in progress", highlight=False)
    return DONE


def export_command(arguments: argparse.Namespace, console: Console) -> int:
    """`waypath export`: by the cluster; where none is up, a copy of what the run exported at its end."""
    try:
        with _client(arguments) as client:
            written = client.run(arguments.run).export(arguments.out)
    except NotFoundError:
        if arguments.controller is not None:
            raise
        written = copy_export(Path(arguments.run_dir), arguments.run, Path(arguments.out))
    console.print(f"wrote {written}", highlight=False, soft_wrap=True)
    return DONE


def copy_export(run_dir: Path, run_id: str, out: Path) -> str:
    """Copy a finished run's export to `out`, which must not exist or be empty."""
    directory = recorded.find(run_dir, run_id)
    source = recorded.export_of(recorded.result(directory))
    if source is None:
        raise NotFoundError(
            f"{directory} has no exported model, and no cluster is up to write one",
            remedy=f"Finish it with `waypath run --resume {run_id}`",
        )
    recorded.copy_export(source, out)
    return str(out)


def bench_command(arguments: argparse.Namespace, console: Console) -> int:
    """`waypath bench NAME`: `main(json_file, plot, quick) -> int` of `waypath.tools.bench.NAME`."""
    if arguments.name not in BENCHES:
        raise ConfigError(f"no benchmark {arguments.name!r}; there are: {', '.join(BENCHES)}")
    module = importlib.import_module(f"waypath.tools.bench.{arguments.name}")
    json_file, plot = (Path(name) if name else None for name in (arguments.json, arguments.plot))
    return int(module.main(json_file, plot, arguments.quick))


if __name__ == "__main__":
    sys.exit(main())
