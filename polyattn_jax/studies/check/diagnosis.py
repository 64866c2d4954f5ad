"""Diagnosis of score rows on texts of a user, without any substitution: `check --diagnose`.

    iaj polyattn check --model=smollm2 --text=FILE --diagnose

One forward pass with softmax gives S_p of the rows of 16 positions of each text in every layer and
head, S of softmax on the same rows, and by how much the map would change the head's output. Rows
are read at b = 0 and at the recipe's bias; b_auto is calibrated first, on the shipped texts. Where
each head has a bias of its own, or a recipe reads no scores, they are read at b = 0 alone. The
screen warns and promises nothing: only `check` without `--diagnose` substitutes.
"""

from lm_jax.study import Work
from polyattn_jax.audit import audit_suites, concentration, stages
from polyattn_jax.audit.audit_suites import TEXTS
from polyattn_jax.audit.columns import columns, degrees
from polyattn_jax.audit.opening import open_audit
from polyattn_jax.audit.results.provenance import read_provenance
from polyattn_jax.recipes.row_maps import DISTANCE, parse_recipe
from polyattn_jax.studies.check.numbers import by_head
from polyattn_jax.studies.check.results import DiagnosisResult
from polyattn_jax.studies.check.settings import CheckConfig


def measure(check: CheckConfig, work: Work) -> DiagnosisResult:
    """Diagnoses the texts, or resumes it."""
    recipe = parse_recipe(check.recipe)
    biases, calibration = {"zero": 0.0}, None
    with open_audit(check.audit, work, lambda model: {TEXTS: audit_suites.texts(model)}) as opened:
        audited, suite = opened.model, opened.suites[TEXTS]
        config = audited.config
        if recipe.bias == "auto":
            calibration = opened.calibrate()
            biases["auto"] = calibration.bias
        elif not isinstance(recipe.bias, str) and recipe.option != DISTANCE:
            biases[recipe.bias_kind] = recipe.bias
        stages.diagnose(audited, opened.stores, {TEXTS: suite}, biases)
        rows = columns(opened.stores.rows.read())
    return DiagnosisResult(
        model=config.model,
        provenance=read_provenance(work.path, config),
        recipe=recipe.spec,
        degree=recipe.degree,
        calibration=calibration,
        texts=len(suite.prompts),
        documents=1 if config.one_document else len(suite.prompts),
        tokens=sum(len(prompt.tokens) for prompt in suite.prompts),
        degrees=degrees(rows),
        prevalence=concentration.prevalence(rows, config),
        against_softmax=concentration.against_softmax(rows, config),
        heads=by_head(rows),
    )
