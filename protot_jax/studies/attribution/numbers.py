"""Numbers of an attribution: prompt and targets as tokens, parts as results."""

from collections.abc import Sequence
import warnings

import numpy as np
from scipy import stats

from lm_jax.errors import UsageError
from lm_jax.run.results import finite
from lm_jax.text.tokenizer import Tokenizer
from protot_jax.analysis.token_ids import prompt_tokens, word_ids
from protot_jax.studies.attribution import results
from protot_jax.studies.attribution.decomposition import (
    Decomposition,
    FrozenRun,
    attribute,
    frozen_run,
)
from protot_jax.studies.attribution.effects import measured_effects
from protot_jax.studies.concepts.examples import spelled
from protot_jax.training.saved_run import TrainedModel

# Share of absolute shares whose number of pairs is reported, as in Fig. 7 of the paper on sparse
# attention.
MASS = 0.9


def target_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    """Ids of words that may follow the prompt, one token each.

    Raises:
      UsageError: a word is not one token, or named twice.
      BadInputError: a word is not in the vocabulary.
    """
    rows = word_ids(tokenizer, words)
    for word, ids in zip(words, rows, strict=True):
        if len(ids) > 1:
            pieces = ", ".join(spelled(tokenizer, i) for i in ids)
            raise UsageError(
                f"--targets: {word!r} is {len(ids)} tokens ({pieces}); name words of one token, "
                f"such as the first of these"
            )
    ids = [row[0] for row in rows]
    if len(set(ids)) < len(ids):
        raise UsageError(f"--targets={','.join(words)} names a token twice; leave one out")
    return ids


def summarise(
    model: TrainedModel, prompt: str, words: Sequence[str], *, top: int, pairs: int
) -> results.AttributionReport:
    """Attributes the logits of a prompt, and measures the effects of prototypes on them.

    Args:
      model: a model with prototypes.
      prompt: text to be continued.
      words: words whose logits are attributed; without any, the `top` most probable tokens.
      top: how many.
      pairs: how many of the strongest pairs of positions are listed.

    Raises:
      UsageError: the model has no prototypes, or the prompt or a word cannot be used.
      BadInputError: a word is not in the vocabulary.
    """
    _ = model.prototypes  # a model without any is refused before any work
    tokenizer = model.tokenizer
    tokens, targets = prompt_tokens(tokenizer, prompt), target_ids(tokenizer, words)
    run = frozen_run(model, tokens)
    probability_V = np.asarray(run.probability_V)
    targets = targets or np.argsort(-probability_V, kind="stable")[:top].tolist()
    measured_XLR = measured_effects(model, tokens, targets)
    reports = []
    for i, target in enumerate(targets):
        # One at a time: shares are an array by layer, prototype and pair of positions.
        parts = attribute(model, tokens, targets=[target])
        token = results.Token(target, spelled(tokenizer, target))
        reports.append(
            _target(token, float(probability_V[target]), parts, run, measured_XLR[i], pairs)
        )
    return results.AttributionReport(
        schema=results.SCHEMA,
        version=results.VERSION,
        model=model.described(results.Model),
        prompt=prompt,
        tokens=tuple(results.Token(i, spelled(tokenizer, i)) for i in tokens),
        targets=tuple(reports),
    )


def _target(
    token: results.Token,
    probability: float,
    parts: Decomposition,
    run: FrozenRun,
    measured_LR: np.ndarray,
    pairs: int,
) -> results.Target:
    share_LNTS = np.asarray(parts.through_XLNTS[0], np.float64)
    through_LN = share_LNTS.sum((2, 3))
    ordered = np.argsort(-np.abs(share_LNTS).ravel(), kind="stable")
    sizes = np.cumsum(np.abs(share_LNTS).ravel()[ordered])
    weight_LNTS = np.asarray(run.layers.mixer.pattern_LNTS)
    certificate = parts.certificate()
    over_count = float(parts.over_count()[0])
    return results.Target(
        token=token,
        probability=probability,
        logit=float(parts.logit_X[0]),
        sources=results.Sources(
            _nested(parts.token_XT[0]), _nested(parts.mlp_XLT[0]), float(parts.constant_X[0])
        ),
        through=results.Through(
            _nested(through_LN),
            _nested(parts.bypass_XL[0]),
            _nested(parts.later_XL[0]),
            over_count if np.isfinite(over_count) else None,
        ),
        direct=results.Direct(
            _nested(np.asarray(parts.direct_XLNS[0], np.float64).sum(2)),
            _nested(parts.direct_mlp_XL[0]),
            float(parts.direct_token_X[0]),
            float(parts.direct_constant_X[0]),
        ),
        measured=results.Measured(_nested(measured_LR), _spearman(through_LN, measured_LR)),
        pairs=tuple(
            results.Pair(
                *map(int, (layer, prototype, key, query)),
                share=float(share_LNTS[layer, prototype, query, key]),
                weight=float(weight_LNTS[layer, prototype, query, key]),
            )
            for layer, prototype, query, key in zip(
                *np.unravel_index(ordered[:pairs], share_LNTS.shape), strict=True
            )
            if share_LNTS[layer, prototype, query, key]
        ),
        pairs_for_90_percent=int(np.searchsorted(sizes, MASS * sizes[-1])) + 1,
        entries=int(np.count_nonzero(share_LNTS)),
        certificate=results.Certificate(
            float(certificate["sources"][0]),
            float(certificate["direct"][0]),
            _nested(certificate["layers"][0]),
        ),
    )


def _nested(array: np.ndarray) -> tuple:
    """An array as tuples of floats."""
    if np.ndim(array) == 1:
        return tuple(map(float, array))
    return tuple(_nested(row) for row in array)


def _spearman(first: np.ndarray, second: np.ndarray) -> float | None:
    with warnings.catch_warnings():
        # It warns where a side does not vary, and gives NaN.
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        return finite(stats.spearmanr(first.ravel(), second.ravel()).statistic)
