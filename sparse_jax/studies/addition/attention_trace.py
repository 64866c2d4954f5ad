"""Answers and attention edges of a model on sums, from one forward pass.

An edge leads from a position to one that it sees, or to itself, in one layer; its weight is the
attention weight. In the sparse model an edge is open where its gate logit is above 0, without
noise; in the dense model every edge to a visible position is. Arrays of edges are `[L, P, T, S]`:
layer, problem, query, key.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from lm_jax.model import sites
from lm_jax.model.attention import softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import forward
from lm_jax.model.edits import Scale
from lm_jax.model.mixers import AttentionMixer
from lm_jax.model.precision import exact_jit
from sparse_jax.gates.attend import gated
from sparse_jax.studies.addition import problems

# Large enough for few calls, and small enough for patterns of a few megabytes.
_ROWS = 500


@dataclasses.dataclass(frozen=True)
class AttentionTrace:
    """Answers and attention edges on P problems.

    Attributes:
      answer_PA: the most likely ids at the question marks.
      exact_P: whether all five are right.
      pattern_LPTS: attention weights, 0 where a gate is closed.
      open_LPTS: whether an edge is open; its weight may still underflow to 0.
      causal: whether a position sees only itself and earlier ones.
    """

    answer_PA: np.ndarray
    exact_P: np.ndarray
    pattern_LPTS: np.ndarray
    open_LPTS: np.ndarray
    causal: bool = True

    def visible(self, query: int) -> int:
        """Number of keys that a query sees; they are the first of the row."""
        return query + 1 if self.causal else self.pattern_LPTS.shape[3]

    @property
    def edges_LP(self) -> np.ndarray:
        """Number of open edges."""
        return self.open_LPTS.sum((2, 3))


Tracer = Callable[..., AttentionTrace]


def make_tracer(cfg: DecoderConfig, mixer: AttentionMixer, *, bias: float | None = None) -> Tracer:
    """Returns `trace(weights, tokens_PS, *, kept_LTS=None) -> AttentionTrace` for one model.

    The patterns are multiplied by `kept_LTS`, so that a 0 closes an edge; `open_LPTS` are the gates
    before that.

    Args:
      cfg: the model, with one head.
      mixer: attention of the model.
      bias: bias of the gate logits; None for a model without gates.
    """

    def is_open(scores_BNTS):
        return scores_BNTS > -jnp.inf if bias is None else scores_BNTS + bias > 0.0

    @exact_jit
    def run(weights, read_PT, kept_LTS):
        attend = softmax if bias is None else gated(cfg, mode="threshold", bias=bias)
        return forward(
            weights,
            read_PT,
            cfg,
            edits={"attn.pattern": Scale(kept_LTS[:, None, None])},
            record={"attn.pattern": sites.keep, "attn.scores": is_open},
            attend=attend,
            mixer=mixer,
        )

    def trace(
        weights: Mapping[str, Any], tokens_PS: np.ndarray, *, kept_LTS: np.ndarray | None = None
    ) -> AttentionTrace:
        if kept_LTS is None:
            kept_LTS = np.ones((cfg.num_layers, problems.READ, problems.READ), np.float32)
        parts = [
            _trace(run(weights, part[:, : problems.READ], kept_LTS), part)
            for part in np.split(tokens_PS, range(_ROWS, len(tokens_PS), _ROWS))
        ]
        return AttentionTrace(
            np.concatenate([part.answer_PA for part in parts]),
            np.concatenate([part.exact_P for part in parts]),
            np.concatenate([part.pattern_LPTS for part in parts], axis=1),
            np.concatenate([part.open_LPTS for part in parts], axis=1),
            mixer.causal,
        )

    return trace


def _trace(output: Any, tokens_PS: np.ndarray) -> AttentionTrace:
    answer_PA = np.asarray(output.logits)[:, problems.FIRST_ANSWER :].argmax(-1)
    exact_P = (answer_PA == tokens_PS[:, problems.READ :]).all(1)
    pattern_LPTS, open_LPTS = (
        np.asarray(output.records[site])[:, :, 0] for site in ("attn.pattern", "attn.scores")
    )
    return AttentionTrace(answer_PA, exact_P, pattern_LPTS, open_LPTS)
