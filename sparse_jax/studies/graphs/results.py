"""Typed results of attribution graphs; JSON files are read back strictly."""

import dataclasses
from pathlib import Path, PurePosixPath

from lm_jax.run.results import Count, Real, Share
from lm_jax.statistics import Interval
from sparse_jax.graphs.graph import GraphScores
from sparse_jax.studies.graphs.intervened import (
    GroupIntervention,
    InterventionAgreement,
    NextToken,
    SupernodeScore,
)
from sparse_jax.studies.graphs.mass import Component, Positions, Sign
from sparse_jax.studies.graphs.settings import GraphConfig

# Files of a work folder that both the run and its pages name.
FEATURES, PROPOSALS, MASSES = "features", "proposals", "masses.parquet"
# A transcoder that leaves out less in every layer is plausibly of the model.
PLAUSIBLE = 0.6


def proposals_file(graph: str) -> Path:
    """Where the supernodes are that are proposed for a graph, in the work folder.

    Args:
      graph: file of the graph.
    """
    return Path(PROPOSALS, PurePosixPath(graph).name)


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """A model and the transcoder, or the neurons, that stand for its MLPs.

    Attributes:
      role: model, dense or sparse.
      source: the model's name in the command.
      sha256: digest of its weights.
      family: family of its blocks.
      layers, heads: numbers in the model's config; blocks of prototypes have no heads.
      gated: whether it has gates.
      transcoder: the transcoder's name in the command; "" for neurons.
      transcoder_sha256: identity of the transcoder (`transcoders.files.identity`).
      same_model: whether the transcoder says that it is of this model; false where it says nothing.
      kind, features, window: settings of the transcoder; for neurons the kind is "neurons" and the
        features are how many a layer has.
      skip_start: first tokens of a prompt that have no features.
      unexplained: share of the variance of MLP outputs, by layer, that is left out by a transcoder
        which does not say of which model it is (`transcoders.fit`); empty for others.
      active, active_first: mean number of active features of a token by layer, after the first
        tokens of its text and at them; of the same transcoders.
    """

    role: str
    source: str
    sha256: str
    family: str
    layers: Count
    heads: Count
    gated: bool
    transcoder: str
    transcoder_sha256: str
    same_model: bool
    kind: str
    features: Count
    window: int | None
    skip_start: Count = 0
    unexplained: tuple[Real, ...] = ()
    active: tuple[Real, ...] = ()
    active_first: tuple[Real, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Numbers of nodes and edges.

    Attributes:
      tokens: tokens of the prompt.
      features: features that are active at any position.
      rows: features with a row of their own.
      kept_features, kept_errors: nodes after pruning.
      kept_edges: edges after pruning.
      mediated_edges: kept edges whose mediation was measured.
    """

    tokens: Count
    features: Count
    rows: Count
    kept_features: Count
    kept_errors: Count
    kept_edges: Count
    mediated_edges: Count


@dataclasses.dataclass(frozen=True)
class MassResult:
    """Mean cumulative mass over the edges of one graph, or over graphs (`mass.Mass`).

    Attributes:
      component, sign, positions: kind of mass, see `mass`.
      edges: behind the mean.
      unmediated: edges that no head carries, which are left out.
      needed: mean number of components that have `config.fraction` of an edge's mass; NaN without
        edges.
      needed_of_mean: number of components at which the mean curve has that mass; NaN without edges.
    """

    component: Component
    sign: Sign
    positions: Positions
    edges: Count
    unmediated: Count
    needed: Real
    needed_of_mean: Real


@dataclasses.dataclass(frozen=True)
class Carriers:
    """How many heads or pairs have a fraction of the absolute mass of an edge."""

    component: Component
    fraction: Share
    needed: Count


@dataclasses.dataclass(frozen=True)
class KeyEdge:
    """The strongest kept edge from a feature at an earlier position to the first logit.

    Attributes:
      source, target: ids of its nodes in the graph's file.
      weight: weight of the edge.
      carriers: heads and pairs that have the paper's fraction and `config.fraction` (`case_study`).
    """

    source: str
    target: str
    weight: float
    carriers: tuple[Carriers, ...]


@dataclasses.dataclass(frozen=True)
class GraphResult:
    """One graph in numbers.

    Attributes:
      role: role of the model.
      slug: slug of the prompt.
      file: file of the graph, in the work folder.
      kind, prompt, tokens: kind, text and tokens of the prompt.
      logits: logit nodes of the graph.
      sizes: numbers of nodes and edges.
      scores: scores of the whole graph and of the pruned one.
      row_error: largest error of row sum and bias against the forward pass, per layer of the
        reading, logits last (`Graph.certificate`).
      mediation_error: largest error of heads, bypass and late writes against the edge, per layer
        (`Mediation.certificate`).
      over_count: median over mediated edges of the sum over all layers as a multiple of the edge;
        NaN without edges.
      masses: mean cumulative mass of heads and of pairs.
      head_shares: share of each head, by layer, of the absolute mass of the measured edges; empty
        where no head carries any.
      meaning: meaning of the prompt (`prompts.Prompt`); "" for none.
      supernode_scores: scores of the proposed supernodes; empty without any.
      score_errors: relative errors of the attention scores that were split (`QK.certificate`).
      agreements: agreement of interventions, one for each mode; empty without kept features.
      supernodes: interventions on proposed supernodes, each times each factor.
      key_edge: null where pruning kept none.
    """

    role: str
    slug: str
    file: str
    kind: str
    prompt: str
    tokens: tuple[str, ...]
    logits: tuple[NextToken, ...]
    sizes: Sizes
    scores: GraphScores
    row_error: tuple[float, ...]
    mediation_error: tuple[float, ...]
    over_count: Real
    masses: tuple[MassResult, ...]
    score_errors: tuple[float, ...]
    agreements: tuple[InterventionAgreement, ...]
    supernodes: tuple[GroupIntervention, ...]
    key_edge: KeyEdge | None
    head_shares: tuple[Share, ...] = ()
    meaning: str = ""
    supernode_scores: tuple[SupernodeScore, ...] = ()


@dataclasses.dataclass(frozen=True)
class FeatureCorpus:
    """The text whose windows are shown with the features of a model.

    Attributes:
      role: role of the model.
      features: number of features that its graphs show.
      silent: those that are active on no token of the text.
      source: the text, as `lm_jax.text.corpora` names it; "" for none.
      sha256: digest of its documents.
      tokens: number of tokens read.
      labelled: features with a label of the user or of the judge.
      judge: name of the judge; "null" for none.
    """

    role: str
    features: Count
    silent: Count
    source: str
    sha256: str
    tokens: Count
    labelled: Count
    judge: str


@dataclasses.dataclass(frozen=True)
class EdgeCounts:
    """Edges of all prompts.

    Attributes:
      total: edges whose mediation was measured.
      unmediated: the edges among them that no head carries, which no mean includes.
    """

    total: Count
    unmediated: Count


@dataclasses.dataclass(frozen=True)
class RoleMass:
    """Mass of one model over all prompts, each with the same weight.

    Attributes:
      role: role of the model.
      component, sign, positions: kind of mass, see `mass`.
      edges: how many, and how many of them are left out.
      needed: mean number of components per edge, with its interval over prompts; None of fewer
        than two prompts.
      needed_of_mean: number of components at which the mean curve has the mass, with its interval.
    """

    role: str
    component: Component
    sign: Sign
    positions: Positions
    edges: EdgeCounts
    needed: Interval | None
    needed_of_mean: Interval | None


@dataclasses.dataclass(frozen=True)
class MassRatio:
    """How many times as many components the dense model needs as the sparse one.

    Attributes:
      component, sign, positions: kind of mass, see `mass`.
      dense, sparse: edges of either model, and how many of them are left out.
      of_mean: ratio of the counts at which the mean curves reach the mass, as in the paper's
        figure; with an interval over prompts.
      per_edge: ratio of the mean counts per edge.
      paper: the paper's figure (GPT-2, Fig. 6); None where it has none.
    """

    component: Component
    sign: Sign
    positions: Positions
    dense: EdgeCounts
    sparse: EdgeCounts
    of_mean: Interval | None
    per_edge: Interval | None
    paper: float | None


@dataclasses.dataclass(frozen=True)
class Stability:
    """How much of the heads' mass rephrasings have in common (`stability`).

    Attributes:
      role: role of the model, or "sparse minus dense".
      kind: kind of the prompts; "" for all.
      within: mean overlap of graphs of one meaning, with its interval over meanings; None of fewer
        than two.
      across: the same of each with graphs of other kinds of prompts; None without any.
    """

    role: str
    kind: str
    within: Interval | None
    across: Interval | None


@dataclasses.dataclass(frozen=True)
class ComparedPrompt:
    """Whether a prompt counts in the comparison of two models.

    Attributes:
      slug: slug of the prompt.
      answers: the most probable next token of each model, by role.
      target: the one token that both graphs explain; "" where the prompt does not count.
      why: it does not; "" where it does.
    """

    slug: str
    answers: dict[str, str]
    target: str
    why: str


@dataclasses.dataclass(frozen=True)
class GraphSummary:
    """`summary.json` of attribution graphs.

    Attributes:
      config: the settings.
      models: one, or the two that are compared.
      prompts_sha256: digest of the prompts with their targets.
      graphs: numbers of each graph, ordered by model, then prompt.
      features: text of each model's features.
      masses: masses of each model, over prompts.
      ratios: ratios of two models, over the prompts that count in the comparison.
      device: kind of device that computed.
      stability: overlaps under rephrasing; empty where no two prompts share a meaning.
      compared: prompts in order, with whether each counts in masses, ratios and stability of a
        comparison; empty for a single model, where all count.
    """

    config: GraphConfig
    models: tuple[ModelFacts, ...]
    prompts_sha256: str
    graphs: tuple[GraphResult, ...]
    features: tuple[FeatureCorpus, ...]
    masses: tuple[RoleMass, ...]
    ratios: tuple[MassRatio, ...]
    device: str
    stability: tuple[Stability, ...] = ()
    compared: tuple[ComparedPrompt, ...] = ()
