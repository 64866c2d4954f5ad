"""Measures the heads of a model.

Besides what every study has, the work folder holds

    heads.parquet     one row per text, layer and head (`results.ROWS`)
    texts.parquet     one row per text: its tokens (`results.TOKENS`)
"""

from collections.abc import Iterator
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from lm_jax.errors import BadInputError, UsageError
from lm_jax.inspect import head_measures
from lm_jax.inspect.head_measures import MEASURES, WEIGHTS
from lm_jax.model.mixers import AttentionMixer
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep
from lm_jax.run.finished import Inputs
from lm_jax.run.rows import Unit
from lm_jax.study import Work
from lm_jax.text import corpora
from lm_jax.text.tokenizer import added_tokens
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
from sparse_jax.studies.heads.settings import LEAST, LEAST_ROW, HeadsConfig
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
    source = SourceModel.load(config.model, without_mlps=True)
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
        tokens=numbers.counted(table, TEXT, "queries"),
        again=numbers.counted(table, TEXT, "again"),
        repeated=config.repeated,
        twice=numbers.counted(table, REPEATED, "again"),
        heads=numbers.results(table, copying_LN),
        equal=numbers.equal_weights(table, copying_LN.shape),
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


def _known(source: SourceModel) -> int:
    """How many ids are tokens of both the tokenizer and the embedding."""
    return min(source.tokenizer.vocab_size, source.model.cfg.vocab_size)


def _repeated(config: HeadsConfig, source: SourceModel) -> list[list[int]]:
    """Rows of random tokens, each row twice, behind what every text begins with.

    Tokens of a row are different, and none is a special one. Rows have several lengths, so that
    what followed a token's earlier place is at no one distance.
    """
    random, tokenizer = np.random.default_rng(config.seed), source.tokenizer
    begin = list(added_tokens(tokenizer)[0])
    added = tokenizer.backend.get_added_tokens_decoder()
    plain = np.setdiff1d(
        np.arange(_known(source)), [i for i, each in added.items() if each.special]
    )
    longest = min((config.context - len(begin)) // 2, len(plain))
    rows = []
    for _ in range(config.repeated):
        length = int(random.integers(min(max(LEAST_ROW, longest // 2), longest), longest + 1))
        rows.append(begin + 2 * random.choice(plain, length, replace=False).tolist())
    return rows


def _rows(
    source: SourceModel, config: HeadsConfig, on: str, number: int, ids: Any
) -> Iterator[dict[str, Any]]:
    """Rows of one text."""
    tokens_T = np.zeros(config.context, np.int32)
    tokens_T[: len(ids)] = ids
    known = _known(source)
    found, (raised_LNX, lowered_LNX) = _measured(source.model, tokens_T, len(ids), tokens=known)
    found = jax.tree.map(np.asarray, found)
    sums = {name: found.sums[name] for name in MEASURES}
    query_LN, norm_LN, weight_LNS = found.query_LN, found.norm_LN, found.weight_LNS
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
            **{f"equal_{name}": float(found.equal[name][layer]) for name in WEIGHTS},
            "query": int(query_LN[layer, head]),
            "norm": float(norm_LN[layer, head]),
            "weights": weight_LNS[layer, head, : len(ids)].tolist(),
            "raised": [pieces(int(i)) for i in raised_LNX[layer, head]],
            "lowered": [pieces(int(i)) for i in lowered_LNX[layer, head]],
        }


def _tokens(source: SourceModel, on: str, number: int, ids: Any) -> dict[str, Any]:
    return {"on": on, "text": number, "tokens": [source.tokenizer.piece(int(i)) for i in ids]}


@functools.partial(exact_jit, static_argnames="tokens")
def _measured(model, tokens_T, count, *, tokens):
    """The measures of a text, and the tokens that each head raises and lowers most."""
    valid_1T = (jnp.arange(len(tokens_T)) < count)[None]
    names = head_measures.sites(model.cfg)
    run = model.forward(tokens_T[None], valid_1T, record=dict.fromkeys(names, keep))
    found = head_measures.measure(model.params, model.cfg, run.records, tokens_T, count)
    promoted = head_measures.promoted(
        model.params, model.cfg, found.added_LND, _PROMOTED, tokens=tokens
    )
    return found, promoted
