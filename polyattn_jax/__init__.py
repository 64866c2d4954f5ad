"""Asks, before doing it, whether softmax in a pretrained LM can become a polynomial map.

After "When Does Polynomial Attention Concentrate? A Relative-Margin Diagnostic for Zero-Shot
Softmax Substitution":

    recipes    S_p of score rows, maps that may replace softmax, the bias b_auto, substitution
    suites     prompts with known answers, and their controls
    audit      stages, statistics and results that the studies share
    report     the page of an audit
    studies    commands: audit, check (the verdict alone), distill, the paper's tables

`verdict` decides on any two arrays of right answers; `load_recipe` gives the attend of the heads
that `check --hybrid` found, `load_trained` the heads that `distill` trained; `state_mixer` decodes
with a recipe in all heads in constant memory.
"""

from lm_jax.run.moved import keep_names
from polyattn_jax.audit.decision import Verdict, verdict
from polyattn_jax.recipes.decoding.state_attention import state_mixer
from polyattn_jax.recipes.diagnostic import RowStats, required_degree, row_stats
from polyattn_jax.recipes.hybrid_recipe import load_recipe
from polyattn_jax.recipes.row_maps import RECIPES, parse_recipe
from polyattn_jax.recipes.substitute import recipe, substitute
from polyattn_jax.recipes.trained_heads import TrainedHeads, load_trained

keep_names(
    "polyattn_jax",
    {
        "recipes": "row_maps field_maps feature_maps calibrate linear_state hybrid_recipe fused "
        "diagnostic probe",
        "audit": "bias_tables audit_suites audited_model concentration decision head_sets "
        "head_types measure model_calibration multiple_choice recipe_rows stages suite_answers "
        "summary units schema columns results config",
        "report": "paper",
        "studies": "check feed distill",
        "studies.check": "diagnosis hybrid",
    },
    {
        "condition_results": "audit.results.conditions",
        "hybrid_results": "audit.results.hybrid",
        "matched_results": "audit.results.matched",
        "provenance": "audit.results.provenance",
        "suite_results": "audit.results.suites",
        "matched": "studies.audit.matched",
        "audit.matched": "studies.audit.matched",
        "distill.trained": "recipes.trained_heads",
        "studies.distill.trained": "recipes.trained_heads",
        **{
            f"{earlier}{module}": f"studies.paper{now}"
            for earlier in ("paper_study", "studies.paper_study")
            for module, now in {"": "", ".page": ".report", ".rows": ".numbers"}.items()
        },
        **{
            f"studies.paper.{module}": f"report.{module}"
            for module in ("answer_rows", "beside", "diagnostic_rows")
        },
    },
)

__all__ = [
    "RECIPES",
    "RowStats",
    "TrainedHeads",
    "Verdict",
    "load_recipe",
    "load_trained",
    "parse_recipe",
    "recipe",
    "required_degree",
    "row_stats",
    "state_mixer",
    "substitute",
    "verdict",
]
