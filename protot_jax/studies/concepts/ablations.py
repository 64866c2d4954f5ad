"""What the explorer shows on a prototype's texts: it is left out, and what it carries to a word.

1. The prototype's read gate is 0 at every token, and the change of every token's log probability is
   measured in the model. The controls are the other prototypes of the layer, each left out in turn
   on the same texts: a prototype that its texts need does more harm there than the others.
2. Of every token's logit, the parts that prototypes add directly (`attribution.decomposition`), and
   the earlier token from which most of each part comes.

Both are measured on the first few of the texts that a prototype writes most.
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from lm_jax.model.config import DecoderConfig
from lm_jax.model.mixers import Mixer
from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit, exact_products
from lm_jax.run import progress, stop
from protot_jax.mixers import edits
from protot_jax.studies.attribution.decomposition import direct_by_position, freeze
from protot_jax.studies.concepts.ablation_results import Ablation, Carried
from protot_jax.studies.concepts.collect import Texts, read
from protot_jax.studies.concepts.examples import ReportTexts
from protot_jax.studies.concepts.results import Prototype, TopText
from protot_jax.training.saved_run import TrainedModel

MODE = "zero_read"
# Prototypes that are listed for a token.
LISTED = 3
_ROWS = 16
# Of changes and of parts: a page has many of them.
_CHANGE_DIGITS, _PART_DIGITS = 4, 3


def with_ablations(
    model: TrainedModel,
    texts: Texts,
    report_texts: ReportTexts,
    prototypes: Sequence[Prototype],
    count: int,
) -> list[Prototype]:
    """Adds the effect of leaving each prototype out, on the first `count` of its texts.

    Raises:
      StoppedError: the command was asked to stop.
    """
    results: list[Prototype] = []
    with progress.track("leave out", len(prototypes), unit="prototypes") as advance:
        for layer in range(model.cfg.num_layers):
            own = [each for each in prototypes if each.layer == layer]
            entries = {top.text for each in own for top in each.top_texts[:count]}
            rows = sorted(report_texts.rows[entry] for entry in entries)
            tokens_NT = texts.token_NT[rows]
            # In no layer.
            clean_NT = _losses(model, tokens_NT, -1, 0)
            change_RNT = []
            for each in own:
                stop.check("while leaving out prototypes")
                change_RNT.append(clean_NT - _losses(model, tokens_NT, layer, each.prototype))
                advance()
            place = {text: n for n, text in enumerate(rows)}
            for each in own:
                top_texts = each.top_texts[:count]
                at = [place[report_texts.rows[top.text]] for top in top_texts]
                mask_NT = texts.token_mask_NT[[rows[n] for n in at]]
                changes = [change_NT[at] for change_NT in change_RNT]
                results.append(_ablated(each, own.index(each), changes, mask_NT))
    return results


def _losses(model: TrainedModel, tokens_NT: np.ndarray, layer: int, prototype: int) -> np.ndarray:
    """Losses `[N, T]` without a prototype; NaN where nothing is predicted."""
    changes = edits.edit_in(layer, prototype, MODE)
    losses_NT = np.full(tokens_NT.shape, np.nan)
    for start in range(0, len(tokens_NT), _ROWS):
        rows_NT = tokens_NT[start : start + _ROWS]
        padded_BT = np.pad(rows_NT, ((0, _ROWS - len(rows_NT)), (0, 0)))
        loss_BT, _ = read(model, padded_BT, (), changes)
        losses_NT[start : start + _ROWS, 1:] = np.asarray(loss_BT)[: len(rows_NT)]
    return np.where(tokens_NT != 0, losses_NT, np.nan)


def _ablated(
    each: Prototype, index: int, change_RNT: Sequence[np.ndarray], mask_NT: np.ndarray
) -> Prototype:
    """The prototype with its effect; `change_RNT` are those of all of its layer on its texts."""
    if not len(mask_NT):
        return each
    mean_R = [float(np.nanmean(change_NT[mask_NT])) for change_NT in change_RNT]
    others = [mean for r, mean in enumerate(mean_R) if r != index]
    # The lower the change, the greater the harm.
    harmed = None
    if others:
        harmed = float(stats.percentileofscore(np.negative(others), -mean_R[index], kind="mean"))
    own_NT = change_RNT[index]
    tops = [
        dataclasses.replace(top, ablated=_by_token(own_NT[n][mask_NT[n]]))
        for n, top in enumerate(each.top_texts[: len(mask_NT)])
    ]
    return dataclasses.replace(
        each,
        top_texts=(*tops, *each.top_texts[len(tops) :]),
        ablation=Ablation(mean_R[index], harmed, len(others), len(tops)),
    )


def _by_token(change_T: np.ndarray) -> tuple[float | None, ...]:
    return tuple(None if np.isnan(x) else round(float(x), _CHANGE_DIGITS) for x in change_T)


def add_carried(
    model: TrainedModel, texts: Texts, report_texts: ReportTexts, tops: Sequence[TopText]
) -> None:
    """Adds to the entries of some texts what prototypes carry to their tokens.

    Raises:
      StoppedError: the command was asked to stop.
    """
    entries = sorted({top.text for top in tops})
    with progress.track("attribute", len(entries), unit="texts") as advance:
        for entry in entries:
            stop.check("while attributing texts")
            row = report_texts.rows[entry]
            tokens_T, mask_T = texts.token_NT[row], texts.token_mask_NT[row]
            with exact_products():
                direct_LNTS = np.asarray(_direct(model.params, tokens_T, model.cfg, model.mixer))
            report_texts.entries[entry] = dataclasses.replace(
                report_texts.entries[entry], carried=_carried(direct_LNTS, mask_T)
            )
            advance()


@functools.partial(exact_jit, static_argnums=(2, 3))
def _direct(params: ParamTree, tokens_T: jax.Array, cfg: DecoderConfig, mixer: Mixer) -> jax.Array:
    """Parts of the logit of the next token at each position but the last, `[L, N, T - 1, S]`.

    Padding at the end changes nothing before it.
    """
    run = freeze(params, tokens_T, cfg, mixer)
    return direct_by_position(run, jnp.roll(tokens_T, -1))[:, :, :-1]


def _carried(direct_LNTS: np.ndarray, mask_T: np.ndarray) -> Carried:
    """The strongest of the parts of each token that is in the report."""
    L, N, _, _ = direct_LNTS.shape
    # Positions in the text as the report counts them, which has no marks.
    shown_T = np.where(mask_T, np.cumsum(mask_T) - 1, -1)
    columns: dict[str, list[tuple]] = {field.name: [] for field in dataclasses.fields(Carried)}
    for token in np.flatnonzero(mask_T):
        rows: list[tuple] = []
        # The first token of all is not predicted, and the second reads nothing but the first.
        if token:
            parts_MS = direct_LNTS[:, :, token - 1].reshape(L * N, -1)
            logit_M = parts_MS.sum(1, dtype=np.float64)
            for m in np.argsort(-np.abs(logit_M), kind="stable")[:LISTED]:
                if logit_M[m]:
                    k = int(np.argmax(np.abs(parts_MS[m])))
                    logit, part = (
                        round(float(x), _PART_DIGITS) for x in (logit_M[m], parts_MS[m, k])
                    )
                    rows.append((int(m // N), int(m % N), logit, int(shown_T[k]), part))
        for i, column in enumerate(columns.values()):
            column.append(tuple(row[i] for row in rows))
    return Carried(**{name: tuple(rows) for name, rows in columns.items()})
