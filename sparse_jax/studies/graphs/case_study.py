"""One prompt in a dense and a sparse model, beside the paper's case study (Fig. 7, App. H).

The paper asks which heads carry the edges from features of "large" to the logit of "small" after
`PROMPT`. Here the key edge of a graph is the strongest that pruning kept from a feature at an
earlier position to the first logit: all of it passes through attention. Counted are the heads, and
the pairs of a query and a key, that have a fraction of its absolute mass (`mass`).
"""

from collections.abc import Collection, Iterable
import dataclasses

import numpy as np

from lm_jax.assets import papers
from sparse_jax.graphs.graph import Graph
from sparse_jax.graphs.influence import FEATURE, LOGIT, Pruned
from sparse_jax.studies.graphs import mass
from sparse_jax.studies.graphs.results import Carriers, GraphResult, GraphSummary

PROMPT = 'The opposite of "large" is "'
# Of the attribution score that the paper's counts have.
FRACTION = 0.8


@dataclasses.dataclass(frozen=True)
class PaperStudy:
    """What the paper says of `PROMPT` in a GPT-2; None where it gives no number.

    Attributes:
      token, probability: the next token that it follows.
      features, kept_features: number of features before and after pruning.
      replacement: score.
      heads, pairs: number that carry `FRACTION` of the score, as the paper writes it.
    """

    token: str = "small"
    probability: float | None = None
    features: int | None = None
    kept_features: int | None = None
    replacement: float | None = None
    heads: str | None = None
    pairs: str | None = None


@dataclasses.dataclass(frozen=True)
class _Numbers:
    case_study: dict[str, PaperStudy]


PAPER = papers.numbers("sparse", _Numbers).case_study


def key_edge(graph: Graph, pruned: Pruned) -> tuple[int, int] | None:
    """Source and target of the key edge, indices in `graph.nodes`; None where none was kept."""
    row = int(np.argmax(graph.kinds[graph.row_nodes] == LOGIT))
    count = len(pruned.kept_S)
    position_S = graph.nodes["position"].fill_null(-1).to_numpy()[:count]
    last = len(graph.replacement.token_TD) - 1
    may_S = pruned.kept_RS[row] & (graph.kinds[:count] == FEATURE) & (position_S < last)
    if not may_S.any():
        return None
    source = np.argmax(np.where(may_S, np.abs(graph.adjacency[row]), -1.0))
    return int(source), int(graph.row_nodes[row])


def count_carriers(
    score_LNTS: np.ndarray,
    fractions: Iterable[float],
    components: Collection[mass.Component] = mass.COMPONENTS,
) -> tuple[Carriers, ...]:
    """How many heads and pairs have each fraction of an edge's absolute mass; none without any."""
    results = []
    for component in components:
        mass_XC = mass.cumulative(mass.shares(score_LNTS[None], component), "absolute")
        if np.isnan(mass_XC).any():
            continue
        results += [
            Carriers(component, fraction, int(mass.needed(mass_XC, fraction)[0]))
            for fraction in sorted(set(fractions))
        ]
    return tuple(results)


def chosen(summary: GraphSummary) -> dict[str, GraphResult]:
    """The graphs by role: of the paper's prompt if it was asked for, else of the first prompt."""
    slugs = [each.slug for each in summary.graphs if each.prompt.strip() == PROMPT]
    slug = slugs[0] if slugs else summary.graphs[0].slug
    return {each.role: each for each in summary.graphs if each.slug == slug}
