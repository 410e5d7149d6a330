"""What all benchmarks print and write: a table, JSON with machine facts, a plot.

Owns the form `{bench, machine, rows: [{case, metric, value, unit, baseline, baseline_value, ratio}]}`. Must not know what is measured.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from waypath.proto.errors import ConfigError

Row = dict[str, Any]


def machine() -> dict[str, Any]:
    """Returns what the numbers depend on."""
    return {
        "cpu_count": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "jax": metadata.version("jax"),
        "grpcio": metadata.version("grpcio"),
        "load_average_1m": round(os.getloadavg()[0], 2),
    }


def row(case: str, metric: str, value: float, unit: str, name: str = "", base: float | None = None) -> Row:
    """One line of a result; `ratio` is value over baseline, where there is one."""
    return {
        "case": case,
        "metric": metric,
        "value": round(value, 4),
        "unit": unit,
        "baseline": name,
        "baseline_value": None if base is None else round(base, 4),
        "ratio": round(value / base, 4) if base else None,
    }


def p99(values: Sequence[float]) -> float:
    """The 99th percentile, of few values the largest."""
    return max(values) if len(values) < 2 else statistics.quantiles(values, n=100, method="inclusive")[98]


def show(console: Console, rows: Sequence[Row]) -> None:
    """Prints rows as a table."""
    table = Table("case", "metric", "value", "baseline", "baseline value", "ratio", box=None, padding=(0, 2))
    for line in rows:
        table.add_row(
            line["case"],
            line["metric"],
            f"{line['value']:g} {line['unit']}",
            line["baseline"],
            "" if line["baseline_value"] is None else f"{line['baseline_value']:g}",
            "" if line["ratio"] is None else f"{line['ratio']:.3f}",
        )
    console.print(table)


def write(json_file: Path | None, bench: str, rows: Sequence[Row], facts: Mapping[str, Any], **more: Any) -> None:
    """Writes the JSON form where it is asked for."""
    if json_file is not None:
        value = {"bench": bench, "machine": facts, "rows": list(rows), **more}
        json_file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def plot(file: Path | None, rows: Sequence[Row], title: str) -> None:
    """Draws values and baselines as bars, by unit; ConfigError where matplotlib is not installed."""
    if file is None:
        return
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("--plot needs matplotlib", remedy='Install it: pip install "waypath[bench]"') from None
    units = list(dict.fromkeys(line["unit"] for line in rows))
    figure, axes = pyplot.subplots(len(units), 1, figsize=(9, 1 + 0.32 * len(rows) + len(units)), squeeze=False)
    for axis, unit in zip(axes[:, 0], units, strict=True):
        mine = [line for line in rows if line["unit"] == unit]
        names = [f"{line['case']}: {line['metric']}" for line in mine]
        axis.barh(names, [line["value"] for line in mine], height=0.6)
        axis.plot([line["baseline_value"] for line in mine], names, "k|", markersize=12, label="baseline")
        axis.set_xlabel(unit)
        axis.invert_yaxis()
    axes[0, 0].set_title(title)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
