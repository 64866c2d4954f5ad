"""Interventions on groups of sources, such as supernodes (paper, App. H: cluster interventions).

    effects = scale_groups(model, graph, [[12, 40, 41], [7]], factors=(0.0, -5.0, -10.0))
    effects.outcomes["free"].change_GFK     # of the logit nodes, by group and factor

All sources of a group are multiplied by a factor at once: activations of its features are set to
that multiple of their values in the clean run, so that members do not respond to each other, and
errors and tokens are added factor - 1 times more. Modes are explained in `interventions`. The graph
predicts the sum of its members' entries: paths through other features are not in it.

`score_groups` says whether a group acts as one thing. Each member is removed alone, each of some
other sources too, and all members at once, with nothing frozen. What a removal does is a vector
over rows of the graph: the shift of each reading, divided by the sum of the absolute entries of its
row, so that pre-activations and logits have one scale.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
from itertools import combinations, product

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model.layers import unembed
from lm_jax.model.precision import exact_jit, exact_products
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs import interventions
from sparse_jax.graphs.effects import MODES, Mode
from sparse_jax.graphs.graph import SOURCE_KINDS, Graph
from sparse_jax.graphs.influence import LOGIT

# The paper's (App. H); 0 removes a group.
FACTORS = (0.0, -5.0, -10.0)


@dataclasses.dataclass(frozen=True, eq=False)
class GroupOutcome:
    """What becomes of the next token, by group G and factor F.

    Attributes:
      change_GFK: change of the K demeaned logits from the clean run.
      probability_GFK: probability of their tokens.
      clean_probability_K: probability of these tokens in the clean run.
      top_GFn: ids of the most probable next tokens.
      top_probability_GFn: probabilities of these tokens.
    """

    change_GFK: np.ndarray
    probability_GFK: np.ndarray
    clean_probability_K: np.ndarray
    top_GFn: np.ndarray
    top_probability_GFn: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class GroupEffects:
    """Effects of scaling groups of sources.

    Attributes:
      groups: members of each, different indices in `Graph.nodes` in order.
      factors: factors that each group was multiplied by.
      predicted_GFK: change of the K demeaned logits by the graph's columns.
      outcomes: measured outcomes, by mode.
    """

    groups: tuple[tuple[int, ...], ...]
    factors: tuple[float, ...]
    predicted_GFK: np.ndarray
    outcomes: Mapping[Mode, GroupOutcome]


def scale_groups(
    model: CircuitModel,
    graph: Graph,
    groups: Sequence[Sequence[int]],
    *,
    factors: Sequence[float] = FACTORS,
    modes: Sequence[Mode] = MODES,
    top: int = 5,
    batch: int = 16,
) -> GroupEffects:
    """Effects on the next token of multiplying all sources of a group, for groups and factors.

    Args:
      model: the model that the graph describes.
      graph: graph of one prompt.
      groups: indices of sources in `graph.nodes`; a source that is named twice counts once.
      factors: multiples of the sources; 0 removes a group, 1 leaves the run as it is.
      modes: modes to measure.
      top: number of most probable next tokens to name.
      batch: runs at a time.

    Raises:
      UsageError: the model is another one, a group is empty, a node is no source, or a factor is
        not finite.
    """
    if not groups or not factors:
        raise UsageError("groups: none to scale; name one group and one factor at least")
    members = [np.unique(np.asarray(group, np.int64)) for group in groups]
    for g, group in enumerate(members):
        if not group.size:
            raise UsageError(f"groups: group {g} has no member; name a source")
    graph.check_kinds(np.concatenate(members), SOURCE_KINDS, "groups")
    factor_F = np.asarray(factors, np.float64)
    model = interventions.checked(model, graph, factor_F, modes)
    is_logit_R = graph.kinds[graph.row_nodes] == LOGIT
    weight_KS = graph.adjacency[is_logit_R].astype(np.float64)
    weight_GK = np.stack([weight_KS[:, group].sum(1) for group in members])
    outcomes: dict[Mode, GroupOutcome] = {
        mode: _outcome(model, graph, members, factor_F, mode, top, batch) for mode in modes
    }
    return GroupEffects(
        groups=tuple(tuple(group.tolist()) for group in members),
        factors=tuple(factor_F.tolist()),
        predicted_GFK=(factor_F - 1.0)[None, :, None] * weight_GK[:, None],
        outcomes=outcomes,
    )


def _outcome(
    model: CircuitModel,
    graph: Graph,
    groups: Sequence[np.ndarray],
    factor_F: np.ndarray,
    mode: Mode,
    top: int,
    batch: int,
) -> GroupOutcome:
    G, F = len(groups), len(factor_F)
    each = [group for group in groups for _ in range(F)]
    runs = interventions.run_scaled(
        model, graph, each, np.tile(factor_F, G), mode=mode, batch=min(batch, G * F)
    )
    ids_K = np.asarray(graph.nodes["feature"])[graph.kinds == LOGIT].astype(np.int32)
    shifts, parts = [], []
    for run in runs:
        shifts.append(interventions.logit_shifts(graph, run)[1:])
        with exact_products():
            parts.append(_next_tokens(model, run.hidden_BD, jnp.asarray(ids_K), top=top))

    def stacked(values: Sequence[np.ndarray | jax.Array]) -> np.ndarray:
        rows = np.concatenate([np.asarray(value) for value in values])
        return rows.reshape(G, F, *rows.shape[1:])

    return GroupOutcome(
        change_GFK=stacked(shifts),
        probability_GFK=stacked([part.probability_BK[1:] for part in parts]),
        clean_probability_K=np.asarray(parts[0].probability_BK[0]),
        top_GFn=stacked([part.top_Bn[1:] for part in parts]),
        top_probability_GFn=stacked([part.top_probability_Bn[1:] for part in parts]),
    )


@struct.dataclass
class _NextTokens:
    """Probabilities of the logits' tokens, and the most probable tokens, by run."""

    probability_BK: jax.Array
    top_Bn: jax.Array
    top_probability_Bn: jax.Array


@functools.partial(exact_jit, static_argnames="top")
def _next_tokens(model, hidden_BD, ids_K, *, top):
    """`_NextTokens` of last hidden states."""
    logits_BV = unembed(model.params, hidden_BD[:, None], model.cfg)[:, 0]
    probability_BV = jax.nn.softmax(logits_BV)
    highest, ids = jax.lax.top_k(probability_BV, min(top, probability_BV.shape[1]))
    return _NextTokens(probability_BV[:, ids_K], ids, highest)


@dataclasses.dataclass(frozen=True)
class GroupScore:
    """How far a group acts as one thing, by measured removals.

    Attributes:
      members: number of members that were removed.
      within: mean cosine of the effects of two members; NaN where no two have one.
      outside: mean cosine of the effects of a member and another source; NaN where none has one.
      off: distance of the effect of removing all from the sum of the single effects, as a share of
        that sum's length; NaN where the sum is 0.
    """

    members: int
    within: float
    outside: float
    off: float


def score_groups(
    model: CircuitModel,
    graph: Graph,
    groups: Sequence[Sequence[int]],
    *,
    others: Sequence[Sequence[int]],
    rows: np.ndarray | None = None,
    batch: int = 16,
) -> list[GroupScore]:
    """Scores of groups by removing sources from the model's run, with nothing frozen.

    Args:
      model: the model that the graph describes.
      graph: graph of one prompt.
      groups: indices of sources in `graph.nodes`, two or more a group.
      others: sources to compare with, for each group; none may be a member.
      rows: a mask `[R]` of the rows on which effects count; all by default.
      batch: runs at a time.

    Raises:
      UsageError: the model is another one, a node is no source, a group has fewer than two
        members, or lists do not fit.
    """
    members = [np.unique(np.asarray(group, np.int64)) for group in groups]
    compared = [np.unique(np.asarray(other, np.int64)) for other in others]
    if len(members) != len(compared):
        raise UsageError(f"others: {len(compared)} lists for {len(members)} groups; give one each")
    for g, (group, other) in enumerate(zip(members, compared, strict=True)):
        if len(group) < 2:
            raise UsageError(f"groups: group {g} has fewer than two members; leave it out")
        if np.isin(other, group).any():
            raise UsageError(f"others: a source of list {g} is a member of group {g}; take it out")
    if not members:
        return []
    for name, nodes in (("groups", members), ("others", compared)):
        graph.check_kinds(np.concatenate(nodes), SOURCE_KINDS, name)
    single = np.unique(np.concatenate([*members, *compared]))
    removed = [*single[:, None], *members]
    factors = np.zeros(len(removed))
    model = interventions.checked(model, graph, factors, ("free",))
    runs = interventions.run_scaled(model, graph, removed, factors, mode="free", batch=batch)
    shift_IR = np.concatenate([interventions.shifts(graph, run)[1:] for run in runs])
    size_R = np.abs(graph.adjacency.astype(np.float64)).sum(1)
    shift_IR = shift_IR / np.where(size_R > 0, size_R, 1.0)
    if rows is not None:
        shift_IR = shift_IR[:, rows]
    place = {node: i for i, node in enumerate(single.tolist())}
    scores = []
    for g, (group, other) in enumerate(zip(members, compared, strict=True)):
        own_MR, other_OR = (
            shift_IR[[place[node] for node in nodes]] for nodes in (group.tolist(), other.tolist())
        )
        together_R = shift_IR[len(single) + g]
        sum_R = own_MR.sum(0)
        length = np.linalg.norm(sum_R)
        apart = np.linalg.norm(together_R - sum_R)
        scores.append(
            GroupScore(
                members=len(group),
                within=_mean_cosine(combinations(own_MR, 2)),
                outside=_mean_cosine(product(own_MR, other_OR)),
                off=float(apart / length) if length else float("nan"),
            )
        )
    return scores


def _mean_cosine(pairs: Iterable[Sequence[np.ndarray]]) -> float:
    """Mean cosine of pairs of vectors, without pairs in which one is 0; NaN without any."""
    found = []
    for one, other in pairs:
        size = np.linalg.norm(one) * np.linalg.norm(other)
        if size:
            found.append(float(one @ other / size))
    return float(np.mean(found)) if found else float("nan")
