"""Text under a sweep of a prototype's strength, and under the routing of another text.

iaj protot generate --run=RUN --prompt="the war" --edit=L2P5:scale --strengths=0,1,2,4
iaj protot generate --run=RUN --prompt="the war" --routing_of="the treaty of peace"

Any prototype moves a continuation if it is made strong enough. So other prototypes of the same
layer get the same strengths (`others`), and the named one has its rank among them (`place`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.evaluate.generation import repetition
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decode import stream
from lm_jax.model.edits import Chain
from lm_jax.model.mixers import Mixer
from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit
from lm_jax.model.sampling import Sampling
from lm_jax.run import stop
from protot_jax.analysis.token_ids import open_ids, word_ids
from protot_jax.mixers import edits
from protot_jax.mixers.edits import PrototypeEdit
from protot_jax.training.saved_run import TrainedModel

# The edits of some positions: the first, and how many.
EditsAt = Callable[[int, int], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Steered:
    """A continuation under one strength.

    Attributes:
      by: the factor of the edits.
      text: prompt and continuation.
      perplexity: perplexity of the continuation, under the model without edits; None if there is
        none.
      repetition: the share of the continuation's n-grams that it had already; None if it has none.
      probability: probability of the target after the prompt, under the edits; None without a
        target.
    """

    by: float
    text: str
    perplexity: float | None
    repetition: float | None
    probability: float | None


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the named prototype lies among others under one strength.

    Attributes:
      by: the factor.
      measure: "probability" of the target, or "perplexity" of the continuation.
      named: geometric mean over prompts under the named prototype; the unit is that of `Steered`.
      others: the same under each other prototype.
      as_low: number of the others with an equal or lower one.
      p: two-sided p, twice the share of prototypes, the named one included, that are as extreme on
        its side.
      prompts: number of prompts.
    """

    by: float
    measure: Literal["probability", "perplexity"]
    named: float
    others: tuple[float, ...]
    as_low: int
    p: float
    prompts: int


def parse_strengths(texts: Sequence[str]) -> tuple[float, ...]:
    """Parses factors such as "0.5".

    Raises:
      UsageError: one of them is no number from 0 on.
    """
    result = []
    for text in texts:
        try:
            result.append(float(text))
        except ValueError:
            raise UsageError(f"strengths: {text!r} is not a number; write 0,1,2") from None
        if not 0 <= result[-1] < math.inf:
            raise UsageError(f"strengths: {text} must be a factor from 0 on")
    return tuple(result)


def with_strength(chosen: Sequence[PrototypeEdit], by: float) -> list[PrototypeEdit]:
    """The edits, with `by` as the factor of each edit of mode `scale` that has none."""
    return [one._replace(by=by) if _open(one) else one for one in chosen]


def _open(one: PrototypeEdit) -> bool:
    return one.mode == edits.SCALE and one.by is None


def sweep(
    model: TrainedModel,
    prompt: str,
    chosen: Sequence[PrototypeEdit],
    strengths: Sequence[float],
    *,
    tokens: int,
    sampling: Sampling,
    key: jax.Array,
    target: str | None = None,
) -> Iterator[Steered]:
    """Continues a prompt under every strength, each with the same key.

    Args:
      model: a model with prototypes.
      prompt: the text that is continued.
      chosen: edits, of which at least one is of mode `scale` without a factor.
      strengths: the factors.
      tokens: the most tokens to generate; fewer where the process is asked to stop.
      sampling: how the tokens are drawn.
      key: random key of the sampler.
      target: a word whose probability after the prompt is measured, over all of its tokens.

    Yields what belongs to each strength, until the process is asked to stop.

    Raises:
      UsageError: no edit to vary, or no end.
      BadInputError: the vocabulary lacks the target.
    """
    if not any(map(_open, chosen)):
        raise UsageError("strengths vary an edit of mode scale; write --edit=L2P5:scale")
    if tokens < 1:
        raise UsageError("tokens = 0 has no end; a sweep of strengths needs at least 1")
    tokenizer, ids = model.tokenizer, open_ids(model.tokenizer, prompt)
    word = [] if target is None else word_ids(tokenizer, [target])[0]
    log_probability = exact_jit(
        functools.partial(_log_probability, cfg=model.cfg, mixer=model.mixer)
    )

    def loss(new: Sequence[int], changes: Mapping[str, Any]) -> float:
        """The loss in nats of the tokens after the prompt."""
        rows_1T = jnp.asarray([[*ids, *new, *[0] * (tokens - len(new))]])
        log_p_T = np.asarray(log_probability(model.params, rows_1T, changes), np.float64)
        return -float(log_p_T[len(ids) - 1 : len(ids) - 1 + len(new)].sum())

    for by in strengths:
        changes = edits.several(model.params, with_strength(chosen, by))
        arguments = {"mixer": model.mixer, "sampling": sampling, "key": key, "edits": changes}
        new = []
        for token in itertools.islice(
            stream(model.params, ids, model.cfg, stop_id=tokenizer.stop_ids, **arguments), tokens
        ):
            new.append(token)
            if stop.requested():
                break
        repeated = repetition(tokenizer.decode(new, skip_special_tokens=True))
        yield Steered(
            by,
            tokenizer.decode(ids + new, skip_special_tokens=True),
            math.exp(loss(new, {}) / len(new)) if new else None,
            None if math.isnan(repeated) else repeated,
            math.exp(-loss(word, changes)) if word else None,
        )
        if stop.requested():
            return


def others(
    model: TrainedModel, chosen: Sequence[PrototypeEdit], *, count: int, seed: int
) -> list[list[PrototypeEdit]]:
    """The edits with other prototypes of the same layers in place of those that strengths vary.

    Args:
      model: a model with prototypes.
      chosen: the edits that `sweep` takes.
      count: the most edits to draw; fewer where a layer has no more.
      seed: seed of the draw, without repetition.

    Raises:
      UsageError: a layer has no other prototype.
    """
    named = {(one.layer, one.prototype) for one in chosen}
    rng, varied = np.random.default_rng(seed), Counter(one.layer for one in filter(_open, chosen))
    drawn: dict[int, list[int]] = {}
    for layer in sorted(varied):
        known = range(model.prototypes.num_prototypes)
        free = [other for other in known if (layer, other) not in named]
        drawn[layer] = rng.permutation(free).tolist()
    most = min((len(drawn[layer]) // times for layer, times in varied.items()), default=0)
    left = {layer: iter(each) for layer, each in drawn.items()}
    result = [
        [one._replace(prototype=next(left[one.layer])) if _open(one) else one for one in chosen]
        for _ in range(min(count, most))
    ]
    if not result:
        raise UsageError(
            "strengths: the layer has no other prototype to compare with; name fewer prototypes"
        )
    return result


def place(
    named: Sequence[Sequence[Steered]], controls: Sequence[Sequence[Sequence[Steered]]]
) -> list[Place]:
    """Where the named prototype lies among others, by strength and measure.

    Args:
      named: what `sweep` gave, by prompt and strength.
      controls: the same of each other prototype, with the same prompts and strengths.
    """
    result = []
    for s, one in enumerate(named[0]):
        for measure in ("probability", "perplexity"):
            own, *rest = (_geometric(each, s, measure) for each in (named, *controls))
            values = [value for value in rest if value is not None]
            if own is None or not values:
                continue
            as_low = sum(value <= own for value in values)
            as_high = sum(value >= own for value in values)
            p = min(1.0, 2 * (1 + min(as_low, as_high)) / (1 + len(values)))
            result.append(Place(one.by, measure, own, tuple(values), as_low, p, len(named)))
    return result


def _geometric(swept: Sequence[Sequence[Steered]], s: int, measure: str) -> float | None:
    """Geometric mean over prompts under strength s; None where a prompt has no value."""
    values = [getattr(of_prompt[s], measure) for of_prompt in swept]
    if any(value is None for value in values):
        return None
    return float(np.exp(np.mean(np.log(np.maximum(values, np.finfo(float).tiny)))))


def _log_probability(
    params: ParamTree,
    tokens_BT: jax.Array,
    changes: Mapping[str, Any],
    *,
    cfg: DecoderConfig,
    mixer: Mixer,
) -> jax.Array:
    """The log-probability of each token of the first row but its first, in nats."""
    logits_TV = lm_jax.forward(params, tokens_BT[:, :-1], cfg, mixer=mixer, edits=changes).logits[0]
    log_p_TV = jax.nn.log_softmax(logits_TV.astype(jnp.float32))
    return jnp.take_along_axis(log_p_TV, tokens_BT[0, 1:, None], axis=-1)[:, 0]


def routing_of(model: TrainedModel, text: str, chosen: Sequence[PrototypeEdit] = ()) -> EditsAt:
    """The edits that give token i of a text the gates of token i of another, in every layer.

    Tokens past the end of the other text have their own gates.

    Args:
      model: a model with prototypes.
      text: the other text.
      chosen: edits that are made of all gates, held or not.

    Raises:
      UsageError: an edit of logits, which a gate that is held no longer depends on.
    """
    for one in chosen:
        if one.mode.startswith("mask"):
            raise UsageError(
                f"edit: {one.mode} acts on logits, which do not reach a gate that routing_of "
                f"holds; use {one.mode.replace('mask', 'zero')}"
            )
    others = edits.several(model.params, chosen)
    tokens_1S = jnp.asarray([open_ids(model.tokenizer, text)])
    record = dict.fromkeys(edits.GATES, lm_jax.keep)
    forward = functools.partial(lm_jax.forward, cfg=model.cfg, mixer=model.mixer, record=record)
    gates = exact_jit(forward)(model.params, tokens_1S).records

    def at(start: int, count: int) -> dict[str, Any]:
        source_T = np.arange(start, start + count)
        source_T = np.where(source_T < tokens_1S.shape[1], source_T, -1)
        held = edits.clamp(gates, source_T[None])
        return {
            site: Chain((one, *others[site].edits)) if site in others else one
            for site, one in held.items()
        }

    return at
