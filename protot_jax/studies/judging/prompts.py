"""Prompts that all models continue, with the true continuation of each.

They are the beginnings of documents that no model was trained on (appendix B.3), or those of a
user's file: a JSON object a line, with "prompt" and "reference".
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from lm_jax.errors import BadInputError
from lm_jax.run.config import config_hash
from lm_jax.text.examples import Examples
from lm_jax.text.lines import read_json_lines
from lm_jax.text.prepared import open_prepared
from lm_jax.text.tokenizer import Tokenizer
from protot_jax.training.saved_run import DATA, TrainedModel

_FIELDS = ("prompt", "reference")
# Fewer cannot be resampled, nor paired with the continuation of another.
LEAST = 2


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts and their true continuations, of equal number.

    Attributes:
      source: origin of the prompts, in words.
      skipped: documents or lines that are too short.
    """

    source: str
    prompts: tuple[str, ...]
    references: tuple[str, ...]
    skipped: int

    @property
    def sha256(self) -> str:
        """Digest of all texts."""
        return config_hash({"prompts": self.prompts, "references": self.references})


def held_out(
    model: TrainedModel, run: Path, *, count: int, prompt_tokens: int, new_tokens: int, seed: int
) -> Prompts:
    """Beginnings of test documents of a run, in random order, cut by its tokenizer.

    Documents of fewer than `prompt_tokens + new_tokens` tokens are skipped.

    Raises:
      BadInputError: fewer than two documents are long enough, or the data cannot be used.
    """
    tokenizer, width = model.tokenizer, prompt_tokens + new_tokens
    data = open_prepared(run / DATA, tokenizer=tokenizer)
    documents = Examples(data, "test", context=width - 1, mode="truncate")
    prompts, references, skipped = [], [], 0
    for number in np.random.default_rng(seed).permutation(documents.count):
        (ids,) = documents.read(np.array([number]))["tokens"].tolist()
        # The id of padding, and that of the end of a document.
        if 0 in ids or tokenizer.eos_id in ids:
            skipped += 1
            continue
        prompts.append(tokenizer.decode(ids[:prompt_tokens], skip_special_tokens=True))
        references.append(continuation(tokenizer, ids[:prompt_tokens], ids[prompt_tokens:]))
        if len(prompts) == count:
            break
    source = f"test documents of {run}, {prompt_tokens} and {new_tokens} tokens"
    return _enough(Prompts(source, tuple(prompts), tuple(references), skipped))


def read(path: Path, *, count: int) -> Prompts:
    """The first prompts of a file of JSON lines; those with an empty text are skipped.

    Raises:
      BadInputError: the file cannot be read, a line is no such object, or there are too few.
    """
    prompts, references, skipped = [], [], 0
    for _, where, tree in read_json_lines(path):
        prompt, reference = _entry(tree, where)
        if not (prompt.strip() and reference.strip()):
            skipped += 1
            continue
        prompts.append(prompt)
        references.append(reference)
        if len(prompts) == count:
            break
    return _enough(Prompts(path.name, tuple(prompts), tuple(references), skipped))


def continuation(tokenizer: Tokenizer, prompt_ids: list[int], new_ids: list[int]) -> str:
    """The text of ids that follow others, with the blank before it, without special tokens."""
    pieces = DecodeStream(skip_special_tokens=True)
    # The text of a token depends on those before: a new word begins with a space.
    for token in prompt_ids:
        pieces.step(tokenizer.backend, token)
    return "".join(pieces.step(tokenizer.backend, token) or "" for token in new_ids)


def _entry(entry: Any, where: str) -> tuple[str, str]:
    prompt, reference = map(entry.get, _FIELDS) if isinstance(entry, dict) else (None, None)
    if not (isinstance(prompt, str) and isinstance(reference, str)):
        raise BadInputError(
            f"{where}: {' and '.join(_FIELDS)} must be strings; correct or remove the line"
        )
    return prompt, reference


def _enough(found: Prompts) -> Prompts:
    if len(found.prompts) < LEAST:
        raise BadInputError(
            f"{found.source}: {len(found.prompts)} can be used and {found.skipped} are too short; "
            f"give at least {LEAST}, or fewer --prompt_tokens and --new_tokens"
        )
    return found
