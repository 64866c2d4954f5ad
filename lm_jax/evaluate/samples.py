"""Text that a model samples itself, as a corpus: `samples:MODEL`.

On such text the model is at its optimum: its expected loss is its own entropy, and that of any
other model is higher by exactly KL(model || other). Training cannot teach it the text, so that a
loss above it is a cost, whatever corpus the model was trained on.

Rows are sampled at temperature 1 from the token that begins a text, without an end. Parts of them
lie in the user's cache by the identity of the model, the length of a row and the seed: sampling
that was stopped goes on, and a corpus of more tokens begins with the rows of one of less.
"""

from collections import Counter
from collections.abc import Iterator
import dataclasses
from pathlib import Path

import jax
import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.model.decode import generate
from lm_jax.model.sampling import InverseSampling
from lm_jax.run import processes, progress, stop, user_cache
from lm_jax.run.files import content_digest, replace_file
from lm_jax.text.corpora import corpus_inputs
from lm_jax.text.preparation import CorpusConfig
from lm_jax.text.prepared import MANIFEST, EncodedDocument, write_documents
from lm_jax.text.splits import split_of, split_point
from lm_jax.text.token_files import id_dtype
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.load import OpenedModel, Pretrained, is_there, open_pretrained

KIND = "samples"
_SAMPLING = InverseSampling(temperature=1.0)
# Rows of a part: enough for the products to be wide, and a stop waits for one part.
_ROWS = 128


def model_of(corpus: CorpusConfig) -> str | None:
    """The model whose samples a corpus is; None for any other corpus."""
    kind, _, model = corpus.source.partition(":")
    return model if kind == KIND else None


def sampled_inputs(corpus: CorpusConfig) -> dict[str, str]:
    """The identity of the text that a training reads: of `samples:MODEL`, that of the model."""
    text = corpus_inputs({"config.corpus": corpus.source})
    model = model_of(corpus)
    if model is not None and is_there(model):
        text["config.corpus"] = open_pretrained(model).identity.text
    return text


def prepare_samples(
    folder: Path, corpus: CorpusConfig, *, context: int, tokenizer: Tokenizer | None
) -> None:
    """Prepares a corpus `samples:MODEL` in `folder`, unless it is prepared.

    `prepare_on_first` then opens the folder. The splits are those of the rows' hashes.

    Args:
      folder: the prepared folder.
      corpus: the corpus, whose `max_tokens` says how many tokens are sampled.
      context: length of the model's input in a training, in ids; a row has one more.
      tokenizer: the tokenizer of the model that is to read the ids.

    Raises:
      UsageError: `max_tokens` is 0, or the model has too few positions.
      BadInputError: there is no such model, it has no tokenizer or another one, or no token that
        begins a text.
      StoppedError: the command was asked to stop; parts that are done are kept.
    """
    model = model_of(corpus)
    # All processes decide alike: the first may be ready before another one looks.
    if model is None or processes.on_first((folder / MANIFEST).is_file):
        return
    opened = open_pretrained(model)
    own, begin = _begin(opened, model)
    if tokenizer is None or tokenizer.sha256 != own.sha256:
        raise BadInputError(
            f"{model} samples ids of a tokenizer that the model of config.model does not have; "
            "sample a model with its tokenizer"
        )
    if not corpus.max_tokens:
        raise UsageError(
            f"config.corpus.max_tokens = 0 samples without end; give the number of tokens that "
            f"{model} shall sample"
        )
    length = context + 1
    if length > opened.cfg.max_length:
        raise UsageError(
            f"config.context = {context} needs rows of {length} tokens, and {model} samples at "
            f"most {opened.cfg.max_length}; lower it"
        )

    def prepare() -> None:
        rows = sampled(
            opened, begin, rows=-(-corpus.max_tokens // length), length=length, seed=corpus.seed
        )
        documents = (
            EncodedDocument(split_of(split_point(data, corpus.seed), corpus.splits), ids, data)
            for ids, data in ((row.tolist(), row.astype("<u4").tobytes()) for row in rows)
        )
        content = {
            "seed": corpus.seed,
            "sources": {"samples of": opened.identity.text},
            "notes": {"corpus": dataclasses.asdict(corpus)},
        }
        write_documents(folder, documents, own, corpus.splits, Counter(), content)

    processes.on_first(prepare)


def sampled(
    opened: OpenedModel, begin: int, *, rows: int, length: int, seed: int
) -> Iterator[np.ndarray]:
    """Rows of ids `[length]` that a model samples, out of the cache where they are there.

    Args:
      opened: the model, whose weights are read where a part is missing.
      begin: id of the token that every row begins with.
      rows: number of rows.
      length: number of tokens of a row.
      seed: random seed.

    Raises:
      StoppedError: the command was asked to stop.
      StorageError: the cache cannot be written.
    """
    settings = {"model": opened.identity.text, "begin": begin, "length": length, "seed": seed}
    place = user_cache.folder() / KIND / content_digest(settings)[:16]
    place.mkdir(parents=True, exist_ok=True)
    parts = [place / f"{part:06d}.npy" for part in range(-(-rows // _ROWS))]
    done = sum(part.is_file() for part in parts)
    loaded: Pretrained | None = None
    with progress.track("samples", len(parts), unit="parts", done=done) as advance:
        for number, part in enumerate(parts):
            if not part.is_file():
                stop.check(f"after {number} of {len(parts)} parts of samples")
                loaded = loaded or opened.load()
                key = jax.random.fold_in(jax.random.key(seed), number)
                ids = _sample_part(loaded, begin, length, key)
                with replace_file(part) as file:
                    np.save(file, ids, allow_pickle=False)
                advance()
            first = number * _ROWS
            yield from np.load(part, allow_pickle=False)[: rows - first]


def _sample_part(model: Pretrained, begin: int, length: int, key: jax.Array) -> np.ndarray:
    """Ids `[_ROWS, length]`."""
    new = generate(
        model.params,
        [[begin]] * _ROWS,
        model.cfg,
        max_new_tokens=length - 1,
        sampling=_SAMPLING,
        key=key,
    )
    ids = np.full((_ROWS, length), begin, id_dtype(model.cfg.vocab_size))
    ids[:, 1:] = new
    return ids


def _begin(opened: OpenedModel, name: str) -> tuple[Tokenizer, int]:
    """The tokenizer, and the id that a text begins with; GPT-2 begins with its end of text."""
    tokenizer = opened.tokenizer
    if tokenizer is None:
        raise BadInputError(f"{name} has no tokenizer; put its tokenizer.json beside the weights")
    begin = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    if begin is None:
        raise BadInputError(f"{name} has no token that begins a text, so none can be sampled")
    return tokenizer, begin
