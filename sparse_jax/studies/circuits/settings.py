"""Settings of the circuit study."""

from collections.abc import Mapping
import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from lm_jax.assets import published
from lm_jax.errors import nearest
from lm_jax.report import slug
from lm_jax.run.config import LATER
from lm_jax.run.settings import (
    READS_MODEL,
    Flag,
    PositiveInt,
    Reads,
    Shortcut,
    at_least,
    between,
    different,
    names,
    none_or,
)
from lm_jax.study import Settings
from sparse_jax.circuits.ablation import EDGE_ABLATIONS, Ablation
from sparse_jax.circuits.generators import GENERATORS, REPHRASED
from sparse_jax.circuits.metrics import METRICS
from sparse_jax.circuits.patching import EdgePart
from sparse_jax.circuits.place_patching import PLACES
from sparse_jax.circuits.rules import RULES
from sparse_jax.studies.pair.folders import model_folders, text_files

COMPONENTS = ("heads", "token_edges", "component_edges")
ROLES = ("dense", "control", "sparse")
SOME_PLACES = none_or(names(PLACES), f"none or more different names out of {', '.join(PLACES)}")
SOME_SIZES = none_or(different(at_least(1)))


def _read_pair(folder: str) -> dict[str, str | tuple[str, ...]]:
    """The models of a pair and the texts that they were trained on, by the names of fields."""
    pair = published.resolve(folder)
    models = {role: str(path) for role, path in model_folders(pair).items()}
    return {**models, "trained_on": tuple(map(str, text_files(pair)))}


@dataclasses.dataclass(frozen=True)
class CircuitConfig(Settings):
    """Everything that decides the result.

    Attributes:
      dense: model whose circuits are found: a Hugging Face folder, a .gguf file, a folder made by
        `iaj convert`, or a name of iaj fetch --list.
      control: model of the same training with every gate open, given like `dense`; "" for none.
      sparse: exported folder of iaj sparse posttrain, or a name such as pair_192_sparse; "" for
        none.
      tasks: names of tasks, or .jsonl files, with commas between: ioi, greater_than, docstring,
        copy and others (`sparse_jax.circuits.generators.GENERATORS`).
      rephrased: another wording, a name or a file, to which the circuits of a single task are
        transferred; "auto" takes the one that comes with the task, "" none.
      metric: measure of an answer, such as logit_difference
        (`sparse_jax.circuits.metrics.METRICS`); "" takes the task's own.
      count: prompts of a generated task; a file is used whole.
      trained_on: texts of a pair (`sparse_jax.studies.pair.corpus`) whose prompts no generated task
        has.
      seed: random seed of the prompts, random circuits and bootstrap samples.
      components: kinds of component that circuits consist of, each by itself: heads, token_edges,
        component_edges.
      ablations: what replaces components outside the circuit; the first one is used for the
        figures, for circuits on other prompts and for the comparison with the paper.
      patch: places that are also patched exactly, position by position in each layer: resid_pre,
        the residual stream that enters it; attn_out and mlp_out, what its attention and its MLP
        add; head_out and query, the output and the query of each of its heads; key and value, those
        of each key head.
      direction: direction of the patches whose effects rank the components, noising or denoising.
      edge_part: part of a token edge that is patched to rank it: its value contribution, "value",
        or its softmax weight, "weight". Ablations are of value contributions.
      rules: local derivatives of the attributions of heads and token edges, a name of
        `sparse_jax.circuits.rules.RULES`. The true gradient, "exact", ranks edges badly where the
        softmax is saturated.
      fraction: explained effect that a circuit is to reach.
      accuracy_bar: share of prompts with a positive metric below which a model is said not to solve
        the task, so that no ratio is claimed.
      points: sizes of circuits, near to even in the logarithm; those of MIB come in addition.
      random_draws: random rankings per curve, whose mean is drawn.
      edge_sample: edges of each kind that are also patched exactly, drawn uniformly among those
        that carry weight.
      ig_steps: steps of the integrated gradients by which component edges are ranked.
      pruned: sizes, in component edges, of circuits that edge pruning finds by gradient descent on
        masks (`sparse_jax.circuits.edge_pruning`), each for a task, under the first ablation; the
        ranking above is where its masks start.
      pruning_steps: updates of the masks.
      shown: index of the prompt whose patterns and edges are drawn.
      at_once: patches or circuits run side by side, which bounds the memory.
      resamples: bootstrap samples of the prompts.
      dtype: dtype of the weights and of the computation.
    """

    shortcuts: ClassVar[Mapping[str, Shortcut]] = {
        "pair": Shortcut(
            "work folder of iaj sparse pair, or pair_192, whose three models are taken",
            _read_pair,
        )
    }

    dense: Annotated[str, Flag(), READS_MODEL] = "smollm2"
    control: Annotated[str, Flag(), READS_MODEL] = ""
    sparse: Annotated[str, Flag(), READS_MODEL] = ""
    tasks: Annotated[tuple[str, ...], Flag("task"), Reads("file", suffix=".jsonl")] = ("ioi",)
    rephrased: str = "auto"
    metric: str = ""
    count: Annotated[int, at_least(2)] = 20
    trained_on: tuple[str, ...] = ()
    seed: Annotated[int, at_least(0)] = 0
    components: Annotated[tuple[str, ...], names(COMPONENTS)] = ("heads", "token_edges")
    ablations: Annotated[tuple[str, ...], names(get_args(Ablation))] = ("counterfactual",)
    patch: Annotated[tuple[str, ...], Flag(), SOME_PLACES] = dataclasses.field(
        default=(), metadata=LATER
    )
    direction: Literal["noising", "denoising"] = "noising"
    edge_part: EdgePart = "value"
    rules: str = "gim"
    fraction: Annotated[float, between(0, 1)] = 0.9
    accuracy_bar: Annotated[float, between(0, 1)] = 0.8
    points: Annotated[int, at_least(2)] = 16
    random_draws: Annotated[int, at_least(1)] = 2
    edge_sample: Annotated[int, at_least(2)] = 32
    ig_steps: Annotated[int, at_least(1)] = 5
    pruned: Annotated[tuple[int, ...], SOME_SIZES] = dataclasses.field(default=(), metadata=LATER)
    pruning_steps: PositiveInt = dataclasses.field(default=400, metadata=LATER)
    shown: Annotated[int, at_least(0)] = 0
    at_once: Annotated[int, at_least(1)] = 8
    resamples: Annotated[int, at_least(100)] = 2000
    dtype: Literal["float32", "bfloat16"] = "float32"

    def problems(self) -> list[str]:
        problems = [
            f"config.tasks has {task!r}, which is no task and no .jsonl file"
            f"{nearest(task, GENERATORS)}"
            for task in self.tasks
            if task not in GENERATORS and not is_file(task)
        ]
        if not self.dense:
            problems.append("config.dense names no model; give --dense=FOLDER")
        if "token_edges" in self.components and not self.edge_ablations:
            problems.append(
                f"config.ablations = {self.ablations} has none that is defined for token edges; "
                f"add {' or '.join(EDGE_ABLATIONS)}"
            )
        if self.pruned and "component_edges" not in self.components:
            problems.append(
                f"config.pruned = {self.pruned} is of component edges; add component_edges to "
                "config.components"
            )
        if self.pruned and self.ablations[0] == "resample":
            problems.append(
                "config.pruned takes the first of config.ablations, and masks cannot be trained "
                "under 'resample'; put another one first"
            )
        if self.metric and self.metric not in METRICS:
            problems.append(f"config.metric = {self.metric!r}{nearest(self.metric, METRICS)}")
        if self.rules not in RULES:
            problems.append(f"config.rules = {self.rules!r}{nearest(self.rules, RULES)}")
        other = self.rephrased
        if other not in ("", "auto"):
            if other not in GENERATORS and not is_file(other):
                problems.append(
                    f"config.rephrased = {other!r} is no task and no .jsonl file"
                    f"{nearest(other, GENERATORS)}"
                )
            if len(self.tasks) > 1:
                problems.append("config.rephrased belongs to one task; name one in config.tasks")
        called = [task_name(task) for task in self.task_sources]
        if len(set(called)) < len(called):
            problems.append(f"tasks are called {', '.join(called)}; give each another name")
        return problems

    def default_folder(self) -> Path:
        about = [Path(source).name for source in self.models.values()]
        return Path("runs", "circuits", slug(" ".join([*about, *map(task_name, self.tasks)])))

    @property
    def models(self) -> dict[str, str]:
        """Source of each model that is given, by its role."""
        return {role: getattr(self, role) for role in ROLES if getattr(self, role)}

    @property
    def rephrasings(self) -> dict[str, str]:
        """The other wording of each task that has one."""
        if self.rephrased == "auto":
            return {task: REPHRASED[task] for task in self.tasks if task in REPHRASED}
        return {task: self.rephrased for task in self.tasks if self.rephrased}

    @property
    def task_sources(self) -> tuple[str, ...]:
        """Tasks in the order of measurement: those asked for, then their rephrasings."""
        return tuple(dict.fromkeys([*self.tasks, *self.rephrasings.values()]))

    def ablations_of(self, component: str) -> tuple[str, ...]:
        """The ablations that are defined for a kind of component."""
        return self.edge_ablations if component == "token_edges" else self.ablations

    @property
    def edge_ablations(self) -> tuple[str, ...]:
        """The ablations that are defined for token edges."""
        return tuple(name for name in self.ablations if name in EDGE_ABLATIONS)


def is_file(task: str) -> bool:
    """Whether a task is a user's file, by its name."""
    return Path(task).suffix == ".jsonl"


def task_name(task: str) -> str:
    """The name of a task in results."""
    return Path(task).stem if is_file(task) else task


def quickstart(config: CircuitConfig) -> CircuitConfig:
    """Fewer prompts and sizes, and no other wording."""
    return dataclasses.replace(config, count=6, points=10, random_draws=1, rephrased="")


def smoke(config: CircuitConfig) -> CircuitConfig:
    """Two prompts and three sizes."""
    return dataclasses.replace(
        config,
        count=2,
        points=3,
        random_draws=1,
        edge_sample=2,
        resamples=100,
        rephrased="",
    )
