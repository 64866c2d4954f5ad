"""Settings of an audit: the frozen dataclass that a config file is read into.

A file under configs/polyattn/ sets what is specific to its model and calls `experiment`, which adds
the shared settings and the modes.
"""

from collections.abc import Mapping
import dataclasses
from typing import Annotated, Any, Literal

from ml_collections import ConfigDict

from iaj_kernels.row_map_attention.maps import RowMap
from lm_jax.errors import UsageError, nearest
from lm_jax.evaluate.multiple_choice import task_problems
from lm_jax.run.config import LATER
from lm_jax.run.settings import READS_FILE, READS_MODEL, Settings, at_least, between
from polyattn_jax.recipes.probe import DEGREES
from polyattn_jax.recipes.row_maps import RECIPES, Recipe, parse_recipe
from polyattn_jax.suites import named
from polyattn_jax.suites.texts import READS_TEXT, SHORTEST


@dataclasses.dataclass(frozen=True)
class AuditConfig(Settings):
    """Everything that decides the result of an audit.

    Attributes:
      model: a Hugging Face folder, a GGUF file, or a name of iaj fetch --list.
      dtype: dtype of parameters and matrix products; scores and row maps are always float32.
      attention: "kernels" forms no score matrix (iaj_kernels.row_map_attention), "dense" does;
        "auto" takes the kernels on one GPU. The rows are the same but for rounding.
      mesh: sizes of the axes data, fsdp, tensor; one may be -1. (1, 1, 1) is the default device.
      seed: random seed of the suites and of the bootstrap.
      batch_size: number of prompts in one forward pass.
      prompts: a .jsonl file of your own prompts with answers (`suites.load_jsonl`), which are
        diagnosed and evaluated under every recipe, with separate verdicts; empty for none.
      text: a file of your own texts without answers (`suites.load_texts`), or "essays" or
        "speeches", which are diagnosed and whose language-modelling loss is measured under every
        recipe; empty for none.
      text_length: most tokens of a text that are read, as far as the model's context reaches.
      text_n: the first so many texts of the file, or windows of a plain text; 0 for all.
      choices: multiple-choice tasks answered under every recipe, names of
        `lm_jax.evaluate.multiple_choice.TASKS`; empty for none.
      choices_n: the first so many questions of each task; 0 for all.
      truthfulqa: a file of TruthfulQA, whose MC1 is then a further task; empty for none.
      haystack: "essays", "speeches" (manifest entries wiki and sotu), or a text file.
      suites: further suites, names of `suites.named.NAMES`, which are diagnosed and answered under
        every recipe, or `suite_recipes`; empty for none. `NAME@TOKENS` is one at a length of its
        own, as in `two_needles@400`.
      suite_recipes: those of `recipes` that the suites are answered under; empty for all.
      suite_lengths: prompt lengths in tokens of each of them that has no length of its own.
      suite_n: number of prompts of each of them at each length; copying has 54 at most, one of each
        opening.
      niah_lengths: prompt lengths in tokens of the needle suites; each is diagnosed.
      niah_n: number of needle prompts of each length.
      control_n: number of control prompts without the needle, of the first length.
      induction_length: tokens of an induction prompt.
      mqar_length: tokens of an MQAR prompt.
      induction_n: number of induction prompts; 0 leaves the suite out, but the ablation needs it to
        rank the heads.
      mqar_n: number of MQAR prompts; 0 leaves the suite out.
      repeated_n: number of prompts of 100 random tokens written twice, whose loss shows
        induction.
      repeated_vocabulary: those tokens are drawn below this id (frequent merges have low ids).
      calibration_length: tokens of each text that b_auto is calibrated on; 0 takes the length of
        the sweep, since b_auto depends on the length of what is read.
      calibration_text: text that b_auto is calibrated on: a file like `text`, or "essays" or
        "speeches"; empty for the eight texts that come with the package.
      budget: share of the softmax mass allowed below the threshold.
      recipes: names or specs of the recipes to substitute in all heads.
      sweep_length: the needle length they are tried at; one of `niah_lengths`.
      ablation_recipe: what replaces softmax in the ablated heads.
      ablation_heads: the sizes K of the head sets; empty leaves the ablation out.
      ablation_draws: number of random sets of each size, with seeds 0, 1, 2, ...
      ablation_n: number of prompts of each ablation cell, the first of the sweep's needles.
      ablation_suites: names in `suites` on which the same head sets are tried too, at the last of
        the suite's lengths, or as `NAME@TOKENS` at one of them.
      single_heads: number of heads at both ends of the ranking that the ablation also replaces one
        at a time; needs `ablation_heads`.
      top_heads: K of the top-K safe fraction of the verdict.
      tolerance: accuracy that a recipe may lose and still preserve, between 0 and 1.
      resamples: number of resamples of the bootstrap over prompts, at least 100.
      context: most tokens of a prompt; 0 takes the model's context. More than that needs rotary
        positions, and is out of the distribution that the model was trained on.
    """

    model: Annotated[str, READS_MODEL]
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["auto", "dense", "kernels"] = "auto"
    mesh: tuple[int, int, int] = (1, 1, 1)
    seed: int = 0
    batch_size: Annotated[int, at_least(1)] = 1
    prompts: Annotated[str, READS_FILE] = ""
    text: Annotated[str, READS_TEXT] = ""
    text_length: Annotated[int, at_least(SHORTEST)] = 1024
    text_n: Annotated[int, at_least(0)] = 0
    choices: tuple[str, ...] = ()
    choices_n: Annotated[int, at_least(0)] = 200
    truthfulqa: Annotated[str, READS_FILE] = ""
    haystack: Annotated[str, READS_TEXT] = "essays"
    suites: tuple[str, ...] = ()
    suite_recipes: tuple[str, ...] = ()
    suite_lengths: tuple[int, ...] = (256, 512)
    suite_n: Annotated[int, at_least(1)] = 50
    niah_lengths: tuple[int, ...] = (256, 512)
    niah_n: Annotated[int, at_least(1)] = 10
    control_n: Annotated[int, at_least(1)] = 10
    induction_length: int = 256
    induction_n: int = 10
    mqar_length: int = 256
    mqar_n: int = 10
    repeated_n: Annotated[int, at_least(1)] = 4
    repeated_vocabulary: int = 15_000
    calibration_length: Annotated[int, at_least(0)] = 0
    calibration_text: Annotated[str, READS_TEXT] = dataclasses.field(default="", metadata=LATER)
    budget: Annotated[float, between(0, 1)] = 0.05
    recipes: tuple[str, ...] = ("relu_p4_b0", "relu_p4_bauto")
    sweep_length: int = 256
    ablation_recipe: str = "relu_p2_bauto"
    ablation_heads: tuple[int, ...] = ()
    ablation_draws: Annotated[int, at_least(1)] = 20
    ablation_n: Annotated[int, at_least(1)] = 10
    ablation_suites: tuple[str, ...] = ()
    single_heads: Annotated[int, at_least(0)] = 0
    top_heads: Annotated[int, at_least(1)] = 40
    tolerance: Annotated[float, between(0, 1)] = 0.05
    resamples: Annotated[int, at_least(100)] = 1000
    context: Annotated[int, at_least(0)] = dataclasses.field(default=0, metadata=LATER)

    def problems(self) -> list[str]:
        specs: dict[str, dict[str, None]] = {}
        for recipe in map(parse_recipe, (*self.recipes, self.ablation_recipe)):
            specs.setdefault(recipe.name, {})[recipe.spec] = None
        problems = [
            f"config.recipes: {' and '.join(own)} are both named {name} in the results; give their "
            "files different names"
            for name, own in specs.items()
            if len(own) > 1
        ]
        problems += task_problems("config.choices", self.choices)
        problems += named.problems("config.suites", self.suites, self.suite_lengths)
        if len(set(self.suite_lengths)) < len(self.suite_lengths):
            problems.append(f"config.suite_lengths = {self.suite_lengths} has a length twice")
        without = [one for one in self.suites if named.read_entry(one)[1] is None]
        if without and not self.suite_lengths:
            problems.append(
                f"config.suite_lengths = () leaves {', '.join(without)} of config.suites without "
                f"prompts; set it, or write {without[0]}@TOKENS"
            )
        problems += [
            f"config.suite_recipes has {name!r}, which is not in config.recipes; add it there"
            for name in self.suite_recipes
            if name not in self.recipes
        ]
        problems += [
            f"config.ablation_suites has {entry!r}, which is not in config.suites; add it there"
            for entry in self.ablation_suites
            if not self._asked_as(entry)
        ]
        ablated = [one[-1] for one in map(self._asked_as, self.ablation_suites) if one]
        if len(set(ablated)) < len(ablated):
            problems.append(
                f"config.ablation_suites = {self.ablation_suites} names a suite and length twice; "
                "name each once"
            )
        problems += [
            f"config.{name} needs config.ablation_heads; set them"
            for name in ("ablation_suites", "single_heads")
            if getattr(self, name) and not self.ablation_heads
        ]
        if self.sweep_length not in self.niah_lengths:
            problems.append(
                f"config.sweep_length = {self.sweep_length} is not in config.niah_lengths = "
                f"{self.niah_lengths}; add it there"
            )
        if self.attention == "kernels":
            problems += [
                f"config.attention = 'kernels', but no kernel computes {text!r}; set it to 'dense'"
                for text in (*self.recipes, self.ablation_recipe)
                if not isinstance(parse_recipe(text).map, RowMap)
            ]
        if self.ablation_heads and self.induction_n < 1:
            problems.append(
                "config.induction_n = 0, but the ablation ranks heads on induction; "
                "set it to 1 or more, or config.ablation_heads to ()"
            )
        return problems

    @property
    def degrees(self) -> tuple[int | float, ...]:
        """The degrees of S_p that are measured: the paper's, and those of the recipes."""
        own = [r.degree for r in self.by_name.values() if r.degree is not None]
        return tuple(sorted({*DEGREES, *own}))

    @property
    def asked_suites(self) -> tuple[tuple[str, int], ...]:
        """Name and tokens of every suite of `suites`, in order."""
        return named.at_lengths(self.suites, self.suite_lengths)

    @property
    def ablated_suites(self) -> tuple[tuple[str, int], ...]:
        """Name and tokens of every suite of `ablation_suites`, in order."""
        return tuple(self._asked_as(entry)[-1] for entry in self.ablation_suites)

    def _asked_as(self, entry: str) -> list[tuple[str, int]]:
        """What an entry of `ablation_suites` may mean: those of its name, or of its length too."""
        name, length = named.read_entry(entry)
        same = [one for one in self.asked_suites if one[0] == name]
        return same if length is None else [one for one in same if one[1] == length]

    @property
    def calibrated_at(self) -> int:
        """The length that b_auto is calibrated at."""
        return self.calibration_length or self.sweep_length

    @property
    def probe(self) -> str:
        """The needle suite on which recipes are tried."""
        return named.key("niah", self.sweep_length)

    @property
    def one_document(self) -> bool:
        """Whether the texts are windows of one plain text, which count as one."""
        return bool(self.text) and not self.text.endswith(".jsonl")

    @property
    def by_name(self) -> dict[str, Recipe]:
        """The recipes by the name that `answers.parquet` gives them."""
        return {recipe.name: recipe for recipe in map(parse_recipe, self.recipes)}

    @property
    def with_ablation(self) -> dict[str, Recipe]:
        """The recipes by name, that of the ablation among them."""
        ablated = parse_recipe(self.ablation_recipe)
        return self.by_name | {ablated.name: ablated}


# What experiments share: the paper's 14 recipes, group sizes, draws and numbers of prompts.
FULL: Mapping[str, Any] = {
    "niah_n": 200,
    "control_n": 50,
    "induction_n": 200,
    "mqar_n": 200,
    "repeated_n": 20,
    "recipes": tuple(RECIPES),
    "ablation_heads": (5, 10, 20, 40, 80),
    "ablation_draws": 20,
    "ablation_n": 100,
}
# One recipe of each kind, and one size of head sets.
_QUICKSTART: Mapping[str, Any] = {
    "batch_size": 1,
    "calibration_length": 0,
    "niah_lengths": (128,),
    "niah_n": 20,
    "control_n": 10,
    "induction_length": 128,
    "induction_n": 10,
    "mqar_length": 128,
    "mqar_n": 0,
    "repeated_n": 10,
    "recipes": ("relu_p2_bauto", "relu_p4_bauto", "sigmoid_bauto", "relu_p2_over_L"),
    # Those of an experiment, which are long.
    "suites": (),
    "suite_recipes": (),
    "ablation_suites": (),
    "single_heads": 0,
    "sweep_length": 128,
    "ablation_heads": (40,),
    "ablation_draws": 2,
    "ablation_n": 10,
}
_SMOKE: Mapping[str, Any] = {
    **_QUICKSTART,
    "niah_lengths": (64,),
    "niah_n": 2,
    "control_n": 2,
    "induction_length": 64,
    "induction_n": 2,
    "mqar_length": 64,
    "mqar_n": 2,
    "repeated_n": 1,
    "recipes": ("relu_p4_bauto",),
    "sweep_length": 64,
    "ablation_heads": (20,),
    "ablation_n": 2,
    "choices_n": 2,
    "suite_lengths": (64,),
    "suite_n": 2,
    "resamples": 100,
}
MODES: Mapping[str, Mapping[str, Any]] = {"": {}, "quickstart": _QUICKSTART, "smoke": _SMOKE}


def experiment(mode: str, model: str, **settings: Any) -> ConfigDict:
    """The `get_config(mode)` of one model.

    Args:
      mode: name of the mode: "" for the whole audit; "quickstart" for one that two CPU cores finish
        within minutes on a model of 135 M parameters; "smoke" for one that only shows that
        everything runs.
      model: the same as in `AuditConfig`.
      **settings: fields of `AuditConfig` that differ from what experiments share. A mode overrides
        them in turn.

    Raises:
      UsageError: for an unknown mode, or settings that `AuditConfig` refuses.
    """
    if mode not in MODES:
        raise UsageError(f"mode {mode!r} is not one of an audit{nearest(mode, MODES)}")
    config = AuditConfig(model=model, **{**FULL, **settings, **MODES[mode]})
    return ConfigDict(dataclasses.asdict(config))
