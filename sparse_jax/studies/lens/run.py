"""Fits the lens of a model, and reads streams by it.

Besides what every study has, the work folder holds

    lens.safetensors     the lens (`lm_jax.weights.lenses`)
    sums.npz             what the texts gave so far, until the lens is there
    compared.parquet     one row per held-out text, layer and lens (`results.COMPARISONS`)
    readouts.parquet     one row per prompt, layer, position and lens (`results.TOKENS`)
    split.parquet        one row per prompt, layer that is read and head (`results.SHARES`)
"""

from collections.abc import Iterator
import functools
import io
import itertools
from pathlib import Path
from typing import Any
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.inspect import jacobian_lens, lens_split
from lm_jax.inspect.jacobian_lens import JacobianLens, Sums
from lm_jax.inspect.run import logit_lens
from lm_jax.model.frozen import centre, norm_weight
from lm_jax.model.layers import unembedding
from lm_jax.model.mixers import AttentionMixer
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep
from lm_jax.run import progress, stop
from lm_jax.run.files import write_bytes
from lm_jax.run.finished import Inputs, file_inputs
from lm_jax.run.rows import Unit
from lm_jax.study import Work
from lm_jax.text import corpora
from lm_jax.text.tokenizer import prompt_ids
from lm_jax.weights.lenses import load_lens, save_lens
from lm_jax.weights.load import identities
from sparse_jax.circuits.runs import CircuitModel, HeldGates
from sparse_jax.circuits.source_model import SourceModel, open_identity
from sparse_jax.studies.lens import numbers
from sparse_jax.studies.lens.results import (
    COMPARED,
    COMPARISONS,
    LENS_FILE,
    LENSES,
    READOUTS,
    SHARES,
    SPLIT,
    TOKENS,
    LensSummary,
)
from sparse_jax.studies.lens.settings import LensConfig
from sparse_jax.studies.texts import first_texts

_SUMS = "sums.npz"
# Texts after which what they gave is kept.
_KEPT_AFTER = 10


def inputs(config: LensConfig) -> Inputs:
    """The model, the texts and the file of a lens, without loading weights.

    Raises:
      BadInputError, CorruptError: one of them cannot be read.
    """
    return {
        **identities({"model": config.model}, open_identity),
        **corpora.corpus_inputs({"config.corpus": config.corpus.source}),
        **file_inputs({"config.lens": config.lens}),
    }


def measure(config: LensConfig, work: Work) -> LensSummary:
    """Fits the lens, or reads it, compares it on held-out texts and reads the prompts.

    Raises:
      BadInputError: there are too few texts, the lens is of another model, or readouts of a model
        without attention heads are to be split.
      UsageError: the settings do not fit the model.
    """
    source = SourceModel.load(config.model, without_mlps=True)
    cfg = source.model.cfg
    _check_split(config, source)
    held_out, texts = _texts(config, source)
    prompts = _prompts(config, source)
    lens = _lens(config, work, source, texts)
    if (lens.layers, lens.matrix_SDD.shape[-1]) != (cfg.num_layers, cfg.hidden_size):
        raise BadInputError(
            f"config.lens: {config.lens} is of {lens.layers} layers of width "
            f"{lens.matrix_SDD.shape[-1]}, and {config.model} has {cfg.num_layers} of "
            f"{cfg.hidden_size}; give the lens of this model"
        )
    matrix_LDD = jnp.asarray(np.concatenate([lens.matrix_SDD, np.eye(cfg.hidden_size)[None]]))
    matrix_LDD = matrix_LDD.astype(jnp.float32)
    plan: dict[Unit, Any] = {(0, str(n), ""): (n, ids) for n, ids in enumerate(held_out)}
    compared = work.units(
        COMPARED,
        COMPARISONS,
        plan,
        lambda item: pa.Table.from_pylist(
            list(_compared(source, matrix_LDD, config, *item)), schema=COMPARISONS
        ),
        shards="compared_shards",
        noun="texts",
    )
    if prompts:
        reads: dict[Unit, Any] = {(0, str(n), "prompt"): (n, ids) for n, ids in enumerate(prompts)}
        work.units(
            READOUTS,
            TOKENS,
            reads,
            lambda item: pa.Table.from_pylist(
                list(_read(source, matrix_LDD, *item)), schema=TOKENS
            ),
            shards="readout_shards",
            noun="prompts",
        )
    splits: dict[Unit, Any] = {
        (layer, str(n), "split"): (n, ids, layer)
        for n, ids in enumerate(prompts)
        for layer in config.split
    }
    if splits:
        work.units(
            SPLIT,
            SHARES,
            splits,
            lambda item: pa.Table.from_pylist(
                list(_splits(source, config, matrix_LDD, held_out, *item)), schema=SHARES
            ),
            shards="split_shards",
            noun="readouts",
        )
    return LensSummary(
        model=config.model,
        model_sha256=source.identity.text,
        prompts=lens.prompts,
        rows=lens.rows,
        skipped=lens.skipped,
        texts=len(held_out),
        tokens=numbers.tokens(compared),
        layers=numbers.layers(compared, lens),
        readouts=config.prompts,
    )


def _runs(model: CircuitModel) -> Any:
    """The model as the lens differentiates it."""
    return model if model.gates is None else HeldGates(model)


def _check_split(config: LensConfig, source: SourceModel) -> None:
    last = source.model.cfg.num_layers - 1
    for layer in config.split:
        if not 0 <= layer < last:
            raise UsageError(
                f"config.split: layer {layer} is outside 0..{last - 1}; the last layer is read as "
                "it is"
            )
    if config.split and not isinstance(source.model.mixer, AttentionMixer):
        raise BadInputError(
            f"config.split: {config.model} has no attention heads; leave config.split out"
        )


def _texts(config: LensConfig, source: SourceModel) -> tuple[list[Any], list[Any]]:
    """Token ids of the held-out texts and of those of the fit: UTF-8, and long enough."""
    wanted = config.held_out + (0 if config.lens else config.texts)
    found = first_texts(
        source, config.corpus, wanted, context=config.context, least=config.skipped + 2
    )
    return found[: config.held_out], found[config.held_out :]


def _lens(config: LensConfig, work: Work, source: SourceModel, texts: list[Any]) -> JacobianLens:
    """The lens that is named, that of an earlier start, or a new one."""
    if config.lens:
        return load_lens(config.lens)
    file, kept = work.path / LENS_FILE, work.path / _SUMS
    if file.is_file():
        return load_lens(file)
    model = source.model
    rows = min(config.rows, model.cfg.hidden_size)
    sums = _read_sums(kept) or Sums.empty(model.cfg)
    with progress.track("lens", len(texts), unit="texts", done=sums.prompts) as advance:

        def after(sums: Sums) -> None:
            advance()
            if sums.prompts % _KEPT_AFTER == 0:
                _write_sums(kept, sums)
            stop.check("while the lens was fitted")

        lens = jacobian_lens.fit(
            _runs(model),
            texts,
            length=config.context,
            rows=rows,
            skipped=config.skipped,
            mixer=model.mixer,
            sums=sums,
            after=after,
            name=config.model,
        )
    save_lens(file, lens)
    kept.unlink(missing_ok=True)
    # As the file has it, in float16, whether this start fitted it or an earlier one.
    return load_lens(file)


def _write_sums(file: Path, sums: Sums) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, total=sums.total_2SDD, visits=sums.visits_D, prompts=sums.prompts)
    write_bytes(file, buffer.getvalue())


def _read_sums(file: Path) -> Sums | None:
    if not file.is_file():
        return None
    try:
        with np.load(file, allow_pickle=False) as kept:
            return Sums(kept["total"], kept["visits"], int(kept["prompts"]))
    except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
        raise CorruptError(f"{file} is damaged: {error}; remove it to begin anew") from error


def _compared(
    source: SourceModel, matrix_LDD: jax.Array, config: LensConfig, number: int, ids: Any
) -> Iterator[dict[str, Any]]:
    """Rows of one text."""
    tokens_1T = np.zeros((1, config.context), np.int32)
    tokens_1T[0, : len(ids)] = ids
    values = _agreement(source.model, matrix_LDD, tokens_1T, len(ids), skipped=config.skipped)
    count, divergence_2L, agreeing_2L = map(np.asarray, values)
    for which, lens in enumerate(LENSES):
        for layer in range(len(matrix_LDD)):
            yield {
                "text": number,
                "layer": layer,
                "lens": lens,
                "tokens": int(count),
                "divergence": float(divergence_2L[which, layer]),
                "agreeing": int(agreeing_2L[which, layer]),
            }


@functools.partial(exact_jit, static_argnames="skipped")
def _agreement(model, matrix_LDD, tokens_1T, count, *, skipped):
    """Tokens that count; sums of divergences and of agreement `[2, L]`, logit lens first."""
    at_T = jnp.arange(tokens_1T.shape[1])
    counted_T = (at_T >= skipped) & (at_T < count - 1)
    run = model.forward(tokens_1T, (at_T < count)[None], record={"resid_post": keep})
    log_p_TV = jax.nn.log_softmax(run.logits[0].astype(jnp.float32))

    def of_layer(_, each):
        log_q_2TV = jax.nn.log_softmax(_lens_logits(model, *each))
        kl_2T = (jnp.exp(log_p_TV)[None] * (log_p_TV[None] - log_q_2TV)).sum(-1)
        same_2T = log_p_TV.argmax(-1)[None] == log_q_2TV.argmax(-1)
        counted_1T = counted_T[None]
        return None, (jnp.where(counted_1T, kl_2T, 0.0).sum(1), (same_2T & counted_1T).sum(1))

    _, (kl_L2, same_L2) = jax.lax.scan(of_layer, None, (run.records["resid_post"], matrix_LDD))
    return counted_T.sum(), kl_L2.T, same_L2.T


def _lens_logits(model, h_1TD, matrix_DD):
    """Logits `[2, T, V]` that both lenses read in one layer, logit lens first."""
    moved_1TD = jnp.einsum("BTD,ED->BTE", h_1TD.astype(jnp.float32), matrix_DD)
    streams_2TD = jnp.concatenate([h_1TD, moved_1TD.astype(h_1TD.dtype)])
    return logit_lens(model.params, streams_2TD, model.cfg).astype(jnp.float32)


def _prompts(config: LensConfig, source: SourceModel) -> list[list[int]]:
    """Token ids of the prompts."""
    encoded = [prompt_ids(source.tokenizer, text) for text in config.prompts]
    for text, ids in zip(config.prompts, encoded, strict=True):
        if not 0 < len(ids) <= source.model.cfg.max_length:
            raise BadInputError(
                f"config.prompts: {text!r} has {len(ids)} tokens; give 1 to "
                f"{source.model.cfg.max_length}"
            )
    return encoded


def _read(
    source: SourceModel, matrix_LDD: jax.Array, number: int, ids: list[int]
) -> Iterator[dict[str, Any]]:
    """Rows of one prompt."""
    best, probability = map(
        np.asarray, _most_probable(source.model, matrix_LDD, np.array([ids], np.int32))
    )
    for which, lens in enumerate(LENSES):
        for layer, position in itertools.product(range(len(matrix_LDD)), range(len(ids))):
            yield {
                "prompt": number,
                "layer": layer,
                "position": position,
                "lens": lens,
                "read": source.tokenizer.piece(int(best[layer, which, position])),
                "probability": float(probability[layer, which, position]),
                "token": source.tokenizer.piece(ids[position]),
            }


@exact_jit
def _most_probable(model, matrix_LDD, tokens_1T):
    """The most probable token and its probability `[L, 2, T]`, logit lens first."""
    valid_1T = jnp.ones_like(tokens_1T, bool)
    run = model.forward(tokens_1T, valid_1T, record={"resid_post": keep})

    def of_layer(_, each):
        probability_2TV = jax.nn.softmax(_lens_logits(model, *each))
        return None, (probability_2TV.argmax(-1), probability_2TV.max(-1))

    return jax.lax.scan(of_layer, None, (run.records["resid_post"], matrix_LDD))[1]


def _splits(
    source: SourceModel,
    config: LensConfig,
    matrix_LDD: jax.Array,
    texts: list[Any],
    number: int,
    ids: list[int],
    layer: int,
) -> Iterator[dict[str, Any]]:
    """Rows of the readout of one layer at the end of one prompt."""
    model = source.model
    stream_D, token = _end(model, matrix_LDD, np.array([ids], np.int32), layer)
    # The last norm's weights, and its mean where it takes it out; not its divisor.
    weight_D = unembedding(model.params, model.cfg)[int(token)].astype(jnp.float32)
    weight_D = weight_D * norm_weight(model.params.get("final"), model.cfg)
    found = lens_split.split(
        _runs(model),
        texts,
        layer=layer,
        stream_D=stream_D,
        readout_D=centre(weight_D, model.cfg.norm == "layer"),
        length=config.context,
        skipped=config.skipped,
    )
    for at, head in np.ndindex(found.head_LN.shape):
        if at > layer:
            yield {
                "prompt": number,
                "layer": layer,
                "token": source.tokenizer.piece(int(token)),
                "total": found.total,
                "edges": found.edges,
                "at": at,
                "head": head,
                "share": float(found.head_LN[at, head]),
                "error": float(found.error_LN[at, head]),
                "bypass": float(found.bypass_L[at]),
            }


@exact_jit
def _end(model, matrix_LDD, tokens_1T, layer):
    """The stream of a layer at the last token, and the token that the Jacobian lens reads there."""
    valid_1T = jnp.ones_like(tokens_1T, bool)
    run = model.forward(tokens_1T, valid_1T, record={"resid_post": keep})
    h_1TD = run.records["resid_post"][layer]
    logits_2TV = _lens_logits(model, h_1TD, matrix_LDD[layer])
    return h_1TD[0, -1].astype(jnp.float32), logits_2TV[1, -1].argmax()
