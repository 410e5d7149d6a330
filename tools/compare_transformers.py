"""Compares a Hugging Face directory in our decoder with `transformers`: logits and greedy tokens. Run by hand.

Two halves, for torch is in no environment of ours:

    python -m waypath.tools.compare_transformers ours MODEL out.npz     (this environment)
    python tools/compare_transformers.py theirs MODEL out.npz           (one with torch and transformers)

The second half loads MODEL with `AutoModelForCausalLM`, prints the largest difference of the float32 logits on fixed prompts and
whether 16 greedy tokens are equal, and exits 1 over `TOLERANCE`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

PROMPTS = ("2+5=7\n9+3=12\n4+4=", "The capital of France is", "Once upon a time there was")
NEW_TOKENS = 16
WIDTH = 48
TOLERANCE = 1e-3


def ours(model: str, out: Path) -> int:
    """Writes token ids, logits float32 [T, V] of each prompt and greedy continuations to `out`."""
    import jax
    import jax.numpy as jnp

    from waypath.workers.models import decoder, hf, tokenizer

    config, text = hf.load_config(model), tokenizer.load(model)
    params = hf.load_params(model, config)

    @jax.jit
    def run(tokens: Any, length: Any) -> Any:
        positions = jnp.arange(WIDTH)[None]
        segments = (positions < length).astype(jnp.int32)
        return decoder.logits(config, params, decoder.forward(config, params, tokens, positions, segments))[0]

    found: dict[str, Any] = {}
    for index, prompt in enumerate(PROMPTS):
        ids = list(text.encode(prompt))
        found[f"ids{index}"] = np.array(ids)
        for step in range(NEW_TOKENS):
            tokens = np.zeros((1, WIDTH), np.int32)
            tokens[0, : len(ids)] = ids
            logits = np.asarray(run(tokens, len(ids)))[: len(ids)]
            if step == 0:
                found[f"logits{index}"] = logits
            ids.append(int(logits[-1].argmax()))
        found[f"greedy{index}"] = np.array(ids)
    np.savez(out, **found)
    return 0


def theirs(model: str, out: Path) -> int:
    """Loads `model` in transformers and compares with `out`."""
    import torch  # type: ignore[import-not-found,unused-ignore]
    import transformers  # type: ignore[import-not-found,unused-ignore]

    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    have, worst, equal = np.load(out), 0.0, True
    for index, prompt in enumerate(PROMPTS):
        ids = have[f"ids{index}"]
        equal &= tokenizer(prompt, add_special_tokens=False)["input_ids"] == ids.tolist()
        with torch.no_grad():
            logits = reference(torch.tensor(ids)[None]).logits[0].numpy()
            tokens = reference.generate(
                torch.tensor(ids)[None], max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
            )[0].tolist()
        worst = max(worst, float(np.abs(logits - have[f"logits{index}"]).max()))
        equal &= tokens == have[f"greedy{index}"].tolist()
    print(f"{model}: largest logit difference {worst:.2e}; token ids and {NEW_TOKENS} greedy tokens equal: {equal}")
    return 0 if worst < TOLERANCE and equal else 1


if __name__ == "__main__":
    side, directory, file = sys.argv[1:]
    sys.exit((ours if side == "ours" else theirs)(directory, Path(file)))
