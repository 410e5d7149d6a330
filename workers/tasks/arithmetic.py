"""The arithmetic task: one sum after two solved ones, or as a chat question.

Owns its rows, the held-out rule and the exact-match reward. Must not know jax or the run. Called through
`load_task("arithmetic")`.

Held-out rule: an unordered pair {a, b} is held out when the CRC-32 of "lo,hi" is 0 mod 4 (21 of the 81 pairs
of 1..9), so that 3+8 and 8+3 fall on the same side, for every operator, seed and range. The pairs that the
prompts show solved are never held out.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any, Literal

from waypath.workers.tasks.base import Row, Sample, Split, first_line

__all__ = ["ArithmeticTask"]

_SHOWN = {"+": ((2, 5), (9, 3)), "-": ((7, 2), (9, 6))}
_NUMBER = re.compile(r"-?\d+")


class ArithmeticTask:
    """Sums (and differences that are not negative) of low..high.

    form "completion": `2+5=7\\n9+3=12\\n{a}+{b}=`, right if the first line of the completion is exactly the
    answer. form "chat": SmolLM2's chat template around "What is {a}+{b}?", right if the last number of the
    first line is.
    """

    def __init__(
        self,
        operators: Sequence[str] = ("+",),
        low: int = 1,
        high: int = 9,
        form: Literal["completion", "chat"] = "completion",
        system: str = "You answer with one number.",
    ) -> None:
        unknown = [op for op in operators if op not in _SHOWN]
        if unknown or not operators:
            raise ValueError(f"operators {list(operators)}: expected one or both of '+' and '-'")
        if not 0 <= low <= high:
            raise ValueError(f"low {low}, high {high}: expected 0 <= low <= high")
        if form not in ("completion", "chat"):
            raise ValueError(f"form {form!r}: expected 'completion' or 'chat'")
        self._form = form
        self._system = system
        self._rows: dict[Split, list[Row]] = {"train": [], "eval": []}
        for op in operators:
            for a in range(low, high + 1):
                for b in range(low, high + 1):
                    if op == "-" and a < b:
                        continue
                    row = {
                        "prompt_id": f"{a}{op}{b}",
                        "a": a,
                        "op": op,
                        "b": b,
                        "answer": str(a + b if op == "+" else a - b),
                    }
                    self._rows["eval" if _held_out(a, b) else "train"].append(row)

    def rows(self, split: Split) -> Sequence[Row]:
        """Rows {prompt_id "a+b", a, op, b, answer} of "train" or "eval", in order of operator, a, b."""
        return self._rows[split]

    def prompt(self, row: Row) -> str:
        """The prompt text of a row, ready for the tokenizer (the chat form includes its special tokens)."""
        a, op, b = row["a"], row["op"], row["b"]
        if self._form == "chat":
            return (
                f"<|im_start|>system\n{self._system}<|im_end|>\n"
                f"<|im_start|>user\nWhat is {a}{op}{b}?<|im_end|>\n<|im_start|>assistant\n"
            )
        solved = "".join(f"{x}{op}{y}={x + y if op == '+' else x - y}\n" for x, y in _SHOWN[op])
        return f"{solved}{a}{op}{b}="

    def reward(self, samples: Sequence[Sample], **options: Any) -> list[float]:
        """1.0 for the right answer, else 0.0. Takes no options."""
        if options:
            raise TypeError(f"arithmetic's reward takes no options; found {sorted(options)}")
        return [float(self._answer(sample.completion) == sample.row["answer"]) for sample in samples]

    def _answer(self, completion: str) -> str | None:
        line = first_line(completion)
        if self._form == "completion":
            return line
        numbers = _NUMBER.findall(line)
        return numbers[-1] if numbers else None


def _held_out(a: int, b: int) -> bool:
    low, high = min(a, b), max(a, b)
    if any({low, high} == {x, y} for pairs in _SHOWN.values() for x, y in pairs):
        return False
    return zlib.crc32(f"{low},{high}".encode()) % 4 == 0
