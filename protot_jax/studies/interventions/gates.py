"""Write gates over text, and the ranking of prototypes by how specifically they write words.

The paper chooses the prototype of a concept by reading the top sentences of all prototypes (A.3.1).
Here they are ranked by

    d = (mean write gate on the words - mean write gate elsewhere) / pooled standard deviation,

Cohen's d over the tokens of validation text. It is high where a prototype takes the words and
little else. It does not measure how much is written: a prototype whose gate is small everywhere may
have a high d, so both means are reported with it.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.errors import BadInputError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.mixers import Mixer
from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit
from lm_jax.run.results import Count
from lm_jax.text.examples import Examples
from lm_jax.train.objective import PAD
from protot_jax.analysis.token_ids import word_ids
from protot_jax.training.saved_run import TrainedModel

_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Ranked:
    """A prototype, its d, and its mean write gate on the words and elsewhere."""

    layer: Count
    prototype: Count
    score: float
    on_words: float
    elsewhere: float


@dataclasses.dataclass(frozen=True)
class TextGates:
    """Write gates over a text.

    Attributes:
      count_V: how often each token occurs.
      mean_VLR: mean gate of each token, 0 for one that does not occur.
      occurrences: how often each word occurs.
      ranking: all prototypes by how specifically they write the words; empty without words.
    """

    count_V: np.ndarray
    mean_VLR: np.ndarray
    occurrences: Mapping[str, int]
    ranking: tuple[Ranked, ...]


def sample(examples: Examples, rows: int, seed: int) -> np.ndarray:
    """Random rows of ids `[rows, context + 1]` of a split, or all rows if there are fewer."""
    drawn = np.random.default_rng(seed).permutation(examples.count)[:rows]
    return examples.read(np.sort(drawn))["tokens"]


def over_text(model: TrainedModel, text_NS: np.ndarray, words: Sequence[str] = ()) -> TextGates:
    """Runs the model over rows of text and collects statistics of its write gates.

    A word of several tokens occurs where they follow one another, and all of them count.

    Raises:
      BadInputError: a word is not in the vocabulary, or none of them occurs in the text.
    """
    V = model.cfg.vocab_size
    text_NS = np.pad(text_NS, ((0, -len(text_NS) % _ROWS), (0, 0)))
    occurrences, on_NS = find_words(model, text_NS, words)
    sums = [np.zeros(())] * 3
    for start in range(0, len(text_NS), _ROWS):
        rows = slice(start, start + _ROWS)
        parts = _summed(model.params, text_NS[rows], on_NS[rows], cfg=model.cfg, mixer=model.mixer)
        sums = [
            total + np.asarray(part, np.float64) for total, part in zip(sums, parts, strict=True)
        ]
    sum_VLR, sum_2LR, square_2LR = sums
    count_V = np.bincount(text_NS[text_NS != PAD], minlength=V)
    mean_VLR = sum_VLR / np.maximum(count_V, 1)[:, None, None]
    on = np.count_nonzero(on_NS)
    count_2 = np.array([count_V.sum() - on, on])
    ranking = _ranked(count_2, sum_2LR, square_2LR) if words else ()
    return TextGates(count_V, mean_VLR, occurrences, ranking)


def find_words(
    model: TrainedModel, text_NS: np.ndarray, words: Sequence[str]
) -> tuple[dict[str, int], np.ndarray]:
    """How often each word occurs in rows of text, and the positions that any of them covers.

    Raises:
      BadInputError: a word is not in the vocabulary, or none of them occurs in the text.
    """
    on_NS = np.zeros(text_NS.shape, bool)
    occurrences = {}
    for word, ids in zip(words, word_ids(model.tokenizer, words), strict=True):
        occurrences[word], at_NS = _occurrences(text_NS, ids)
        on_NS |= at_NS
    if words and not on_NS.any():
        raise BadInputError(
            f"{', '.join(map(repr, words))} {'do' if words[1:] else 'does'} not occur in the "
            f"{np.count_nonzero(text_NS):,} tokens of validation text; give other words, more "
            "--gate_rows, or --layer and --prototype"
        )
    return occurrences, on_NS


def _occurrences(text_NS: np.ndarray, ids: Sequence[int]) -> tuple[int, np.ndarray]:
    """Number of occurrences of a sequence of ids in the rows, and the positions they cover."""
    width = len(ids)
    windows = np.lib.stride_tricks.sliding_window_view(text_NS, width, axis=1)
    starts = (windows == np.asarray(ids)).all(-1)
    covered = np.zeros(text_NS.shape, bool)
    for i in range(width):
        covered[:, i : i + starts.shape[1]] |= starts
    return int(starts.sum()), covered


@functools.partial(exact_jit, static_argnames=("cfg", "mixer"))
def _summed(
    params: ParamTree,
    tokens_BT: jax.Array,
    on_BT: jax.Array,
    *,
    cfg: DecoderConfig,
    mixer: Mixer,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums of gates by token, and sums and sums of squares elsewhere and on the words."""
    real_BT = tokens_BT != PAD
    record = {"mixer.write": lm_jax.keep}
    # No logits are needed; those of one position cost nothing.
    first_B1 = jnp.zeros((tokens_BT.shape[0], 1), jnp.int32)
    output = lm_jax.forward(
        params, tokens_BT, cfg, mixer=mixer, record=record, valid_BT=real_BT, logits_at=first_B1
    )
    # The gates of padding are zero.
    gate_BTLR = jnp.moveaxis(output.records["mixer.write"], 0, 2)
    by_token = jnp.zeros((cfg.vocab_size, *gate_BTLR.shape[2:]))
    by_token = by_token.at[tokens_BT].add(gate_BTLR)
    on_BT2 = jnp.stack([~on_BT, on_BT], axis=-1).astype(jnp.float32)
    sum_2LR, square_2LR = (
        jnp.einsum("BTP,BTLR->PLR", on_BT2, x) for x in (gate_BTLR, gate_BTLR**2)
    )
    return by_token, sum_2LR, square_2LR


def _ranked(count_2: np.ndarray, sum_2LR: np.ndarray, square_2LR: np.ndarray) -> tuple[Ranked, ...]:
    mean_2LR = sum_2LR / np.maximum(count_2, 1)[:, None, None]
    within_LR = np.maximum(square_2LR - sum_2LR * mean_2LR, 0.0).sum(0)
    deviation_LR = np.sqrt(within_LR / max(count_2.sum() - 2, 1))
    lead_LR = mean_2LR[1] - mean_2LR[0]
    score_LR = np.divide(lead_LR, deviation_LR, out=np.zeros_like(lead_LR), where=deviation_LR > 0)
    R = score_LR.shape[1]
    return tuple(
        Ranked(
            layer=int(i // R),
            prototype=int(i % R),
            score=float(score_LR.flat[i]),
            on_words=float(mean_2LR[1].flat[i]),
            elsewhere=float(mean_2LR[0].flat[i]),
        )
        for i in np.argsort(-score_LR, axis=None, kind="stable")
    )
