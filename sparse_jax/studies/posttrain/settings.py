"""Settings of post-training: the frozen dataclass that a config file becomes."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Annotated, Any, Literal

import numpy as np

from lm_jax.errors import out_of_range
from lm_jax.model.lora import LoraConfig
from lm_jax.run.config import LATER
from lm_jax.run.settings import (
    READ_AT_ONCE,
    READS_MODEL,
    SEED,
    Bound,
    Finite,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ShareBelow1,
    different,
    within,
)
from lm_jax.study import Distributed, Training
from lm_jax.text.preparation import CorpusConfig
from lm_jax.text.splits import missing_splits
from lm_jax.train.config import Schedule, StepFields, TrainConfig, train_config
from sparse_jax.gates.geco import Strength
from sparse_jax.gates.objective import GATE_BIAS, Constraint
from sparse_jax.gates.opening import Opened


def _apart(bounds: Sequence[float], *, least: float) -> bool:
    """Whether all are finite, at least `least`, and 0.0001 apart, as names of folders must be."""
    steps = np.diff(sorted(bounds))
    return all(least <= bound < math.inf for bound in bounds) and bool(
        (steps >= 1e-4 - 1e-12).all()
    )


_TARGETS = Bound("above 0 and 0.0001 apart", lambda bounds: _apart(bounds, least=1e-4))
_SHARE = Bound("above 0 and at most 1", lambda share: 0 < share <= 1)
_SLACKS = Bound("at least 0 and 0.0001 apart", lambda bounds: _apart(bounds, least=0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PosttrainConfig(StepFields, Training, Distributed):
    """All settings of post-training.

    Attributes:
      model: a local folder, a .gguf file, or a name of iaj fetch --list.
      corpus: the text and its splits; its `vocab_size` is ignored in favour of the model's.
      context: tokens of a window, always of one document.
      validation_documents: the most documents to evaluate on.
      slacks: bounds of the loss, in nats per token above that of the dense model or of the control,
        as `slack_over` says, on the same tokens; one run for each, which together give the
        frontier. With `constraint="divergence"` they bound the divergence.
      slack_over: what `slacks` are above: "dense", the loss of the pretrained model, or "control",
        that of the control of the same seed, which is then trained first: a slack of 0 asks for the
        loss of equal training alone.
      targets: absolute bounds in nats per token, which replace `slacks` if there are any.
      constraint: what is bounded: "loss", or "divergence" from the dense model, the mean over
        tokens of KL(dense || sparse), which is then minimised in place of the loss. A batch gives
        it exactly where its loss varies by more than the slack; and learning the text does not
        lower it, so that it has no control.
      relaxed: nats per token that the bound is higher at the peak of the learning rate, and in
        proportion to the rate at every update. The noise of updates at a high rate costs as much,
        and goes as the rate falls; a bound that has no room for it closes edges late.
      strength: update rule of the penalty's strength; the runs differ in its target.
      adapters: rank, alpha and targets of LoRA.
      full: train all weights instead of adapters.
      bias: initial bias of the gate logits.
      learn_bias: train one bias per layer and head.
      open_at_start: share of the edges, and at each position of the attention weight, that is open
        before the first update: the initial bias of each head is such on the first training
        windows (`sparse_jax.gates.opening`). 0 starts from `bias`, with which a pretrained model
        may be broken at once. Needs `learn_bias`.
      start: a sparse model over the same base, such as `peft` of an earlier run or a published one,
        whose adapters (with `full`, weights) and biases the run begins with; "" begins with the
        base. Needs `learn_bias` and no `open_at_start`.
      opened: what `open_at_start` is a share of: "edges" and weight, or "weight" alone, so that
        edges which carry next to none are closed from the start.
      bias_rate: learning rate of the biases, as a multiple of that of the weights.
      raw_gate: gate logits as Eq. 1 prints them, q.k without its scale.
      renormalise: divide the weights of open edges by their sum, an ablation of Eq. 2.
      control: also train for as many steps with every gate open. Against this dense model, trained
        on the same text, the loss shows the cost of closing edges alone.
      distill: weight of the divergence from the dense model; 0 leaves the teacher out.
      temperature: temperature of both distributions in the divergence.
      paired: bound the loss of each update by that of the control at the same update, on the same
        batch, plus the slack, and not by a fixed number: a run then closes edges from its first
        update on, when no model has the loss of the control's end. Needs `slack_over="control"`.
      loss_share: share of the positions, drawn anew for each update, at which it compares the
        models; all positions have gates. Logits take most of the time of a small model with a large
        vocabulary.
      by_rule: share of the updates, the last ones, in which gates open by rule as in evaluation:
        where a needed edge was open in half of the samples, the rule may close it for good.
      batch_size: windows of one update, on all devices together.
      accumulate: micro-batches of one update.
      schedule: schedule of the learning rate after the warm-up: "cosine" falls to a tenth, "linear"
        to 0.
      weight_decay: weight decay of matrices.
      eps: number that Adam adds to the root of the second moment. Adam scales any small steady
        gradient up to the learning rate; a gradient small beside `eps` moves less.
      skip_sigma: skip an update whose loss is that many standard deviations above the mean of the
        last 128; 0 skips none.
      dtype: dtype of the computation and of frozen weights; trained weights and moments are
        float32.
      export_dtype: dtype of the exported weights where adapters are merged into frozen ones: "base"
        is `dtype`, to which the sum is rounded once; "float32" does not round it.
      remat: keep only the residual stream of each layer for the backward pass.
      eval_every: steps between evaluations.
      seeds: random seeds of adapters, order and gates; one run for each seed and bound.
      texts: texts whose attention before and after is in the report.
      heads: heads in the report, as "layer.head"; if there are none, heads whose few open edges
        carry much weight (`patterns.legible`).
    """

    model: Annotated[str, READS_MODEL] = "smollm2"
    corpus: CorpusConfig = dataclasses.field(
        default_factory=lambda: CorpusConfig("wiki", "document", splits=(0.97, 0.03, 0.0))
    )
    context: Annotated[PositiveInt, READ_AT_ONCE] = 64
    validation_documents: PositiveInt = 200
    slacks: Annotated[tuple[float, ...], _SLACKS] = (0.05,)
    slack_over: Literal["dense", "control"] = "dense"
    targets: Annotated[tuple[float, ...], _TARGETS] = ()
    constraint: Constraint = dataclasses.field(default="loss", metadata=LATER)
    relaxed: NonNegativeFloat = dataclasses.field(default=0.0, metadata=LATER)
    strength: Strength = dataclasses.field(default_factory=Strength)
    adapters: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    full: bool = False
    bias: Finite = 0.0
    learn_bias: bool = False
    open_at_start: ShareBelow1 = dataclasses.field(default=0.0, metadata=LATER)
    start: str = dataclasses.field(default="", metadata=LATER)
    opened: Opened = dataclasses.field(default="edges", metadata=LATER)
    bias_rate: PositiveFloat = dataclasses.field(default=1.0, metadata=LATER)
    raw_gate: bool = False
    renormalise: bool = False
    control: bool = False
    distill: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 1.0
    paired: bool = False
    loss_share: Annotated[float, _SHARE] = dataclasses.field(default=1.0, metadata=LATER)
    by_rule: Annotated[float, within(0, 1)] = 0.0
    batch_size: PositiveInt = 16
    accumulate: PositiveInt = 1
    steps: PositiveInt = 1_000
    learning_rate: PositiveFloat = 1e-4
    warmup: ShareBelow1 = 0.02
    schedule: Schedule = dataclasses.field(default="cosine", metadata=LATER)
    weight_decay: NonNegativeFloat = 0.0
    eps: PositiveFloat = dataclasses.field(default=1e-8, metadata=LATER)
    skip_sigma: NonNegativeFloat = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    export_dtype: Literal["base", "float32"] = "base"
    remat: bool = False
    eval_every: PositiveInt = 100
    save_every: PositiveInt = 50
    seeds: Annotated[tuple[int, ...], different(SEED)] = (234,)
    texts: tuple[str, ...] = (
        "When Mary and John went to the store, John gave a drink to Mary, and Mary thanked him.",
    )
    heads: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        """What does not fit together."""
        some = bool(self.targets or self.slacks)
        problems = out_of_range(self, {"slacks": (some, "one number or more")}, prefix="config.")
        problems += missing_splits(self.corpus.splits)
        if self.slack_over == "control" and not self.control:
            problems.append("config.slack_over = 'control' needs config.control = True")
        if self.paired and (self.slack_over != "control" or self.targets):
            problems.append("config.paired needs config.slack_over = 'control' and no targets")
        problems += self._divergence_problems()
        if self.open_at_start and (not self.learn_bias or self.bias):
            problems.append("config.open_at_start needs config.learn_bias = True, config.bias = 0")
        if self.start and (not self.learn_bias or self.open_at_start or self.control):
            problems.append(
                "config.start needs config.learn_bias = True, config.open_at_start = 0 and no "
                "config.control, which would begin with the base"
            )
        if self.opened != "edges" and not self.open_at_start:
            problems.append(f"config.opened = {self.opened!r} needs config.open_at_start above 0")
        if self.bias_rate != 1 and not self.learn_bias:
            problems.append(f"config.bias_rate = {self.bias_rate} needs config.learn_bias = True")
        if self.paired and self.relaxed:
            problems.append("config.relaxed raises a bound that config.paired replaces; set one")
        if self.paired and self.skip_sigma:
            # A skipped update has no number in the dual, so those after it would be bounded by the
            # control's losses on other batches.
            problems.append(
                f"config.skip_sigma = {self.skip_sigma} skips updates, and config.paired compares "
                "each with that of the control; set config.skip_sigma = 0 or config.paired = False"
            )
        if self.accumulate >= 1 and self.batch_size % self.accumulate:
            problems.append(
                f"config.batch_size = {self.batch_size} must be a multiple of config.accumulate = "
                f"{self.accumulate}"
            )
        for head in self.heads:
            if not all(part.isdecimal() for part in head.split(".")) or head.count(".") != 1:
                problems.append(f"config.heads has {head!r}; write layer.head, such as 3.0")
        return problems

    def _divergence_problems(self) -> list[str]:
        """What the divergence as constraint does not go with."""
        if self.constraint == "loss":
            return []
        where = "config.constraint = 'divergence'"
        problems = []
        if self.distill != 1 or self.temperature != 1:
            problems.append(f"{where} needs config.distill = 1 and config.temperature = 1")
        if self.targets or not all(self.slacks):
            problems.append(f"{where} is bounded by config.slacks above 0; give no config.targets")
        if self.control:
            problems.append(
                f"{where} has its minimum, 0, with every gate open; set config.control = False"
            )
        return problems

    @property
    def train(self) -> TrainConfig:
        """The settings of the loop."""
        factors = ((GATE_BIAS, self.bias_rate),) if self.bias_rate != 1 else ()
        return train_config(self, early_stop=False, rate_factors=factors)


# Gates of a pretrained model that start open, so that its loss at first is that of the dense model.
# With a share of 0.99, sampled gates close an attention sink now and then, which costs SmolLM2 more
# than 0.01 nats. Biases of ten and more come down within a run only at a rate of their own.
OPEN_GATES: Mapping[str, Any] = {"learn_bias": True, "open_at_start": 0.999, "bias_rate": 30.0}

# The gates of the paper: q.k without its scale, and bias 0 (section 3.1 finds others unnecessary).
PAPER_GATES: Mapping[str, Any] = {
    "raw_gate": True,
    "learn_bias": False,
    "open_at_start": 0.0,
    "bias_rate": 1.0,
}

# Settings for hundreds of updates. The bound leaves a margin to 0.05, because it is on the training
# text and not on the validation text.
SMALL_MODEL: Mapping[str, Any] = {
    "slacks": (0.04,),
    "strength": Strength(dual_rate=0.1, decay=0.9, start=0.3),
    "adapters": LoraConfig(rank=8, alpha=16.0),
    "distill": 0.0,
    "batch_size": 8,
    "steps": 400,
    "learning_rate": 1e-3,
    "eval_every": 80,
    "save_every": 40,
    **OPEN_GATES,
}

# Bounds relative to the control at the same update, and gates by rule late in training.
OVER_CONTROL: Mapping[str, Any] = {
    "control": True,
    "slack_over": "control",
    "paired": True,
    "raw_gate": True,
    "by_rule": 0.4,
    "strength": Strength(dual_rate=1.0, decay=0.95, start=0.1, least=0.01, settle=0.2),
}

# The divergence under its bound, with adapters over open gates. Edges answer the strength late, and
# the proportional term damps the swing that comes of it, if its steps are not cut short and the
# average does not add to the delay: a batch gives the divergence exactly.
ON_DIVERGENCE: Mapping[str, Any] = {
    "constraint": "divergence",
    "slacks": (0.03,),
    "strength": Strength(dual_rate=1.0, decay=0.5, start=0.05, longest=0.5, proportional=50.0),
    "adapters": LoraConfig(rank=16, alpha=32.0),
    "distill": 1.0,
    "warmup": 0.05,
    "schedule": "linear",
    **OPEN_GATES,
}

# More nats than any model loses per token, unless it is worse than a uniform distribution.
_SMOKE_MARGIN = 15.0


def smoke(config: PosttrainConfig) -> PosttrainConfig:
    """The same experiment on little text, for two steps.

    Targets stay targets, the number of micro-batches stays, and the mesh keeps its axes: the
    largest axis of a fixed size takes the devices that are there.
    """
    corpus = dataclasses.replace(config.corpus, max_tokens=20_000, splits=(0.8, 0.2, 0.0))
    data, fsdp, tensor = config.mesh
    if -1 not in config.mesh:
        largest = config.mesh.index(max(config.mesh))
        data, fsdp, tensor = (-1 if axis == largest else 1 for axis in range(3))
    return dataclasses.replace(
        config,
        corpus=corpus,
        context=min(config.context, 24),
        validation_documents=8,
        # The bounds of a recipe do not hold for other text in windows as short as these.
        targets=tuple(bound + _SMOKE_MARGIN for bound in config.targets),
        batch_size=8 * config.accumulate,
        steps=2,
        eval_every=1,
        seeds=config.seeds[:1],
        mesh=(data, fsdp, tensor),
    )
