"""Texts of a corpus as token ids, for studies that read a few of them."""

import itertools
from typing import Any

from lm_jax.errors import BadInputError, UsageError
from lm_jax.text import corpora
from lm_jax.text.preparation import CorpusConfig
from sparse_jax.circuits.source_model import SourceModel


def first_texts(
    source: SourceModel, corpus: CorpusConfig, count: int, *, context: int, least: int
) -> list[Any]:
    """Token ids of the first texts of UTF-8 that are long enough, each cut to the context.

    Args:
      source: the model, whose tokenizer is used.
      corpus: the field `corpus` of a config.
      count: number of texts.
      context: the field `context` of the config, most tokens of a text.
      least: fewest tokens of a text.

    Raises:
      UsageError: the context is beyond the model's positions.
      BadInputError: there are too few texts.
    """
    if context > source.model.cfg.max_length:
        raise UsageError(
            f"config.context = {context} is beyond the {source.model.cfg.max_length} positions of "
            f"{source.name}; lower it"
        )
    options = {"unit": corpus.unit, "words": corpus.words, "field": corpus.field}
    encoded = (
        source.tokenizer.encode(text)
        for _, text in corpora.documents(corpus.source, **options)
        if isinstance(text, str)
    )
    long_enough = (ids[:context] for ids in encoded if len(ids) >= least)
    found = list(itertools.islice(long_enough, count))
    if len(found) < count:
        raise BadInputError(
            f"config.corpus.source: {corpus.source} has {len(found)} texts of {least} tokens or "
            f"more, and {count} are needed; lower config.texts or give more text"
        )
    return found
