"""Measures the heads of a model.

Besides what every study has, the work folder holds

    heads.parquet     one row per text, layer and head (`results.ROWS`)
    texts.parquet     one row per text: its tokens (`results.TOKENS`)
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from lm_jax.errors import BadInputError, UsageError
from lm_jax.inspect import head_measures
from lm_jax.inspect.head_measures import MEASURES
from lm_jax.model.mixers import AttentionMixer
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep
from lm_jax.run.finished import Inputs
from lm_jax.run.rows import Unit
from lm_jax.study import Work
from lm_jax.text import corpora
from lm_jax.weights.load import identities
from sparse_jax.circuits.source_model import SourceModel, open_identity
from sparse_jax.studies.heads import numbers
from sparse_jax.studies.heads.results import (
    REPEATED,
    ROWS,
    TABLE,
    TEXT,
    TEXTS,
    TOKENS,
    HeadsSummary,
)
from sparse_jax.studies.heads.settings import LEAST, HeadsConfig
from sparse_jax.studies.texts import first_texts

# Tokens that a head raises and lowers most, where it writes most.
_PROMOTED = 5


def inputs(config: HeadsConfig) -> Inputs:
    """The model and the texts, without loading weights.

    Raises:
      BadInputError, CorruptError: one of them cannot be read.
    """
    return {
        **identities({"model": config.model}, open_identity),
        **corpora.corpus_inputs({"config.corpus": config.corpus.source}),
    }


def measure(config: HeadsConfig, work: Work) -> HeadsSummary:
    """Measures every head on every text.

    Raises:
      BadInputError: the model has no attention, or there are too few texts.
      UsageError: the settings do not fit the model.
    """
    source = SourceModel.load(config.model)
    _check(config, source)
    found = first_texts(source, config.corpus, config.texts, context=config.context, least=LEAST)
    texts = {(TEXT, n): ids for n, ids in enumerate(found)}
    texts |= {(REPEATED, n): ids for n, ids in enumerate(_repeated(config, source))}
    plan: dict[Unit, Any] = {(0, str(n), on): (on, n, ids) for (on, n), ids in texts.items()}
    table = work.units(
        TABLE,
        ROWS,
        plan,
        lambda item: pa.Table.from_pylist(list(_rows(source, config, *item)), schema=ROWS),
        shards="head_shards",
        noun="texts",
    )
    work.units(
        TEXTS,
        TOKENS,
        # Of another name than those of the other table.
        {(0, str(n), f"{on} tokens"): (on, n, ids) for (on, n), ids in texts.items()},
        lambda item: pa.Table.from_pylist([_tokens(source, *item)], schema=TOKENS),
        shards="text_shards",
        noun="texts",
    )
    copying_LN = head_measures.copying(source.model.params, source.model.cfg)
    return HeadsSummary(
        model=config.model,
        model_sha256=source.identity.text,
        texts=config.texts,
        tokens=numbers.queries(table),
        repeated=config.repeated,
        heads=numbers.results(table, copying_LN),
    )


def _check(config: HeadsConfig, source: SourceModel) -> None:
    cfg = source.model.cfg
    if not isinstance(source.model.mixer, AttentionMixer):
        raise BadInputError(
            f"config.model: {config.model} has no attention heads; give a model of attention "
            "(iaj protot concepts shows prototypes)"
        )
    for layer, head in config.places:
        if layer >= cfg.num_layers or head >= cfg.num_heads:
            raise UsageError(
                f"config.heads: {layer}.{head} is not there; {config.model} has {cfg.num_layers} "
                f"layers of {cfg.num_heads} heads, counted from 0"
            )


def _repeated(config: HeadsConfig, source: SourceModel) -> list[list[int]]:
    """Random tokens twice in a row, each different from the others."""
    random, half = np.random.default_rng(config.seed), config.context // 2
    size = source.model.cfg.vocab_size
    half = min(half, size)
    rows = (random.choice(size, half, replace=False).tolist() for _ in range(config.repeated))
    return [row * 2 for row in rows]


def _rows(
    source: SourceModel, config: HeadsConfig, on: str, number: int, ids: Any
) -> Iterator[dict[str, Any]]:
    """Rows of one text."""
    tokens_T = np.zeros(config.context, np.int32)
    tokens_T[: len(ids)] = ids
    found, (raised_LNX, lowered_LNX) = _measured(source.model, tokens_T, len(ids))
    sums = {name: np.asarray(found.sums[name]) for name in MEASURES}
    query_LN, norm_LN, weight_LNS = map(
        np.asarray, (found.query_LN, found.norm_LN, found.weight_LNS)
    )
    pieces = source.tokenizer.piece
    for layer, head in np.ndindex(query_LN.shape):
        yield {
            "on": on,
            "text": number,
            "layer": layer,
            "head": head,
            "queries": int(found.queries),
            "again": int(found.repeated),
            **{name: float(values[layer, head]) for name, values in sums.items()},
            "query": int(query_LN[layer, head]),
            "norm": float(norm_LN[layer, head]),
            "weights": weight_LNS[layer, head, : len(ids)].tolist(),
            "raised": [pieces(int(i)) for i in raised_LNX[layer, head]],
            "lowered": [pieces(int(i)) for i in lowered_LNX[layer, head]],
        }


def _tokens(source: SourceModel, on: str, number: int, ids: Any) -> dict[str, Any]:
    return {"on": on, "text": number, "tokens": [source.tokenizer.piece(int(i)) for i in ids]}


@exact_jit
def _measured(model, tokens_T, count):
    """The measures of a text, and the tokens that each head raises and lowers most."""
    valid_1T = (jnp.arange(len(tokens_T)) < count)[None]
    names = head_measures.sites(model.cfg)
    run = model.forward(tokens_T[None], valid_1T, record=dict.fromkeys(names, keep))
    found = head_measures.measure(model.params, model.cfg, run.records, tokens_T, count)
    promoted = head_measures.promoted(model.params, model.cfg, found.added_LND, _PROMOTED)
    return found, promoted
