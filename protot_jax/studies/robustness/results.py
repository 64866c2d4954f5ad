"""Results of the robustness command: dataclasses of `summary.json`, columns of `rows.parquet`.

The page `report.html` shows the content of `summary.json`. A reader refuses another version; a
field that is added keeps the version, a change of meaning raises it. Divergences are in nats, true
Jensen-Shannon unless another is named. An interval is of 95 %, over sentences, or over frames where
sentences are built: Student's, or a bootstrap for the ratio of means of 30 or more. Its ends are
null where there are fewer than five of them or where nothing varies.
"""

from collections.abc import Mapping
import dataclasses
from typing import Literal

import pyarrow as pa

from lm_jax.run.results import Count, Share
from protot_jax.studies.interventions.results import Interval

SCHEMA: Literal["protot_jax.robustness"] = "protot_jax.robustness"
VERSION: Literal[2] = 2
Kind = Literal["noise", "meaning", "given"]


@dataclasses.dataclass(frozen=True)
class TrainedOn:
    """What a model has read of the sentences that were given.

    Attributes:
      sentences: number that stand in its training text word for word; their pairs are left out.
      unknown: why it is not known; empty if it is.
    """

    sentences: Count
    unknown: str


@dataclasses.dataclass(frozen=True)
class Model:
    """One of the models.

    Attributes:
      run: name of the run (`saved_run.run_names`).
      prototypes: null for a model without any.
      trained: sentences that stand in its training text.
    """

    run: str
    kind: str
    seed: Count
    step: Count
    corpus: str
    layers: Count
    hidden_size: Count
    vocab_size: Count
    prototypes: Count | None
    trained: TrainedOn


@dataclasses.dataclass(frozen=True)
class Mediation:
    """Prototype-mediated robustness over pairs (`mediation.PMR`).

    Attributes:
      mean_of_ratios: mean as in the paper; null where no pair is above the floor.
      deviation: standard deviation of the ratios over pairs; null for fewer than two.
      ratio_of_means: 1 - mean JS_clamped / mean JS_base; its mean is null below the floor.
      median: median of the ratios.
      positive: share of the ratios that are above 0; null without any.
      below_floor: share of pairs without a ratio.
      pairs: number of pairs.
    """

    mean_of_ratios: float | None
    deviation: float | None
    ratio_of_means: Interval
    median: float | None
    positive: Share | None
    below_floor: Share
    pairs: Count


@dataclasses.dataclass(frozen=True)
class ReleasedClamp:
    """What forcing one gate of the last token does, as in the released code.

    Attributes:
      write_js: JS after the last token with the write gate forced (`edits.released_clamp`).
      read_js: the same with the read gate forced.
      js: JS with the gate whose JS is smaller, pair by pair.
      pmr: PMR with the gate whose JS is smaller, pair by pair.
    """

    write_js: Interval
    read_js: Interval
    js: Interval
    pmr: Mediation


@dataclasses.dataclass(frozen=True)
class Clamp:
    """What holding the routing does to the JS after the last token.

    Attributes:
      js: JS with the gates of the original sentence.
      js_aligned: the same, over aligned tokens.
      pmr: PMR of `js`.
      control_js: JS with the gates of another sentence, over the pairs that have one.
      control_pmr: PMR of `control_js`.
      gain: mean of `control_js` minus `js` over the same pairs: above 0 where the routing of this
        sentence does more than that of any.
      released: result of the released code's clamp; null where it was not asked for.
    """

    js: Interval
    js_aligned: Interval
    pmr: Mediation
    control_js: Interval
    control_pmr: Mediation | None
    gain: Interval
    released: ReleasedClamp | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """One model on one slice.

    Attributes:
      js: JS after the last token.
      js_aligned: mean over aligned tokens after the first change, of pairs that have any.
      ag: arithmetic-geometric divergence after the last token; null where it is infinite.
      overlap, same_top, mass: means over pairs of `divergence.Agreement`.
      spearman: the same, over pairs where it is defined; null without any.
      same_tokens: pairs that are the same tokens to this model, whose divergence is 0.
      clamp: null for a model without prototypes.
    """

    js: Interval
    js_aligned: Interval
    ag: float | None
    overlap: Share
    spearman: float | None
    same_top: Share
    mass: float
    same_tokens: Count
    clamp: Clamp | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """JS after the last token of all models against the first one, pair by pair.

    The first model is the one that was named first, whatever the data are.

    Attributes:
      excess: mean of each model's JS minus that of the first over the pairs that both have; 0
        for the first itself.
      p: two-sided p-value of each excess, the t test over sentences or frames of its interval; 1
        for the first, null where the interval has no ends.
      corrected: `p` after Holm's correction over all models and all slices of the same kind.
    """

    excess: tuple[Interval, ...]
    p: tuple[Share | None, ...]
    corrected: tuple[Share | None, ...]


@dataclasses.dataclass(frozen=True)
class SliceResult:
    """One slice: its pairs, and the models in the order of `models`.

    Attributes:
      kind: "noise" keeps the meaning, "meaning" flips it, "given" came perturbed.
      pairs: number of pairs.
      sentences: number of different originals, the units of intervals where there are no frames.
      frames: number of different frames of built sentences, then the units of intervals; 0 where
        sentences have none.
      distance: mean edit distance in characters.
      similarity: mean cosine of the sentences' vectors; null where it was not measured.
      dissimilar: pairs that the similarity filter left out.
      trained: pairs that were left out because a model was trained on one of their sentences.
      example: an original and its perturbed form.
      comparison: comparison of the models; null for one.
    """

    name: str
    kind: Kind
    pairs: Count
    sentences: Count
    frames: Count
    distance: float
    similarity: float | None
    dissimilar: Count
    trained: Count
    example: tuple[str, str]
    models: tuple[Measured, ...]
    comparison: Comparison | None = None


@dataclasses.dataclass(frozen=True)
class SkippedSlice:
    """A slice that was not measured, and why."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that decide the numbers.

    Attributes:
      sentences: name of the file, or of the corpus whose validation text was sampled.
      given: whether they are the user's.
      pairs: greatest number of pairs of a slice.
      seed: seed of sentences, perturbations, controls and the bootstrap.
      least_similarity: pairs below it were left out; null where similarity was not measured.
      held: the prototypes that were held, such as "L2P5"; empty for all.
      floor: JS below it has no ratio.
      too_long: pairs that were left out because a model reads fewer tokens.
    """

    sentences: str
    given: bool
    pairs: Count
    seed: Count
    least_similarity: float | None
    held: tuple[str, ...]
    floor: float
    too_long: Count


@dataclasses.dataclass(frozen=True)
class RobustnessReport:
    """How far predictions move when a sentence is perturbed, by slice and model."""

    schema: Literal["protot_jax.robustness"]
    version: Literal[2]
    settings: Settings
    models: tuple[Model, ...]
    slices: tuple[SliceResult, ...]
    skipped: tuple[SkippedSlice, ...]


ROWS = pa.schema(
    [
        # Index into the models of `summary.json`, and name of the run there.
        ("model", pa.int16()),
        ("run", pa.string()),
        ("seed", pa.int64()),
        ("slice", pa.string()),
        ("text", pa.string()),
        ("perturbed", pa.string()),
        # The built sentence that was filled, and the original's corpus and split; empty without.
        ("frame", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        # Edit distance in characters; similarity is null where it was not measured.
        ("distance", pa.int32()),
        ("similarity", pa.float64()),
        ("tokens", pa.int32()),
        ("perturbed_tokens", pa.int32()),
        ("same_tokens", pa.bool_()),
        # Tokens whose gates are held, and those over which JS is averaged.
        ("held", pa.int32()),
        ("aligned", pa.int32()),
        # In nats, NaN where there is none.
        ("js", pa.float64()),
        ("js_aligned", pa.float64()),
        ("ag", pa.float64()),
        # How much of the original's ranking is left (`divergence.Agreement`).
        ("overlap", pa.float64()),
        ("spearman", pa.float64()),
        ("same_top", pa.bool_()),
        ("mass", pa.float64()),
        ("js_clamped", pa.float64()),
        ("js_aligned_clamped", pa.float64()),
        ("js_control", pa.float64()),
        ("js_aligned_control", pa.float64()),
    ]
)

# JS with one gate forced as in the released code (`ReleasedClamp`), and the gate; these columns
# follow `ROWS` where they were asked for.
RELEASED: Mapping[str, Literal["write", "read"]] = {
    "js_released_write": "write",
    "js_released_read": "read",
}


def rows(*, released: bool) -> pa.Schema:
    """The columns of `rows.parquet`, with those of the released code's clamp or without."""
    more = RELEASED if released else ()
    return pa.schema([*ROWS, *(pa.field(name, pa.float64()) for name in more)])
