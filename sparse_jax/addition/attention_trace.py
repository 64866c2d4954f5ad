"""One pass of a model over sums: what it answers, and the weight of every edge of its attention.

An edge goes from a place to one before it, or to itself, in one layer; its weight is what the
attend gave it. In the sparse model an edge is open where its gate logit is above 0, without chance;
in the dense one every causal edge is. Edges are `[L, P, T, S]`: layer, problem, who reads, what.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model import sites
from lm_jax.model.attention import softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import forward
from lm_jax.model.edits import Scale
from sparse_jax.addition import problems
from sparse_jax.attend import gated

# Enough that a pass is few calls, and little enough that its patterns are few megabytes.
_ROWS = 500


@dataclasses.dataclass(frozen=True)
class AttentionTrace:
    """What a pass found.

    Attributes:
      answer_PA: the ids that are most likely at the question marks.
      exact_P: whether all five are right.
      pattern_LPTS: the weights, 0 where a gate is closed.
      open_LPTS: whether an edge is open; its weight may still be too small for a float.
    """

    answer_PA: np.ndarray
    exact_P: np.ndarray
    pattern_LPTS: np.ndarray
    open_LPTS: np.ndarray

    @property
    def edges_LP(self) -> np.ndarray:
        """How many edges are open."""
        return self.open_LPTS.sum((2, 3))


Trace = Callable[..., AttentionTrace]


def tracer(cfg: DecoderConfig, *, bias: float | None = None) -> Trace:
    """`look(weights, tokens_PS, *, kept_LTS=None) -> Seen` for one model.

    `kept_LTS` closes edges: the patterns are multiplied by it. `open_LPTS` are the gates before.

    Args:
      cfg: the model, of one head.
      bias: of its gate logits; None for a model without gates.
    """

    def is_open(scores_BNTS):
        return scores_BNTS > -jnp.inf if bias is None else scores_BNTS + bias > 0.0

    @jax.jit
    def run(weights, read_PT, kept_LTS):
        attend = softmax if bias is None else gated(cfg, mode="threshold", bias=bias)
        return forward(
            weights,
            read_PT,
            cfg,
            edits={"attn.pattern": Scale(kept_LTS[:, None, None])},
            record={"attn.pattern": sites.keep, "attn.scores": is_open},
            attend=attend,
        )

    def look(
        weights: Mapping[str, Any], tokens_PS: np.ndarray, *, kept_LTS: np.ndarray | None = None
    ) -> AttentionTrace:
        if kept_LTS is None:
            kept_LTS = np.ones((cfg.num_layers, problems.READ, problems.READ), np.float32)
        parts = [
            _seen(run(weights, part[:, : problems.READ], kept_LTS), part)
            for part in np.split(tokens_PS, range(_ROWS, len(tokens_PS), _ROWS))
        ]
        return AttentionTrace(
            np.concatenate([one.answer_PA for one in parts]),
            np.concatenate([one.exact_P for one in parts]),
            np.concatenate([one.pattern_LPTS for one in parts], axis=1),
            np.concatenate([one.open_LPTS for one in parts], axis=1),
        )

    return look


def _seen(output: Any, tokens_PS: np.ndarray) -> AttentionTrace:
    answer_PA = np.asarray(output.logits)[:, problems.FIRST_ANSWER :].argmax(-1)
    exact_P = (answer_PA == tokens_PS[:, problems.READ :]).all(1)
    pattern_LPTS, open_LPTS = (
        np.asarray(output.records[site])[:, :, 0] for site in ("attn.pattern", "attn.scores")
    )
    return AttentionTrace(answer_PA, exact_P, pattern_LPTS, open_LPTS)
