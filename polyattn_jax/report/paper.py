"""Published numbers of the paper that a report compares with ours: `published/polyattn.toml`.

"When Does Polynomial Attention Concentrate? A Relative-Margin Diagnostic for Zero-Shot Softmax
Substitution". Rates and accuracies are in percent, differences of accuracy in percentage points.
Recipes are named as in `row_maps.RECIPES`.
"""

from collections.abc import Mapping
import dataclasses
import re

from lm_jax.assets import papers

# What is said of a model that has the name of one of the paper's.
UNVERIFIED = "of this name, weights not verified"
Ends = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class PaperSettings:
    """Settings that all models share.

    Attributes:
      prompts: number of prompts of a cell.
      needle_length: tokens of a needle prompt.
      literary_length: tokens of a literary opening with its padding.
      calibration_length: tokens of the text that b_auto is calibrated on.
      draws: number of random sets of heads of a size (Tables 17 and 27).
      ablation_recipe: recipe in these sets.
      literary_softmax: least and highest accuracy of softmax on the literary openings.
    """

    prompts: int
    needle_length: int
    literary_length: int
    calibration_length: int
    draws: int
    ablation_recipe: str
    literary_softmax: Ends


@dataclasses.dataclass(frozen=True)
class RowMedians:
    """The other columns of Tables 10 and 11: counts of rows, medians over active rows, dead %.

    Tables 18 and 23 have some of them.
    """

    relative_margin: float
    active: float
    rows: int | None = None
    s_2: float | None = None
    dead: float | None = None


@dataclasses.dataclass(frozen=True)
class Prevalence:
    """Active-unsaturated rows of one suite and bias: Tables 1, 10 and 11, 18 and 23.

    Attributes:
      unsafe: share of unsafe rows by degree.
      medians: the other columns; None for the in-distribution values of Table 1.
      remarks: oddities of the source.
    """

    suite: str
    bias_kind: str
    length: int
    unsafe: Mapping[int, float]
    medians: RowMedians | None = None
    remarks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PaperInterval:
    """One row of Table 8: agreement (0..1) by degree, false negatives and positives at p = 2."""

    agree: Mapping[int, float] = dataclasses.field(default_factory=dict)
    false_negative: int | None = None
    false_positive: int | None = None


@dataclasses.dataclass(frozen=True)
class Matched:
    """Safe rows of the needle prompts (Tables 5 and 12); `false_negative` counts rows."""

    measured: float
    predicted: float
    top_measured: float
    top_predicted: float
    own_top_measured: float
    own_top_predicted: float
    false_negative: int


@dataclasses.dataclass(frozen=True)
class MatchedEnds:
    """The 95 % intervals of the first four numbers of `Matched` (Table 13)."""

    measured: Ends
    predicted: Ends
    top_measured: Ends
    top_predicted: Ends


@dataclasses.dataclass(frozen=True)
class AnswerKey:
    """The answer's key as target (Table 14)."""

    argmax: float
    dead: float
    measured: float
    predicted: float
    top_measured: float
    top_predicted: float


@dataclasses.dataclass(frozen=True)
class Draws:
    """Changes of accuracy in K heads, the top, the bottom and random ones (Tables 17, 25 and 27).

    Attributes:
      random_least: change of the worst random set, if the paper prints it.
      random_most: change of the best one.
      random_mean: mean change.
      beaten: number of random sets that do better than the top K heads.
      sets: number of random sets, if it is not `PaperSettings.draws`.
    """

    top: float
    bottom: float
    random_least: float | None = None
    beaten: int | None = None
    random_most: float | None = None
    random_mean: float | None = None
    sets: int | None = None


@dataclasses.dataclass(frozen=True)
class PaperModel:
    """What the paper reports of one model. Numbers that it does not print are empty or None.

    Attributes:
      pattern: regular expression of the names that are the model's.
      families: architecture families that stand beside it (`DecoderConfig.family`).
      tables: items that its numbers stand in, by that of the four's; empty for the four.
      bound: Table 8.
      needle: Table 3, by recipe.
      literary: Table 2, by recipe.
      literary_softmax: accuracy of softmax there, where it is printed of the model alone.
      prevalence: Tables 1, 10 and 11.
      digests: known digests of its weights (`Pretrained.sha256`). The paper prints none.
      matched: Tables 5 and 12, by recipe.
      matched_ends: Table 13, by recipe.
      answer_key: Table 14, by recipe.
      sigmoid_safe: Table 15, by recipe.
      head_types: Table 16, counts of heads by K, end of the ranking and type.
      draws: Table 17, by K.
      literary_draws: Table 27, by K.
      head_sets_change: Figure 4, of every set of heads.
      literary_head_sets_change: Figure 3, least and highest of all sets of heads.
      single_heads: Table 26.
      ruler_unsafe: Table 31, by degree.
      over_length: Appendix C, least and highest share of unsafe rows over the length of induction.
      induction: Appendix I, accuracy of softmax by tokens.
    """

    name: str
    pattern: str
    families: tuple[str, ...]
    layers: int | None = None
    heads: int | None = None
    tables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    b_auto: float | None = None
    bound: PaperInterval = PaperInterval()
    needle: Mapping[str, float] = dataclasses.field(default_factory=dict)
    literary: Mapping[str, float] = dataclasses.field(default_factory=dict)
    literary_softmax: float | None = None
    prevalence: tuple[Prevalence, ...] = ()
    digests: tuple[str, ...] = ()
    matched: Mapping[str, Matched] = dataclasses.field(default_factory=dict)
    matched_ends: Mapping[str, MatchedEnds] = dataclasses.field(default_factory=dict)
    answer_key: Mapping[str, AnswerKey] = dataclasses.field(default_factory=dict)
    sigmoid_safe: Mapping[str, float] = dataclasses.field(default_factory=dict)
    head_types: Mapping[int, Mapping[str, Mapping[str, int]]] = dataclasses.field(
        default_factory=dict
    )
    draws: Mapping[int, Draws] = dataclasses.field(default_factory=dict)
    literary_draws: Mapping[int, Draws] = dataclasses.field(default_factory=dict)
    head_sets_change: float | None = None
    literary_head_sets_change: Ends | None = None
    single_heads: int | None = None
    ruler_unsafe: Mapping[int, float] = dataclasses.field(default_factory=dict)
    over_length: Ends | None = None
    induction: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def prevalence_at(self, suite: str, bias_kind: str, length: int) -> Prevalence | None:
        """The row of a suite and bias whose prompts are nearest to `length`, if there is one."""
        rows = [r for r in self.prevalence if (r.suite, r.bias_kind) == (suite, bias_kind)]
        return min(rows, key=lambda row: abs(row.length - length), default=None)

    def needle_accuracy(self, recipe: str) -> float | None:
        """Accuracy on the needle probe; softmax found 200 of 200. None if it was not tried."""
        if recipe == "softmax":
            return 100.0 if self.needle else None
        return 100.0 + self.needle[recipe] if recipe in self.needle else None


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Accuracy of recipes on one suite.

    Attributes:
      item: the table.
      suite: name of the suite here (`suites.named.NAMES`).
      length: tokens of a prompt, as the paper rounds them.
      prompts: number of prompts in a cell.
      accuracy: accuracy by model and recipe, softmax among them.
    """

    item: str
    suite: str
    length: int
    prompts: int
    accuracy: Mapping[str, Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the paper asks some of its models.

    Attributes:
      suite: suite as the settings of an audit name it; "niah" are the needles of its sweep.
      lengths: tokens of a prompt, as the paper rounds them.
      where: sections and tables that say so.
      models: names of these models.
    """

    suite: str
    lengths: tuple[int, ...]
    where: str
    models: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class JudgedClaim:
    """A claim of the paper that each audit is judged by (`studies.paper.claims`).

    Attributes:
      where: section of the paper.
      paper: the paper's own numbers.
      evidence: files of an audit, and what of them, that decide.
      judge: name of the function that judges it on one model.
      over: name of the one that judges it over models; without it the worst verdict counts.
    """

    claim: str
    where: str
    paper: str
    evidence: str
    judge: str
    over: str = ""


@dataclasses.dataclass(frozen=True)
class PaperNumbers:
    """All numbers of `published/polyattn.toml`.

    Attributes:
      fixed_bias: relu^4 at one bias for all models.
      sweep: further suites.
      model: the paper's four models.
      further_model: three more, of which it prints less.
      asked: suites and lengths of each model.
    """

    settings: PaperSettings
    fixed_bias: Sweep
    sweep: tuple[Sweep, ...]
    model: tuple[PaperModel, ...]
    further_model: tuple[PaperModel, ...]
    asked: tuple[Asked, ...]
    judged_claim: tuple[JudgedClaim, ...]


NUMBERS = papers.numbers("polyattn", PaperNumbers)
SETTINGS, MODELS, SWEEPS = NUMBERS.settings, NUMBERS.model, NUMBERS.sweep
# The four, and those that the paper prints less of.
ALL_MODELS = (*MODELS, *NUMBERS.further_model)
DEGREES = tuple(MODELS[0].bound.agree)
# Stands beside a model of no architecture of the paper's.
NO_MODEL = PaperModel(name="", pattern="", families=())


def match(model: str) -> PaperModel | None:
    """The paper's model of this name: that of a folder, or of a repository of the hub.

    The whole name must be that of the paper's model: what is added names other weights (fine-tuned,
    quantised, another file type or revision). The name alone does not verify the weights.
    """
    parts = re.split(r"[/\\]", model.rstrip("/\\"))
    name = parts[-1]
    if len(parts) > 2 and parts[-2] == "snapshots":
        name = parts[-3].rpartition("--")[2]
    return next((m for m in ALL_MODELS if re.fullmatch(m.pattern, name, re.IGNORECASE)), None)


def nearest(family: str | None) -> PaperModel | None:
    """The paper's model of the same architecture family (`DecoderConfig.family`), if any."""
    return next((m for m in MODELS if family in m.families), None)
