"""Scores of attribution graphs on a fixed set of prompts, in training and at its end.

Replacement and completeness are means over prompts (`sparse_jax.graphs.influence`). All prompts
have one length, so that the programs of a graph are compiled once, but for the number of active
features, which is rounded up. A prompt without any active feature has no graph and is counted.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep
from lm_jax.text.examples import IGNORE_INDEX
from lm_jax.text.tokenizer import Tokenizer, prompt_ids
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs.attribute import attribute
from sparse_jax.graphs.basis import Features
from sparse_jax.graphs.graph import GraphScores
from sparse_jax.graphs.influence import Scores
from sparse_jax.studies.transcoders.results import PromptScores
from sparse_jax.transcoders.activations import largest
from sparse_jax.transcoders.inputs import INPUT
from sparse_jax.transcoders.transcoder import Transcoder


@dataclasses.dataclass(frozen=True, eq=False)
class PromptSet:
    """Prompts of one length, int32 `[B, T]`."""

    tokens_BT: np.ndarray

    @property
    def sha256(self) -> str:
        """Digest of the number of prompts, their length and their ids."""
        sizes = ",".join(map(str, self.tokens_BT.shape)).encode()
        ids = np.ascontiguousarray(self.tokens_BT, "<i4").tobytes()
        return hashlib.sha256(sizes + b":" + ids).hexdigest()

    @classmethod
    def of_windows(cls, batches: Iterable[np.ndarray], *, count: int, length: int) -> "PromptSet":
        """The beginnings of the first windows that are long enough, at most `count`.

        Args:
          batches: rows of ids `[B, S]`, filled up with `IGNORE_INDEX`.
          count: the most prompts.
          length: length of a prompt, in tokens.

        Raises:
          BadInputError: no window is long enough.
        """
        prompts: list[np.ndarray] = []
        for rows_BS in batches:
            starts_BT = rows_BS[:, :length]
            prompts += list(starts_BT[(starts_BT != IGNORE_INDEX).all(1)])
            if len(prompts) >= count:
                break
        if not prompts:
            raise BadInputError(
                f"held-out text has no window of {length} tokens to score graphs on; lower "
                "config.score_tokens, or give longer documents"
            )
        return cls(np.stack(prompts[:count]).astype(np.int32))

    @classmethod
    def of_texts(cls, texts: Sequence[str], tokenizer: Tokenizer, *, length: int) -> "PromptSet":
        """The last tokens of every text: as many as the shortest has, at most `length`.

        Raises:
          BadInputError: a text has fewer than two tokens.
        """
        ids = [prompt_ids(tokenizer, text) for text in texts]
        shortest = min(range(len(ids)), key=lambda i: len(ids[i]))
        length = min(length, len(ids[shortest]))
        if length < 2:
            raise BadInputError(
                f"config.prompts: {texts[shortest]!r} has fewer than two tokens; give a longer one"
            )
        return cls(np.asarray([each[-length:] for each in ids], np.int32))


def score_prompts(
    model: CircuitModel,
    transcoder: Transcoder,
    prompts: PromptSet,
    *,
    max_features: int,
    basis: Callable[[np.ndarray], Features] | None = None,
) -> PromptScores:
    """Scores of the graph of every prompt, and their means.

    Args:
      model: dense or sparse.
      transcoder: transcoder of the model's raw activations.
      prompts: the prompts.
      max_features: features with a row in a graph (`attribute`).
      basis: function from the ids of a prompt to the features of its graph; None for the
        transcoder's.
    """
    active_B = np.asarray(_active(model, transcoder, jnp.asarray(prompts.tokens_BT)))
    graphs = [
        attribute(
            model, basis(tokens_T) if basis else transcoder, tokens_T, max_features=max_features
        ).scores()
        for tokens_T in prompts.tokens_BT[active_B]
    ]
    return PromptScores(
        prompts=len(active_B),
        without_features=int((~active_B).sum()),
        tokens=prompts.tokens_BT.shape[1],
        sha256=prompts.sha256,
        max_features=max_features,
        mean=_mean(graphs) if graphs else None,
        replacement_by_prompt=tuple(each.unpruned.replacement for each in graphs),
    )


def with_largest(
    model: CircuitModel,
    transcoder: Transcoder,
    prompts: PromptSet,
    *,
    active: int,
    skip_start: int,
) -> Transcoder:
    """The transcoder as BatchTopK with all prompts as its batch: one threshold for all features.

    Args:
      model: dense or sparse.
      transcoder: transcoder of the model's raw activations.
      prompts: the batch.
      active: features that are kept, per token and layer.
      skip_start: first tokens of a prompt that are not counted, as in training.
    """
    theta = _batch_threshold(
        model, transcoder, jnp.asarray(prompts.tokens_BT), active=active, skip_start=skip_start
    )
    params = dict(transcoder.params) | {"threshold": jnp.full_like(transcoder.theta_LF, theta)}
    return dataclasses.replace(transcoder, params=params)


def _mean(graphs: Sequence[GraphScores]) -> GraphScores:
    def mean_of(parts: Sequence[Scores]) -> Scores:
        names = [field.name for field in dataclasses.fields(Scores)]
        return Scores(*(float(np.mean([getattr(each, n) for each in parts])) for n in names))

    return GraphScores(
        mean_of([each.unpruned for each in graphs]), mean_of([each.pruned for each in graphs])
    )


@exact_jit
def _active(model: CircuitModel, transcoder: Transcoder, tokens_BT: jax.Array) -> jax.Array:
    """Whether any feature is active, by prompt."""
    z_LXF = transcoder.encode(_inputs(model, tokens_BT))
    z_LBTF = z_LXF.reshape(len(z_LXF), *tokens_BT.shape, -1)
    return (z_LBTF[:, :, transcoder.skip_start :] > 0).any((0, 2, 3))


@functools.partial(exact_jit, static_argnames=("active", "skip_start"))
def _batch_threshold(
    model: CircuitModel,
    transcoder: Transcoder,
    tokens_BT: jax.Array,
    *,
    active: int,
    skip_start: int,
) -> jax.Array:
    B, T = tokens_BT.shape
    pre_LXF = transcoder.pre_activations(_inputs(model, tokens_BT))
    counted_X = jnp.tile(jnp.arange(T) >= skip_start, B)
    count = active * len(pre_LXF) * B * (T - skip_start)
    return largest(jnp.where(counted_X[None, :, None], pre_LXF, 0.0), count)


def _inputs(model: CircuitModel, tokens_BT: jax.Array) -> jax.Array:
    """Inputs of MLPs `[L, B T, D]`, float32."""
    valid_BT = jnp.ones(tokens_BT.shape, bool)
    x_LBTD = model.forward(tokens_BT, valid_BT, record={INPUT: keep}).records[INPUT]
    L, B, T, D = x_LBTD.shape
    return x_LBTD.reshape(L, B * T, D).astype(jnp.float32)
