"""Settings of attribution graphs."""

from collections.abc import Collection
import dataclasses
import math
from typing import Annotated

from lm_jax.errors import UsageError
from lm_jax.run.config import LATER
from lm_jax.run.settings import READS_FILE, READS_MODEL, Bound, Flag, Reads, at_least, between
from lm_jax.study import Settings
from lm_jax.text.preparation import CorpusConfig

# Roles of models: one by itself, or two that are compared.
ALONE, COMPARED = "model", ("dense", "sparse")
_THRESHOLD = Bound("above 0 and at most 1", lambda share: 0 < share <= 1)


def _are_finite(factors: Collection[float]) -> bool:
    return bool(factors) and all(map(math.isfinite, factors))


# Prompts that come with the package are no files.
_READS_PROMPTS = Reads("file", {"findings": (), "rephrasings": ()})


@dataclasses.dataclass(frozen=True)
class GraphConfig(Settings):
    """Everything that decides the graphs.

    Attributes:
      model: model whose graphs are made: a folder, dense or sparse, a work folder that has one, or
        a name of iaj fetch --list; "" where two are compared.
      transcoder: folder of the exported transcoder of the model, or a name such as
        pair_192_sparse_transcoder.
      dense: dense model of a comparison, given like `model`; "" for none.
      sparse: sparse model of a comparison, given like `model`; "" for none.
      dense_transcoder: folder of the transcoder of `dense`.
      sparse_transcoder: folder of the transcoder of `sparse`.
      neurons: whether features are the neurons of the models' own MLPs, without transcoders
        (`sparse_jax.graphs.neurons`).
      prompts: texts whose next token is explained, a graph for each.
      prompt_file: file of prompts with targets, one JSON object per line
        (`sparse_jax.studies.graphs.prompts`); "findings" for the ten that come with the package,
        "rephrasings" for 32 that say eight things in other words.
      targets: texts of the logit nodes, one token each with its leading space, for all `prompts`;
        none for the most probable tokens until .95 together, at most 10.
      against: texts of one token each, whose mean logit is taken from that of the targets; of one
        right target and one wrong token here, the graph explains the logit difference. None for the
        mean over the vocabulary.
      max_features: features with a row of their own, by influence; 0 for all. Of neurons, how many
        are features; 0 for 256.
      node_threshold: share of influence that kept nodes have together.
      edge_threshold: share of the edges' scores that kept edges have; circuit-tracer's is .98.
      mediated: the most edges of a graph whose mediation by heads and pairs is measured, those of
        the highest score first; 0 for all that are kept. For prompts whose attention patterns have
        more than 67 million entries, at most 64, by heads alone.
      explained: key-query pairs, those that carry most of these edges, whose attention scores are
        split into terms of sources; 0 for none. There are none for prompts so long that edges are
        split by heads alone.
      intervened: kept features, those with the most influence, that are multiplied by each of
        `factors`; 0 for none.
      supernodes: proposed supernodes, those with the most influential feature first, all of whose
        features are multiplied by each of `factors` at once, and which are scored by removing
        their members one by one; 0 for none.
      factors: multiples of an activation: 0 removes what a feature writes; the paper steers with -5
        and -10 (App. H).
      fraction: share of the mass of an edge's mediation that is to be reached.
      corpus: text whose windows are shown with features; `source` "" for none; its `max_tokens` is
        50,000 where it is 0, and 5,000 for neurons, most of which are active on every token; its
        `vocab_size` is ignored in favour of the model's.
      context: tokens of a window of that text, at most those of the model.
      examples: the most texts of a feature.
      labels: file of labels of the features of `model`, {"<layer>_<feature>": "text"}; "" for none.
      dense_labels: file of such labels of the dense of two models that are compared.
      sparse_labels: file of such labels of the sparse one.
      judge: source of the themes of features without a label: "null" for none, "local:FOLDER" for a
        language model, "cached:FILE" for stored answers
        (`lm_jax.evaluate.judge`).
      unknown_origin: whether a transcoder is accepted that does not say of which model it is and
        leaves out most of what the MLPs of this one write.
      skip_start: first tokens of a prompt that have no features; -1 for as many as the transcoder's
        file says that training left out. circuit-tracer leaves out one.
      resamples: bootstrap samples of the prompts.
      seed: random seed of the bootstrap samples.
    """

    model: Annotated[str, Flag(), READS_MODEL] = ""
    transcoder: Annotated[str, Flag()] = ""
    dense: Annotated[str, Flag(), READS_MODEL] = ""
    dense_transcoder: Annotated[str, Flag()] = ""
    sparse: Annotated[str, Flag(), READS_MODEL] = ""
    sparse_transcoder: Annotated[str, Flag()] = ""
    neurons: Annotated[bool, Flag()] = False
    prompts: Annotated[tuple[str, ...], Flag("prompt", repeated=True)] = ()
    prompt_file: Annotated[str, Flag("prompts"), _READS_PROMPTS] = ""
    targets: Annotated[tuple[str, ...], Flag("target", repeated=True)] = ()
    against: Annotated[tuple[str, ...], Flag(repeated=True)] = dataclasses.field(
        default=(), metadata=LATER
    )
    max_features: Annotated[int, at_least(0)] = 0
    node_threshold: Annotated[float, _THRESHOLD] = 0.8
    edge_threshold: Annotated[float, _THRESHOLD, Flag()] = 0.95
    mediated: Annotated[int, at_least(0)] = 4_000
    explained: Annotated[int, at_least(0)] = 8
    intervened: Annotated[int, at_least(0)] = 8
    supernodes: Annotated[int, at_least(0)] = 8
    factors: Annotated[tuple[float, ...], Bound("finite numbers, one or more", _are_finite)] = (
        *(0.0, -5.0, -10.0),
    )
    fraction: Annotated[float, between(0, 1)] = 0.9
    corpus: CorpusConfig = dataclasses.field(
        default_factory=lambda: CorpusConfig("wiki", "document", splits=(1.0, 0.0, 0.0))
    )
    context: Annotated[int, at_least(1)] = 64
    examples: Annotated[int, at_least(1)] = 10
    labels: Annotated[str, Flag(), READS_FILE] = ""
    dense_labels: Annotated[str, Flag(), READS_FILE] = ""
    sparse_labels: Annotated[str, Flag(), READS_FILE] = ""
    judge: Annotated[str, Flag()] = "null"
    unknown_origin: Annotated[bool, Flag()] = False
    skip_start: Annotated[
        int, Bound("at least 0, or -1 for the transcoder's own", lambda count: count >= -1)
    ] = -1
    resamples: Annotated[int, at_least(100)] = 2_000
    seed: Annotated[int, at_least(0)] = 0

    def problems(self) -> list[str]:
        return [*self._models(), *self._prompts()]

    def _models(self) -> list[str]:
        given = [role for role in (ALONE, *COMPARED) if getattr(self, role)]
        flags = [transcoder_field(role) for role in (ALONE, *COMPARED)]
        if self.neurons and (extra := [f"--{flag}" for flag in flags if getattr(self, flag)]):
            return [
                f"--neurons with {' and '.join(extra)}: the features are neurons of the MLPs or "
                "those of a transcoder; leave one of the two out"
            ]
        for role in COMPARED:
            for flag in (transcoder_field(role), labels_field(role)):
                if getattr(self, flag) and not getattr(self, role):
                    return [f"--{role} is missing; name the model of --{flag}"]
        if self.labels and self.dense:
            return [
                "--labels with --dense and --sparse: each model has features of its own; give "
                "--dense_labels and --sparse_labels"
            ]
        if not given:
            return []
        if given not in ([ALONE], list(COMPARED)):
            return [
                f"{' and '.join(f'--{role}' for role in given)}: give --model alone, or --dense "
                "and --sparse to compare them"
            ]
        return [
            f"--{flag} is missing; name the folder transcoder/ of iaj sparse transcoder, or add "
            "--neurons"
            for role in given
            if not self.neurons and not getattr(self, flag := transcoder_field(role))
        ]

    def _prompts(self) -> list[str]:
        if self.targets and self.prompt_file:
            return ["--target belongs to --prompt; write the targets of a file into its lines"]
        if self.against and not self.targets:
            return ["--against belongs to --target; name the right token there"]
        return []

    @property
    def text(self) -> CorpusConfig:
        """The corpus, with the tokens that are read of it."""
        tokens = self.corpus.max_tokens or (5_000 if self.neurons else 50_000)
        return dataclasses.replace(self.corpus, max_tokens=tokens)

    @property
    def sources(self) -> dict[str, tuple[str, str]]:
        """Model and transcoder, "" for neurons, by role.

        Raises:
          UsageError: no model is named.
        """
        roles = COMPARED if self.dense else (ALONE,)
        if not getattr(self, roles[0]):
            raise UsageError("--model is missing; name a folder or a model of iaj fetch --list")
        return {
            role: (getattr(self, role), getattr(self, transcoder_field(role))) for role in roles
        }


def transcoder_field(role: str) -> str:
    """The field of the transcoder of a role."""
    return "transcoder" if role == ALONE else f"{role}_transcoder"


def labels_field(role: str) -> str:
    """The field of the labels of a role's features."""
    return "labels" if role == ALONE else f"{role}_labels"


def smoke(config: GraphConfig) -> GraphConfig:
    """Few features, the mediation of few edges, and little text."""
    corpus = dataclasses.replace(config.corpus, max_tokens=5_000)
    small = {"max_features": 20, "mediated": 20, "explained": 2, "intervened": 2, "supernodes": 2}
    return dataclasses.replace(
        config, corpus=corpus, context=24, examples=2, resamples=100, **small
    )
