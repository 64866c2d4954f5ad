"""Settings of `iaj polyattn paper`: those of an audit, and the models.

A file of an audit's settings, which names its model, is one of this study too (`of_model`).
"""

from collections.abc import Mapping
import dataclasses
from typing import Annotated, Any

from ml_collections import ConfigDict

from lm_jax.report import slug
from lm_jax.run.settings import READS_MODEL, Flag
from polyattn_jax.audit.config import FULL as AUDIT
from polyattn_jax.audit.config import MODES, AuditConfig, experiment
from polyattn_jax.recipes.row_maps import RECIPES
from polyattn_jax.report import findings
from polyattn_jax.studies.audit.settings import AuditSettings

SUITES = (
    *("induction", "copying", "needle", "two_needles", "decoys", "pass_key"),
    *("ruler_paper_single", "ruler_paper_multi"),
)
# At the paper's lengths. The ablation on literary openings is at their last.
AT_LENGTHS = (
    *("induction@256", "induction@1024", "induction@4096", "copying@4096", "copying@500"),
    *("needle@6000", "two_needles@400", "decoys@1500", "pass_key@1500"),
    *("ruler_paper_single@4000", "ruler_paper_multi@4000"),
)
# What the paper measures, as far as it is known and an audit can. The first needles are those of
# the sweep; at the others, only softmax is asked.
FULL: Mapping[str, Any] = {
    **AUDIT,
    "calibration_length": 1024,
    "niah_lengths": (1500, 50, 200, 500),
    "sweep_length": 1500,
    "induction_length": 4096,
    "mqar_length": 4096,
    "recipes": (*RECIPES, *(f"relu:p=4,b={bias}" for bias in range(1, 7))),
    "suites": AT_LENGTHS,
    "suite_recipes": tuple(RECIPES),
    "suite_n": 200,
    "ablation_n": 200,
    "ablation_suites": ("copying",),
    "single_heads": 20,
}
_QUICKSTART: Mapping[str, Any] = {
    **MODES["quickstart"],
    "niah_lengths": (256,),
    "sweep_length": 256,
    "induction_length": 512,
    "mqar_length": 512,
    "recipes": (*RECIPES, "relu:p=4,b=1", "relu:p=4,b=3"),
    "suites": SUITES,
    "suite_recipes": tuple(RECIPES),
    "suite_lengths": (256, 512),
    "suite_n": 10,
    "ablation_heads": (20, 40, 80),
    "ablation_draws": 20,
    "ablation_suites": ("copying",),
    "single_heads": 10,
}
_SMOKE: Mapping[str, Any] = {
    **MODES["smoke"],
    "recipes": ("relu_p4_bauto", "relu_p2_b0", "relu_p1_over_L", "relu:p=4,b=1"),
    "suites": ("induction", "two_needles"),
    "suite_lengths": (64, 96),
    "calibration_length": 64,
    "single_heads": 1,
    "suite_recipes": (),
    "ablation_suites": (),
}


@dataclasses.dataclass(frozen=True)
class PaperConfig(AuditConfig):
    """Everything that decides the result: settings of each audit, and the models.

    Attributes:
      models: models, with commas between them: Hugging Face folders, GGUF files, hub ids, or
        assets.
      model: the only one, in place of `models`, as the file of an audit's settings names it.
    """

    model: Annotated[str, READS_MODEL] = ""
    models: Annotated[tuple[str, ...], Flag(required=True, unless="model")] = ()

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.model and self.models:
            problems.append(
                f"config.model = {self.model!r} names the model, and --models="
                f"{','.join(self.models)} others; leave --models out, or give another --config"
            )
        if len(set(map(slug, self.names))) < len(self.asked):
            problems.append(
                f"--models={','.join(self.models)} has two of one name; give each its own run"
            )
        return problems

    @property
    def asked(self) -> tuple[str, ...]:
        """The models that are audited."""
        return (self.model,) if self.model else self.models

    @property
    def names(self) -> list[str]:
        """Those by their own names."""
        return [findings.own_name(model) for model in self.asked]

    def audit(self, model: str = "") -> AuditSettings:
        """The settings of the audit of one model."""
        names = [field.name for field in dataclasses.fields(AuditSettings)]
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        return AuditSettings(**settings | {"model": model})


def of_model(mode: str, model: str, **settings: Any) -> ConfigDict:
    """The `get_config(mode)` of one of the paper's models, for its audit and for this study.

    Args:
      mode: name of a mode, as in `audit.config.experiment`.
      model: folder of its weights.
      **settings: fields of `AuditConfig` that differ from `FULL` in bfloat16.

    Raises:
      UsageError: as from `experiment`.
    """
    return experiment(mode, model, **{**FULL, "dtype": "bfloat16", **settings})


def quickstart(config: PaperConfig) -> PaperConfig:
    """20 prompts a cell, 10 of each harder suite, at 256 and 512 tokens."""
    return dataclasses.replace(config, **_QUICKSTART)


def smoke(config: PaperConfig) -> PaperConfig:
    """A run that only shows that everything runs."""
    return dataclasses.replace(config, **_SMOKE)
