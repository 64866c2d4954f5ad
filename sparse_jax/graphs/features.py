"""What features stand for: the texts on which they are most active, and the tokens they promote.

    data = collect(source, transcoder, [(layer, index), ...], prepared, context=64)
    data[layer, index].examples[0].tokens

One pass over the windows of a prepared corpus, nothing stored but the best texts of each feature.
A feature is active where its activation is not 0. Activations of neurons may be negative
(`Features.signed`): of them the texts with the lowest are kept too. The first token of a window is
left out, as in the training of transcoders. Logits come from the direct path: all that the
feature writes, times the weight of the last norm, times the unembedding.
Files have the layout of the viewers: one per feature, named by Cantor's number of layer and index.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model.frozen import centre
from lm_jax.model.layers import unembedding
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep
from lm_jax.run import stop
from lm_jax.run.files import make_folder, write_json
from lm_jax.text.examples import Examples, OnePass
from lm_jax.text.prepared import Prepared
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.train.objective import ignore_index_batch
from sparse_jax.circuits.source_model import SourceModel
from sparse_jax.graphs import graph_json
from sparse_jax.graphs.basis import Features, writes

Feature = tuple[int, int]
SKIPPED_START = 1
_LOGITS, _BINS, _BATCH = 10, 20, 16
# Features whose logits, of the whole vocabulary, are held at once.
_LOGIT_CHUNK = 64
_QUANTILES = (0.5, 0.9, 0.99, 0.999)


@dataclasses.dataclass(frozen=True)
class Text:
    """A window of the corpus: tokens as text, with the feature's activation on each."""

    tokens: tuple[str, ...]
    activations: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class FeatureData:
    """A feature on a corpus.

    Attributes:
      examples: windows with the largest activations above 0, largest first.
      top_logits, bottom_logits: tokens whose logits it raises and lowers most where its activation
        is above 0, as text; where it is below, it lowers and raises them.
      frequency: share of tokens on which it is active.
      least, largest: activation where it is active; 0 if it never is.
      quantiles: quantiles of the activations where it is active.
      counts: numbers of these activations in equal bins from `least` to `largest`.
      lowest: windows with the lowest activations below 0, lowest first.
    """

    examples: tuple[Text, ...]
    top_logits: tuple[str, ...]
    bottom_logits: tuple[str, ...]
    frequency: float
    least: float
    largest: float
    quantiles: tuple[float, ...]
    counts: tuple[int, ...]
    lowest: tuple[Text, ...] = ()


def collect(
    source: SourceModel,
    basis: Features,
    features: Sequence[Feature],
    prepared: Prepared | None,
    *,
    context: int,
    examples: int = 10,
) -> dict[Feature, FeatureData]:
    """Data of some features.

    Args:
      source: the model.
      basis: the transcoder whose features they are, or the model's neurons.
      features: layer and index of each feature.
      prepared: the corpus, of which the split "train" is read once; None for logits alone.
      context: tokens of a window.
      examples: the most texts of a feature.

    Raises:
      StoppedError: on a signal.
      As `lm_jax.text.examples.Examples`.
    """
    if not features:
        return {}
    layer_X, index_X = (jnp.asarray(each, jnp.int32) for each in zip(*features, strict=True))
    found = _Found(len(features), context, examples, signed=basis.signed)
    if prepared is not None:
        read = functools.partial(_activations, source.model, basis, layer_X, index_X)
        for tokens_BS in _batches(prepared, context, source.model.cfg.vocab_size):
            stop.check("while texts of features were read")
            act_XBT, mask_BT = map(np.asarray, read(jnp.asarray(tokens_BS)))
            found.add(act_XBT, mask_BT, tokens_BS[:, :-1])
    return {
        feature: found.data(x, logits_V, source.tokenizer)
        for x, (feature, logits_V) in enumerate(
            zip(features, _each_logits(source, basis, layer_X, index_X), strict=True)
        )
    }


def _each_logits(
    source: SourceModel, basis: Features, layer_X: jax.Array, index_X: jax.Array
) -> Iterator[np.ndarray]:
    """Direct effects of each feature on the logits `[V]`, computed some features at a time."""
    X = len(layer_X)
    size = min(X, _LOGIT_CHUNK)
    for start in range(0, X, size):
        # The last are repeated, so that one size is compiled.
        at_X = jnp.minimum(start + jnp.arange(size), X - 1)
        logits_XV = np.asarray(_logits(source.model, basis, layer_X[at_X], index_X[at_X]))
        yield from logits_XV[: X - start]


def _batches(prepared: Prepared, context: int, vocab_size: int) -> Iterator[np.ndarray]:
    windows = Examples(prepared, "train", context=context, mode="window", vocab_size=vocab_size)
    rows = OnePass(windows, batch_size=min(_BATCH, windows.count))
    for k in range(rows.per_epoch):
        yield rows.at(k)["tokens"]


@exact_jit
def _activations(model, basis, layer_X, index_X, tokens_BS):
    """Activations `[X, B, T]` of the features, 0 at tokens that are left out, and the mask of the
    others."""
    batch = ignore_index_batch(tokens_BS)
    record = {basis.site: keep}
    run = model.forward(batch.input_BT, batch.input_mask_BT, record=record)
    input_LBTD = run.records[basis.site]
    L, B, T, D = input_LBTD.shape
    input_LXD = input_LBTD.reshape(L, B * T, D).astype(jnp.float32)
    act_XBT = basis.encode_some(input_LXD, layer_X, index_X).T.reshape(-1, B, T)
    mask_BT = batch.input_mask_BT & (jnp.arange(T) >= SKIPPED_START)[None]
    return jnp.where(mask_BT[None], act_XBT, 0.0), mask_BT


@exact_jit
def _logits(model, basis, layer_X, index_X):
    """Direct effects on the logits `[X, V]` of one unit of each feature."""
    cfg, params = model.cfg, model.params
    write_XD = _unit_writes(basis, layer_X, index_X).sum(0)
    final = params.get("final") or {}
    direction_XD = centre(write_XD, cfg.norm == "layer")
    if "scale" in final:
        direction_XD = direction_XD * (final["scale"] + cfg.norm_offset)[None]
    return direction_XD @ unembedding(params, cfg).astype(jnp.float32).T


class _Best:
    """The texts with the largest activations of X features, times a sign, above 0."""

    def __init__(self, count: int, context: int, examples: int) -> None:
        self.value_XK = np.full((count, examples), -np.inf, np.float32)
        self.act_XKT = np.zeros((count, examples, context), np.float32)
        self.token_XKT = np.full((count, examples, context), -1, np.int32)

    def add(self, act_XBT: np.ndarray, token_BT: np.ndarray) -> None:
        """Takes a batch; of equal maxima the earlier window stays before the later one."""
        X, K = self.value_XK.shape
        value_XB = act_XBT.max(2)
        value_XB = np.where(value_XB > 0, value_XB, -np.inf)
        value_XM = np.concatenate([self.value_XK, value_XB], 1)
        order_XK = np.argsort(-value_XM, axis=1, kind="stable")[:, :K]
        token_XBT = np.broadcast_to(token_BT[None], (X, *token_BT.shape))
        act_XMT = np.concatenate([self.act_XKT, act_XBT], 1)
        token_XMT = np.concatenate([self.token_XKT, token_XBT], 1)
        self.value_XK = np.take_along_axis(value_XM, order_XK, 1)
        self.act_XKT = np.take_along_axis(act_XMT, order_XK[:, :, None], 1)
        self.token_XKT = np.take_along_axis(token_XMT, order_XK[:, :, None], 1)

    def texts(self, x: int, sign: int, tokenizer: Tokenizer) -> tuple[Text, ...]:
        """The texts of feature x with its activations."""
        texts = []
        for value, act_T, token_T in zip(
            self.value_XK[x], self.act_XKT[x], self.token_XKT[x], strict=True
        ):
            if np.isfinite(value):
                kept = token_T >= 0
                tokens = tuple(tokenizer.piece(i) for i in token_T[kept])
                texts.append(Text(tokens, tuple(map(float, sign * act_T[kept]))))
        return tuple(texts)


class _Found:
    """The best texts of X features, of each sign that they have, and all their activations."""

    def __init__(self, count: int, context: int, examples: int, *, signed: bool) -> None:
        signs = (1, -1) if signed else (1,)
        self.best = {sign: _Best(count, context, examples) for sign in signs}
        self.active: list[list[np.ndarray]] = [[] for _ in range(count)]
        self.tokens = 0

    def add(self, act_XBT: np.ndarray, mask_BT: np.ndarray, token_BT: np.ndarray) -> None:
        """Takes a batch."""
        for sign, best in self.best.items():
            best.add(sign * act_XBT, token_BT)
        for active, act_BT in zip(self.active, act_XBT, strict=True):
            active.append(act_BT[act_BT != 0])
        self.tokens += int(mask_BT.sum())

    def data(self, x: int, logits_V: np.ndarray, tokenizer: Tokenizer) -> FeatureData:
        """What is known of feature x."""
        active = np.concatenate([np.empty(0, np.float32), *self.active[x]])
        least, largest = (float(active.min()), float(active.max())) if len(active) else (0.0, 0.0)
        order_V = np.argsort(-logits_V, kind="stable")
        top, bottom = (
            tuple(tokenizer.piece(i) for i in some)
            for some in (order_V[:_LOGITS], order_V[::-1][:_LOGITS])
        )
        texts = {sign: best.texts(x, sign, tokenizer) for sign, best in self.best.items()}
        return FeatureData(
            examples=texts[1],
            top_logits=top,
            bottom_logits=bottom,
            frequency=len(active) / self.tokens if self.tokens else 0.0,
            least=least,
            largest=largest,
            quantiles=tuple(map(float, np.quantile(active, _QUANTILES))) if len(active) else (),
            counts=tuple(np.histogram(active, _BINS)[0].tolist()) if len(active) else (),
            lowest=texts.get(-1, ()),
        )


def decoders(basis: Features, features: Sequence[Feature]) -> dict[Feature, np.ndarray]:
    """All that each feature writes, over all layers `[L D]`."""
    if not features:
        return {}
    layer_X, index_X = (jnp.asarray(each, jnp.int32) for each in zip(*features, strict=True))
    write_LXD = np.asarray(_unit_writes(basis, layer_X, index_X))
    return {feature: write_LXD[:, x].reshape(-1) for x, feature in enumerate(features)}


@exact_jit
def _unit_writes(basis, layer_X, index_X):
    """What one unit of each feature writes `[L, X, D]`."""
    return writes(basis, layer_X, index_X, jnp.ones(len(layer_X), jnp.float32))


def document(feature: Feature, data: FeatureData, *, scan: str) -> dict[str, Any]:
    """A feature as the JSON document that Neuronpedia and circuit-tracer's viewer read."""
    quantiles = [{"quantile_name": "Top activations", "examples": _examples(data.examples, 1)}]
    if data.lowest:
        lowest = {"quantile_name": "Bottom activations", "examples": _examples(data.lowest, -1)}
        quantiles.append(lowest)
    return {
        "index": graph_json.pair_number(*feature),
        "transcoder_id": scan,
        "layer": feature[0],
        "feature": feature[1],
        "examples_quantiles": quantiles,
        "top_logits": data.top_logits,
        "bottom_logits": data.bottom_logits,
        "act_min": data.least,
        "act_max": data.largest,
        "quantile_values": data.quantiles,
        "histogram": data.counts,
        "activation_frequency": data.frequency,
    }


def _examples(texts: Sequence[Text], sign: int) -> list[dict[str, Any]]:
    """Texts, each with the place of its largest activation, or with sign -1 of its lowest."""
    before: set[tuple[str, ...]] = set()
    examples = []
    for each in texts:
        examples.append(
            {
                "tokens": each.tokens,
                "tokens_acts_list": each.activations,
                "train_token_ind": int(np.argmax(sign * np.array(each.activations))),
                "is_repeated_datapoint": each.tokens in before,
            }
        )
        before.add(each.tokens)
    return examples


def write(folder: Path, data: Mapping[Feature, FeatureData], *, scan: str) -> None:
    """Writes `<scan>/<number>.json` of each feature into a folder.

    Raises:
      StorageError: it cannot be written.
    """
    own = folder / scan
    make_folder(own, parents=True)
    for feature, each in data.items():
        file = own / f"{graph_json.pair_number(*feature)}.json"
        write_json(file, document(feature, each, scan=scan))
