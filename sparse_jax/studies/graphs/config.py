"""Settings of attribution graphs: the frozen dataclass that their config file becomes."""

import dataclasses
import math
from typing import Any

from ml_collections import ConfigDict

from lm_jax.errors import UsageError, out_of_range
from lm_jax.run.config_files import in_mode
from lm_jax.text.preparation import CorpusConfig

# Roles of models: one by itself, or two that are compared.
ALONE, COMPARED = "model", ("dense", "sparse")


@dataclasses.dataclass(frozen=True)
class GraphConfig:
    """Everything that decides the graphs.

    Attributes:
      model: whose graphs are made: a folder of a dense or sparse model, a work folder that has one,
        or a name of the manifest; "" where two are compared.
      transcoder: folder of the exported transcoder of the model.
      dense: dense model of a comparison, given like `model`; "" for none.
      sparse: sparse model of a comparison, given like `model`; "" for none.
      dense_transcoder: folder of the transcoder of `dense`.
      sparse_transcoder: folder of the transcoder of `sparse`.
      neurons: features are the neurons of the models' own MLPs, without transcoders
        (`sparse_jax.graphs.neurons`).
      prompts: texts whose next token is explained, a graph for each.
      prompt_file: prompts with targets, one JSON object per line
        (`sparse_jax.studies.graphs.prompts`); "findings" for the ten that come with the package,
        "rephrasings" for 32 that say eight things in other words.
      targets: texts of the logit nodes, one token each with its leading space, for all `prompts`;
        none for the most probable tokens until .95 together, at most 10.
      max_features: features with a row of their own, by influence; 0 for all. Of neurons, how many
        are features; 0 for 256.
      node_threshold: share of influence that kept nodes have together.
      edge_threshold: share of the edges' scores that kept edges have; circuit-tracer's is .98.
      mediated: the most edges of a graph whose mediation by heads and pairs is measured, those of
        the highest score first; 0 for all that are kept.
      explained: key-query pairs, those that carry most of these edges, whose attention scores are
        split into terms of sources; 0 for none.
      intervened: kept features, those with the most influence, that are multiplied by each of
        `factors`; 0 for none.
      supernodes: proposed supernodes, those with the most influential feature first, all of whose
        features are multiplied by each of `factors` at once; 0 for none.
      factors: 0 removes what a feature writes; the paper steers with -5 and -10 (App. H).
      fraction: mass of an edge's mediation that is to be reached.
      corpus: whose texts are shown with features; `source` "" for none; its `max_tokens` is 50,000
        where it is 0, and 5,000 for neurons, most of which are active on every token; its
        `vocab_size` is ignored in favour of the model's.
      context: tokens of a window of that text, at most those of the model.
      examples: the most texts of a feature.
      labels: file of labels of the features of `model`, {"<layer>_<feature>": "text"}; "" for none.
      dense_labels: file of such labels of the dense of two models that are compared.
      sparse_labels: file of such labels of the sparse one.
      judge: names the theme of the texts of features without a label: "null" for none,
        "local:FOLDER" for a language model, "cached:FILE" for stored answers
        (`lm_jax.evaluate.judge`).
      unknown_origin: accept transcoders that do not say of which model they are.
      skip_start: first tokens of a prompt that have no features; -1 for as many as the transcoder's
        file says that training left out. circuit-tracer leaves out one.
      resamples: bootstrap samples of the prompts.
      seed: random seed of the bootstrap samples.
    """

    model: str = ""
    transcoder: str = ""
    dense: str = ""
    dense_transcoder: str = ""
    sparse: str = ""
    sparse_transcoder: str = ""
    neurons: bool = False
    prompts: tuple[str, ...] = ()
    prompt_file: str = ""
    targets: tuple[str, ...] = ()
    max_features: int = 0
    node_threshold: float = 0.8
    edge_threshold: float = 0.95
    mediated: int = 4_000
    explained: int = 8
    intervened: int = 8
    supernodes: int = 8
    factors: tuple[float, ...] = (0.0, -5.0, -10.0)
    fraction: float = 0.9
    corpus: CorpusConfig = dataclasses.field(
        default_factory=lambda: CorpusConfig("wiki", "document", splits=(1.0, 0.0, 0.0))
    )
    context: int = 64
    examples: int = 10
    labels: str = ""
    dense_labels: str = ""
    sparse_labels: str = ""
    judge: str = "null"
    unknown_origin: bool = False
    skip_start: int = -1
    resamples: int = 2_000
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [*self._models(), *self._prompts()]
        wanted = {
            "max_features": (self.max_features >= 0, "at least 0"),
            "skip_start": (self.skip_start >= -1, "at least 0, or -1 for the transcoder's own"),
            "context": (self.context >= 1, "at least 1"),
            "examples": (self.examples >= 1, "at least 1"),
            "mediated": (self.mediated >= 0, "at least 0"),
            "explained": (self.explained >= 0, "at least 0"),
            "intervened": (self.intervened >= 0, "at least 0"),
            "supernodes": (self.supernodes >= 0, "at least 0"),
            "factors": (
                bool(self.factors) and all(map(math.isfinite, self.factors)),
                "finite numbers, one or more",
            ),
            "node_threshold": (0 < self.node_threshold <= 1, "above 0 and at most 1"),
            "edge_threshold": (0 < self.edge_threshold <= 1, "above 0 and at most 1"),
            "fraction": (0 < self.fraction < 1, "above 0 and below 1"),
            "resamples": (self.resamples >= 100, "at least 100"),
            "seed": (self.seed >= 0, "at least 0"),
        }
        problems += out_of_range(self, wanted, prefix="config.")
        if problems:
            raise UsageError("; ".join(problems))

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
            raise UsageError("--model is missing; name a folder or a model of the manifest")
        return {
            role: (getattr(self, role), getattr(self, transcoder_field(role))) for role in roles
        }


def transcoder_field(role: str) -> str:
    """The field of the transcoder of a role."""
    return "transcoder" if role == ALONE else f"{role}_transcoder"


def labels_field(role: str) -> str:
    """The field of the labels of a role's features."""
    return "labels" if role == ALONE else f"{role}_labels"


def experiment(mode: str, **settings: Any) -> ConfigDict:
    """The `get_config(mode)` of attribution graphs.

    Args:
      mode: "" for all that was asked for, "smoke" for graphs of few features.
      **settings: fields of `GraphConfig` that differ from its defaults.

    Raises:
      UsageError: the mode is unknown, or `GraphConfig` refuses the settings.
    """
    return in_mode(mode, GraphConfig(**settings), {"smoke": smoke}, of="attribution graphs")


def smoke(config: GraphConfig) -> GraphConfig:
    """Few features, the mediation of few edges, and little text."""
    corpus = dataclasses.replace(config.corpus, max_tokens=5_000)
    small = {"max_features": 20, "mediated": 20, "explained": 2, "intervened": 2, "supernodes": 2}
    return dataclasses.replace(
        config, corpus=corpus, context=24, examples=2, resamples=100, **small
    )
