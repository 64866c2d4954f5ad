"""Metrics of circuit tasks: how much more the model expects right continuations than wrong ones.

    logit_difference            mean logit of right continuations minus that of wrong ones
    probability_difference      probability of all right continuations minus that of all wrong ones
    log_probability_difference  the same of logarithms: log P(right) - log P(wrong)

The first is IOI's usual metric. The paper's greater-than metric is "the logit difference between
the aggregated probability mass" (appendix E.1), which may mean either of the others.

Numbers of two one-digit tokens have the product form: a tens digit above the clean one is right
whatever follows, and with the clean tens digit the units decide,

    P(right) = sum_{d > tens} P(d) + P(tens) sum_{u > units} P(u | tens)

Continuations of several tokens are read along the right one, whose tokens stand after the prompt
(`Path`): its probability is the product over all of its tokens, each given those before it. A wrong
one counts as far as the token with which it leaves the right one, that is with everything that may
follow there, so that one run of the model has all that is compared.
"""

from collections.abc import Callable, Mapping

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError, nearest


@struct.dataclass
class Path:
    """Continuations of several tokens of B prompts, along K positions; -1 marks no id.

    Attributes:
      next_BK: the token that leads to the next position.
      right_BKA, wrong_BKA: tokens with which a right or wrong continuation ends there.
    """

    next_BK: jax.Array
    right_BKA: jax.Array
    wrong_BKA: jax.Array


@struct.dataclass
class Continuations:
    """Right and wrong continuations of B prompts; -1 marks no id.

    Attributes:
      right_BA, wrong_BA: ids of the first token.
      tens_B: id of the first token after which `second_*` are read; any id where they are empty.
      second_right_BA, second_wrong_BA: ids of the second token.
      path: what is read in place of all these where continuations have several tokens; else None.
    """

    right_BA: jax.Array
    wrong_BA: jax.Array
    tens_B: jax.Array
    second_right_BA: jax.Array
    second_wrong_BA: jax.Array
    path: Path | None = None


def logit_difference(
    first_BV: jax.Array,
    second_BV: jax.Array,
    continuations: Continuations,
    path_BKV: jax.Array | None = None,
) -> jax.Array:
    """Mean logit of right continuations minus that of wrong ones, `[B]`.

    Raises:
      UsageError: continuations have several tokens.
    """
    del second_BV, path_BKV
    if continuations.path is not None:
        raise UsageError(
            "logit_difference needs continuations of one token; choose log_probability_difference"
        )
    if continuations.second_wrong_BA.shape[1]:
        raise UsageError(
            "logit_difference needs continuations of one token; choose probability_difference"
        )

    def mean(ids_BA: jax.Array) -> jax.Array:
        logits_BA = _take(first_BV, ids_BA, 0.0)
        return logits_BA.sum(1) / jnp.maximum((ids_BA >= 0).sum(1), 1)

    return mean(continuations.right_BA) - mean(continuations.wrong_BA)


def probability_difference(
    first_BV: jax.Array,
    second_BV: jax.Array,
    continuations: Continuations,
    path_BKV: jax.Array | None = None,
) -> jax.Array:
    """P(right) - P(wrong), `[B]`."""
    right_B, wrong_B = _log_probabilities(first_BV, second_BV, continuations, path_BKV)
    return jnp.exp(right_B) - jnp.exp(wrong_B)


def log_probability_difference(
    first_BV: jax.Array,
    second_BV: jax.Array,
    continuations: Continuations,
    path_BKV: jax.Array | None = None,
) -> jax.Array:
    """log P(right) - log P(wrong), `[B]`."""
    right_B, wrong_B = _log_probabilities(first_BV, second_BV, continuations, path_BKV)
    return right_B - wrong_B


# Of the logits at the continuation and at the position after it, the continuations, and the logits
# at the positions of `Continuations.path`.
Metric = Callable[..., jax.Array]
METRICS: Mapping[str, Metric] = {
    "logit_difference": logit_difference,
    "probability_difference": probability_difference,
    "log_probability_difference": log_probability_difference,
}


def answers_right(
    metric: str, first_BV: jax.Array, second_BV: jax.Array, continuations: Continuations
) -> jax.Array:
    """Whether each prompt is answered right, `[B]`.

    With `logit_difference`, a right continuation has a higher logit than every wrong one: a mean
    over wrong ones may be low where one of them is expected. The other metrics compare sums of
    probabilities of many continuations; there the metric is above 0.
    """
    if metric != "logit_difference":
        return METRICS[metric](first_BV, second_BV, continuations) > 0
    best_B, rival_B = (
        _take(first_BV, ids_BA, -jnp.inf).max(1)
        for ids_BA in (continuations.right_BA, continuations.wrong_BA)
    )
    return best_B > rival_B


def check_name(name: str) -> str:
    """The name, if there is such a metric.

    Raises:
      UsageError: there is none; naming the nearest.
    """
    if name not in METRICS:
        raise UsageError(f"there is no metric {name!r}{nearest(name, METRICS)}")
    return name


def _log_probabilities(
    first_BV: jax.Array,
    second_BV: jax.Array,
    continuations: Continuations,
    path_BKV: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """log P of all right and of all wrong continuations, `[B]` each."""
    if continuations.path is not None:
        assert path_BKV is not None, "a batch with a path has its logits read"
        return _along(path_BKV, continuations.path)
    first_BV, second_BV = jax.nn.log_softmax(first_BV), jax.nn.log_softmax(second_BV)
    tens_B1 = jnp.take_along_axis(first_BV, continuations.tens_B[:, None], 1)

    def total(ids_BA: jax.Array, second_BA: jax.Array) -> jax.Array:
        terms = [
            _take(first_BV, ids_BA, -jnp.inf),
            tens_B1 + _take(second_BV, second_BA, -jnp.inf),
        ]
        return jax.nn.logsumexp(jnp.concatenate(terms, 1), axis=1)

    return (
        total(continuations.right_BA, continuations.second_right_BA),
        total(continuations.wrong_BA, continuations.second_wrong_BA),
    )


def _along(logits_BKV: jax.Array, path: Path) -> tuple[jax.Array, jax.Array]:
    """log P of all right and of all wrong continuations of several tokens, `[B]` each."""
    logp_BKV = jax.nn.log_softmax(logits_BKV)
    step_BK = jnp.take_along_axis(logp_BKV, jnp.maximum(path.next_BK, 0)[:, :, None], 2)[:, :, 0]
    # Of the tokens before each position.
    before_BK = jnp.pad(jnp.cumsum(step_BK, 1)[:, :-1], ((0, 0), (1, 0)))

    def total(ids_BKA: jax.Array) -> jax.Array:
        here_BKA = jnp.take_along_axis(logp_BKV, jnp.maximum(ids_BKA, 0), 2)
        terms_BKA = jnp.where(ids_BKA >= 0, before_BK[:, :, None] + here_BKA, -jnp.inf)
        return jax.nn.logsumexp(terms_BKA, axis=(1, 2))

    return total(path.right_BKA), total(path.wrong_BKA)


def _take(values_BV: jax.Array, ids_BA: jax.Array, fill: float) -> jax.Array:
    """Values of ids, `fill` where there is no id."""
    values_BA = jnp.take_along_axis(values_BV, jnp.maximum(ids_BA, 0), 1)
    return jnp.where(ids_BA >= 0, values_BA, fill)
