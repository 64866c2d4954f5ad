"""Text of the pair: documents of a corpus and, in a stated share, prompts of the circuit tasks.

    pretrain.jsonl    read by the dense model
    posttrain.jsonl   other documents and other prompts, for post-training and the control

A row is a document with its text. One of prompts also has the name of their task and their list:
several of one task, each a clean prompt followed by a right continuation. Documents of the source
come first, so an evaluation of the first few hundred held-out documents is one of the source alone.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.run import stop
from lm_jax.run.files import load_json, replace_file
from lm_jax.text import corpora
from sparse_jax.circuits.generators import GENERATORS
from sparse_jax.studies.pair.settings import TextConfig

PRETRAIN, POSTTRAIN = "pretrain.jsonl", "posttrain.jsonl"
# Draws for each prompt, after which a task has no more different ones.
_DRAWS = 50


def write_corpora(config: TextConfig, folder: Path) -> None:
    """Writes both files into a folder unless they are there, with `posttrain.jsonl` last.

    Raises:
      BadInputError: the source is missing or holds too few documents; a task has too few prompts.
      StorageError: a file cannot be written.
      StoppedError: the command was asked to stop.
    """
    if (folder / POSTTRAIN).exists():
        return
    documents: dict[str, list[str]] = {PRETRAIN: [], POSTTRAIN: []}
    for count, text in enumerate(_documents(config)):
        if config.documents and count >= config.documents:
            break
        documents[POSTTRAIN if _hash(text, config.seed) < config.posttrain_share else PRETRAIN] += [
            text
        ]
    if not all(documents.values()):
        raise BadInputError(
            f"{config.source} has {sum(map(len, documents.values()))} documents, too few to share "
            "between pretraining and post-training; give a larger source"
        )
    drawn = {name: prompts(name, config.seed) for name in config.tasks}
    folder.mkdir(parents=True, exist_ok=True)
    for file, texts in documents.items():
        rows: list[dict[str, Any]] = [{"text": text} for text in texts]
        share = config.task_share if config.tasks else 0.0
        count = round(len(texts) * share / (1 - share))
        for k in range(count):
            stop.check("while drawing prompts")
            name = config.tasks[k % len(config.tasks)]
            several = list(itertools.islice(drawn[name], config.prompts_per_document))
            rows.append({"text": "\n".join(several), "task": name, "prompts": several})
        with replace_file(folder / file) as output:
            for row in rows:
                output.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def read_prompts(files: Iterable[Path]) -> frozenset[str]:
    """All prompts of files of `write_corpora`, each with its continuation.

    Raises:
      BadInputError: a file cannot be read, or has other contents.
    """
    prompts: set[str] = set()
    for file in files:
        try:
            with file.open(encoding="utf-8-sig") as lines:
                for line in filter(str.strip, lines):
                    prompts.update(load_json(line).get("prompts", ()))
        except OSError as error:
            raise BadInputError(f"{file}: {error.strerror}; give a text of a pair") from error
        except (ValueError, AttributeError) as error:
            raise BadInputError(f"{file} has no JSON object a line; restore it") from error
    return frozenset(prompts)


def _documents(config: TextConfig) -> Iterator[str]:
    for _, text in corpora.usable(corpora.documents(config.source), Counter()):
        yield text


def prompts(name: str, seed: int) -> Iterator[str]:
    """Different prompts of one task, without end, each with one of its right continuations."""
    rng = np.random.default_rng([seed, *name.encode()])
    written: set[str] = set()
    while True:
        for _ in range(_DRAWS):
            example = GENERATORS[name].draw(rng)
            # Two prompts that differ in their continuation alone are one.
            if example.clean not in written:
                break
        else:
            raise BadInputError(
                f"task {name} has no more than about {len(written)} different prompts; lower "
                "config.text.task_share or config.text.prompts_per_document"
            )
        written.add(example.clean)
        yield example.clean + str(rng.choice(example.answers))


def _hash(text: str, seed: int) -> float:
    digest = hashlib.blake2b(
        text.encode(), digest_size=8, key=b"pair" + seed.to_bytes(8, "little")
    ).digest()
    return int.from_bytes(digest, "little") / 2**64
