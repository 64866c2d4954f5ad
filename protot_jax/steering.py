"""Text under a sweep of a prototype's strength, and under the routing of another text.

iaj protot generate --run=RUN --prompt="the war" --edit=L2P5:scale --strengths=0,1,2,4
iaj protot generate --run=RUN --prompt="the war" --routing_of="the treaty of peace"
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.evaluate.generation import repetition
from lm_jax.model.decode import Sampling, stream
from lm_jax.model.edits import Chain
from lm_jax.run import stop
from protot_jax import edits
from protot_jax.edits import PrototypeEdit
from protot_jax.interventions.sentences import open_ids, word_ids
from protot_jax.saved_run import TrainedModel

# The edits of some positions: the first, and how many.
EditsAt = Callable[[int, int], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Steered:
    """A continuation under one strength.

    Attributes:
      by: the factor of the edits.
      text: prompt and continuation.
      perplexity: of the continuation, under the model without edits; NaN if there is none.
      repetition: the share of the continuation's n-grams that it had already.
      probability: of the target after the prompt, under the edits; None without a target.
    """

    by: float
    text: str
    perplexity: float
    repetition: float
    probability: float | None


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
        edits.check_factor(edits.SCALE, result[-1])
    return tuple(result)


def with_strength(chosen: Sequence[PrototypeEdit], by: float) -> list[PrototypeEdit]:
    """The edits with `by` as the factor of those of mode `scale` that have none."""
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
) -> list[Steered]:
    """Continues a prompt under every strength, each with the same key.

    Args:
      model: with prototypes.
      prompt: the text that is continued.
      chosen: edits, of which at least one is of mode `scale` without a factor.
      strengths: the factors.
      tokens: how many are generated at most.
      sampling: how.
      key: of the sampler.
      target: a word whose first token's probability after the prompt is measured.

    Raises:
      UsageError: no edit to vary, or no end.
      BadInputError: the vocabulary lacks the target.
    """
    if not any(map(_open, chosen)):
        raise UsageError("strengths vary an edit of mode scale; write --edit=L2P5:scale")
    if tokens < 1:
        raise UsageError("tokens = 0 has no end; a sweep of strengths needs at least 1")
    ids = open_ids(model.tokenizer, prompt)
    wanted = None if target is None else word_ids(model.tokenizer, [target])[0][0]
    forward = jax.jit(functools.partial(lm_jax.forward, cfg=model.cfg, mixer=model.mixer))
    result = []
    for by in strengths:
        stop.check("while steering")
        changes = edits.several(model.params, with_strength(chosen, by))
        arguments = {"mixer": model.mixer, "sampling": sampling, "key": key, "edits": changes}
        endless = stream(model.params, ids, model.cfg, stop_id=model.tokenizer.eos_id, **arguments)
        new = list(itertools.islice(endless, tokens))
        padded_1T = jnp.asarray([ids + new + [0] * (tokens - len(new))])
        log_p_TV = jax.nn.log_softmax(forward(model.params, padded_1T).logits[0])
        at = np.arange(len(ids) - 1, len(ids) - 1 + len(new))
        loss = -np.asarray(log_p_TV[at, np.asarray(new, int)], np.float64)
        probability = None
        if wanted is not None:
            edited_V = forward(model.params, jnp.asarray([ids]), edits=changes).logits[0, -1]
            probability = float(jax.nn.softmax(edited_V)[wanted])
        written = model.tokenizer.decode(ids + new, skip_special_tokens=True)
        continuation = model.tokenizer.decode(new, skip_special_tokens=True)
        perplexity = float(np.exp(loss.mean())) if new else float("nan")
        result.append(Steered(by, written, perplexity, repetition(continuation), probability))
    return result


def routing_of(model: TrainedModel, text: str, others: Mapping[str, Any] | None = None) -> EditsAt:
    """The edits that give token i of a text the gates of token i of another, in every layer.

    Tokens past the end of the other text have their own gates.

    Args:
      model: with prototypes.
      text: the other text.
      others: further edits, made after these.
    """
    tokens_1S = jnp.asarray([open_ids(model.tokenizer, text)])
    record = dict.fromkeys(edits.GATES, lm_jax.keep)
    forward = functools.partial(lm_jax.forward, cfg=model.cfg, mixer=model.mixer, record=record)
    gates = jax.jit(forward)(model.params, tokens_1S).records

    def at(start: int, count: int) -> dict[str, Any]:
        source_T = np.arange(start, start + count)
        source_T = np.where(source_T < tokens_1S.shape[1], source_T, -1)
        held = edits.clamp(gates, source_T[None])
        return {
            site: Chain((one, *others[site].edits)) if others and site in others else one
            for site, one in held.items()
        }

    return at
