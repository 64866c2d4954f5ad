"""Divergences of a model's predictions for sentences and their perturbed forms.

For a batch of pairs (x, x'):

1. The model reads x and x'. JS and the other measures compare its predictions after the last token
   of each (section 5.2), and JS also those at aligned tokens after the first change.
2. If it has prototypes, it reads x' with its gates held to those of x at aligned tokens, in all
   layers (`edits.clamp`), or those of chosen prototypes only.
3. As a control it reads x' with the gates of another sentence z at the same tokens, which is at
   least as long as x.
4. If asked to, it reads x' with one gate of its last token forced as in the released code
   (`edits.released_clamp`), once the write and once the read gate.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.mixers import Mixer
from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit
from lm_jax.run.processes import call_stoppable
from lm_jax.train.objective import PAD
from protot_jax.analysis.token_ids import open_ids
from protot_jax.mixers import edits
from protot_jax.mixers.prototypes import PrototypeMixer
from protot_jax.studies.robustness.alignment import align
from protot_jax.studies.robustness.divergence import agreement, arithmetic_geometric, jensen_shannon
from protot_jax.studies.robustness.results import RELEASED
from protot_jax.studies.robustness.sentences import Pair
from protot_jax.training.saved_run import TrainedModel


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A pair as ids, with the ids of the control's sentence; None if none is long enough."""

    original: list[int]
    perturbed: list[int]
    control: list[int] | None

    @property
    def length(self) -> int:
        """The greatest number of tokens of the three that are read."""
        return max(len(self.original), len(self.perturbed))


def encode(model: TrainedModel, pairs: Sequence[Pair], seed: int) -> list[Encoded]:
    """The ids of every pair, and a random sentence of another text for the control.

    The control is drawn from the texts with as many tokens, or the least number of more tokens.
    """
    ids = {
        text: open_ids(model.tokenizer, text)
        for pair in pairs
        for text in (pair.text, pair.perturbed)
    }
    texts = sorted({pair.text for pair in pairs}, key=lambda text: (len(ids[text]), text))
    lengths = np.array([len(ids[text]) for text in texts])
    rng = np.random.default_rng(seed)
    result = []
    for pair in pairs:
        own = ids[pair.text]
        start = int(np.searchsorted(lengths, len(own)))
        if lengths[start] == len(own) and (lengths[start:] == len(own)).sum() == 1:
            start += 1
        control = None
        if start < len(texts):
            stop = int(np.searchsorted(lengths, lengths[start], side="right"))
            others = [text for text in texts[start:stop] if text != pair.text]
            control = ids[others[rng.integers(len(others))]]
        result.append(Encoded(own, ids[pair.perturbed], control))
    return result


def measure(
    model: TrainedModel,
    encoded: Sequence[Encoded],
    *,
    shape: tuple[int, int],
    chosen: Sequence[tuple[int, int]] = (),
    released: bool = False,
) -> dict[str, list[Any]]:
    """Measures a batch of pairs: a list for each measured column of `results.rows`.

    Args:
      model: a model that `load_run` gave.
      encoded: pairs that `encode` gave.
      shape: rows and tokens that the batch is padded to; batches of one shape are compiled once.
      chosen: the prototypes that are held, each `(layer, prototype)`; empty for all.
      released: measure the clamp of the released code too.
    """
    rows, width = shape
    x_BT, y_BT = (
        _padded([getattr(each, name) for each in encoded], rows, width)
        for name in ("original", "perturbed")
    )
    held_BT = np.full((rows, width), -1, np.int32)
    compared_BT = np.full((rows, width), -1, np.int32)
    for b, each in enumerate(encoded):
        alignment = align(each.original, each.perturbed)
        held_BT[b, : len(alignment.held_T)] = alignment.held_T
        compared_BT[b, : len(alignment.compared_T)] = alignment.compared_T
    ends = _ends(x_BT), _ends(y_BT)
    read = functools.partial(call_stoppable, _read, model.params, cfg=model.cfg, mixer=model.mixer)
    prototypes = model.mixer if isinstance(model.mixer, PrototypeMixer) else None
    logits_x, gates = read(x_BT, {}, record=prototypes is not None)
    logits_y, _ = read(y_BT, {}, record=False)
    compare = functools.partial(
        _compare, logits_x, aligned_BT=compared_BT, end_x_B=ends[0], end_y_B=ends[1]
    )
    last_x, last_y = (
        np.asarray(logits[np.arange(rows), end])
        for logits, end in zip((logits_x, logits_y), ends, strict=True)
    )
    agreements = [agreement(*both) for both in zip(last_x, last_y, strict=True)][: len(encoded)]
    js_last_B, js_aligned_B = compare(logits_y)
    columns: dict[str, Any] = {
        "tokens": [len(each.original) for each in encoded],
        "perturbed_tokens": [len(each.perturbed) for each in encoded],
        "same_tokens": [each.original == each.perturbed for each in encoded],
        "held": (held_BT >= 0).sum(1),
        "aligned": (compared_BT >= 0).sum(1),
        "js": js_last_B,
        "js_aligned": js_aligned_B,
        "ag": arithmetic_geometric(last_x, last_y),
        "overlap": [each.overlap for each in agreements],
        "spearman": [each.spearman for each in agreements],
        "same_top": [each.same_top for each in agreements],
        "mass": [each.mass for each in agreements],
    }
    nothing = np.full(rows, np.nan)
    columns |= dict.fromkeys(
        ("js_clamped", "js_aligned_clamped", "js_control", "js_aligned_control"), nothing
    )
    if released:
        columns |= dict.fromkeys(RELEASED, nothing)
    if prototypes is not None:
        clamped, _ = read(y_BT, edits.clamp(gates, held_BT, chosen), record=False)
        columns["js_clamped"], columns["js_aligned_clamped"] = compare(clamped)
        # Without a control the row's own sentence stands in, and its values are dropped.
        z_BT = _padded([each.control or each.original for each in encoded], rows, width)
        _, others = read(z_BT, {}, record=True)
        control, _ = read(y_BT, edits.clamp(others, held_BT, chosen), record=False)
        missing = np.array([each.control is None for each in encoded])
        for name, values in zip(
            ("js_control", "js_aligned_control"), compare(control), strict=True
        ):
            columns[name] = np.where(missing, np.nan, np.asarray(values)[: len(encoded)])
        for name, gate in RELEASED.items() if released else ():
            changes = edits.released_clamp(
                gates,
                ends[0],
                np.arange(width)[None] == ends[1][:, None],
                gate=gate,
                shared_routing=prototypes.shared_routing,
                heads=prototypes.heads,
                chosen=chosen,
            )
            columns[name], _ = compare(read(y_BT, changes, record=False)[0])
    return {name: np.asarray(values)[: len(encoded)].tolist() for name, values in columns.items()}


def _padded(sentences: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
    """Ids `[rows, width]`; longer sentences are cut, missing ones are copies of the first."""
    result = np.full((rows, width), PAD, np.int32)
    for b in range(rows):
        ids = list(sentences[b if b < len(sentences) else 0])[:width]
        result[b, : len(ids)] = ids
    return result


def _ends(tokens_BT: np.ndarray) -> np.ndarray:
    """Position of the last token of each row."""
    return (tokens_BT != PAD).sum(1) - 1


@functools.partial(exact_jit, static_argnames=("record", "cfg", "mixer"))
def _read(
    params: ParamTree,
    tokens_BT: jax.Array,
    changes: Mapping[str, Any],
    *,
    record: bool,
    cfg: DecoderConfig,
    mixer: Mixer,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Logits `[B, T, V]` and, if asked for, the gates of all layers `[L, B, T, R]`."""
    output = lm_jax.forward(
        params,
        tokens_BT,
        cfg,
        mixer=mixer,
        edits=changes,
        record=dict.fromkeys(edits.GATES, lm_jax.keep) if record else {},
        valid_BT=tokens_BT != PAD,
    )
    return output.logits, output.records


@exact_jit
def _compare(
    logits_x_BTV: jax.Array,
    logits_y_BTV: jax.Array,
    *,
    aligned_BT: jax.Array,
    end_x_B: jax.Array,
    end_y_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """JS after the last token, and its mean over aligned tokens, NaN without any; each `[B]`."""

    def at(logits_BTV: jax.Array, position_BX: jax.Array) -> jax.Array:
        return jnp.take_along_axis(logits_BTV, position_BX[..., None], axis=1)

    last_B1 = jensen_shannon(at(logits_x_BTV, end_x_B[:, None]), at(logits_y_BTV, end_y_B[:, None]))
    kept_BT = aligned_BT >= 0
    js_BT = jensen_shannon(at(logits_x_BTV, jnp.maximum(aligned_BT, 0)), logits_y_BTV)
    mean_B = jnp.where(kept_BT, js_BT, 0.0).sum(1) / kept_BT.sum(1)
    return last_B1[:, 0], mean_B
