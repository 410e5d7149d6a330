"""A task from a JSON-lines file of prompts and answers, with a verifier.

Owns reading the file, its train/eval split and the verifiers. Must not know jax or the run. Called through
`load_task("jsonl:FILE")`. Each line is an object with `prompt` (text) and `answer` (text, or a number for the
numeric verifier), and may have `prompt_id` and anything else, which reaches reward functions as `sample.row`.

Split: with `eval_file`, that file is the eval split. Without, the distinct prompts are ordered by CRC-32 and
the first of every `eval_every` are held out, so that a prompt that occurs twice stays on one side.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from waypath.proto.errors import TaskError
from waypath.workers.tasks.base import Row, Sample, Split, first_line

__all__ = ["VERIFIERS", "JsonlTask", "exact", "numeric", "regex"]

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def exact(completion: str, answer: Any) -> bool:
    """The first line of the completion is the answer, but for white space around it."""
    return first_line(completion.lstrip()).strip() == str(answer).strip()


def regex(completion: str, answer: Any) -> bool:
    """The answer, a regular expression, matches somewhere in the completion."""
    return re.search(str(answer), completion) is not None


def numeric(completion: str, answer: Any, tolerance: float = 1e-6) -> bool:
    """The last number of the completion equals the answer to a relative (below 1: absolute) tolerance."""
    numbers = _NUMBER.findall(completion)
    if not numbers:
        return False
    found, wanted = float(numbers[-1].replace(",", "")), _number(answer)
    return math.isfinite(found) and abs(found - wanted) <= tolerance * max(1.0, abs(wanted))


VERIFIERS: dict[str, Callable[[str, Any], bool]] = {"exact": exact, "regex": regex, "numeric": numeric}


class JsonlTask:
    """Prompts and answers of a file. `template` may wrap each prompt, e.g. "Q: {prompt}\\nA:"."""

    def __init__(
        self,
        path: str,
        verifier: str = "exact",
        eval_file: str | None = None,
        eval_every: int = 10,
        template: str = "{prompt}",
    ) -> None:
        if verifier not in VERIFIERS:
            raise ValueError(f"verifier {verifier!r}: expected one of {', '.join(VERIFIERS)}")
        if eval_every < 2:
            raise ValueError(f"eval_every {eval_every}: expected 2 or more")
        if "{prompt}" not in template:
            raise ValueError(f"template {template!r}: it must contain {{prompt}}")
        self._verifier = verifier
        self._template = template
        rows = _read(path, verifier)
        if eval_file is not None:
            self._rows: dict[Split, list[Row]] = {"train": rows, "eval": _read(eval_file, verifier)}
            return
        prompts = sorted({row["prompt"] for row in rows}, key=lambda text: (zlib.crc32(text.encode()), text))
        held_out = set(prompts[: len(prompts) // eval_every])
        self._rows = {
            "train": [row for row in rows if row["prompt"] not in held_out],
            "eval": [row for row in rows if row["prompt"] in held_out],
        }

    def rows(self, split: Split) -> Sequence[Row]:
        """A split's objects, in file order, each with a prompt_id (its line number if it has none)."""
        return self._rows[split]

    def prompt(self, row: Row) -> str:
        """The row's prompt in the template."""
        return self._template.replace("{prompt}", row["prompt"])

    def reward(self, samples: Sequence[Sample], **options: Any) -> list[float]:
        """1.0 where the verifier accepts, else 0.0. Options go to the verifier (numeric: tolerance)."""
        verify = VERIFIERS[self._verifier]
        return [float(verify(sample.completion, sample.row["answer"], **options)) for sample in samples]


def _number(value: Any) -> float:
    return float(str(value).replace(",", ""))


def _read(path: str, verifier: str) -> list[Row]:
    file = Path(path)
    if not file.is_file():
        raise TaskError(f"task.name = 'jsonl:{path}': no such file; relative paths start at {Path.cwd()}")
    rows: list[Row] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            rows.append(_row(line, f"{path}:{number}", number, verifier))
    if not rows:
        raise TaskError(f"{path}: no rows; each line is an object with 'prompt' and 'answer'")
    return rows


def _row(line: str, where: str, number: int, verifier: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or "answer" not in row:
        raise TaskError(
            f"{where}: expected an object with the text 'prompt' and an 'answer'; found {line.strip()[:80]}"
        )
    answer = row["answer"]
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        raise TaskError(f"{where}: 'answer' is {type(answer).__name__}; expected text or a number")
    try:
        if verifier == "regex":
            re.compile(str(answer))
        elif verifier == "numeric" and not math.isfinite(_number(answer)):
            raise ValueError("not finite")
    except (re.error, ValueError) as error:
        raise TaskError(f"{where}: answer {answer!r} does not suit the verifier {verifier!r} ({error})") from error
    row.setdefault("prompt_id", str(number))
    return row
