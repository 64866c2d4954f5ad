"""Runs the stages of an audit (`polyattn_jax.audit.stages`) and writes their tables.

Besides what every study has, the work folder holds

    rows.parquet     one row per layer, head, query, bias and kind of target (docs/polyattn.md)
    recipe_rows.parquet  one row per layer, head, query and recipe that has an S of its own
    answers.parquet  one row per prompt and cell: the predicted token
    text_losses.parquet  one row per text of yours and cell: its loss
    heads.parquet    one row per head: medians, type, place in the ranking
    suite_answers.parquet  one row per prompt of the named suites and cell: as answers.parquet
    choices/         log-likelihoods of the choices of multiple-choice tasks
    head_sets.parquet  one row per head and set of the ablation
"""

from collections.abc import Sequence
import dataclasses

import numpy as np
import pyarrow as pa

from lm_jax.evaluate.multiple_choice.results import ChoiceTask
from lm_jax.run import processes
from lm_jax.run.files import write_json
from lm_jax.run.tables import write_table
from lm_jax.study import Opened, Work
from polyattn_jax.audit import (
    audit_suites,
    head_sets,
    multiple_choice,
    opening,
    recipe_rows,
    schema,
    stages,
    suite_answers,
    summary,
)
from polyattn_jax.audit.audit_suites import PROMPTS, TEXTS, first_prompts
from polyattn_jax.audit.columns import columns
from polyattn_jax.audit.opening import OpenAudit, open_audit
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.audit.results.provenance import read_provenance
from polyattn_jax.audit.stages import Condition
from polyattn_jax.recipes.calibrate import Calibration
from polyattn_jax.recipes.linear_state import linear_state
from polyattn_jax.recipes.row_maps import Calibrated, resolve_bias
from polyattn_jax.report import findings
from polyattn_jax.studies.audit import numbers
from polyattn_jax.studies.audit.settings import AuditSettings


@dataclasses.dataclass(frozen=True)
class BesideStores:
    """What the stages measured that is in no store of `units.ResultStores`.

    Attributes:
      calibration: b_auto of the model.
      calibrated: every calibrated bias by its name in a recipe.
      answered: results of multiple-choice tasks.
      sets: head sets of the ablation, by name.
    """

    calibration: Calibration
    calibrated: Calibrated
    answered: dict[str, ChoiceTask]
    sets: dict[str, np.ndarray]


def inputs(config: AuditSettings) -> Opened:
    """The model and the files that an audit reads."""
    return opening.opened(config)


def measure(config: AuditSettings, work: Work) -> AuditSummary:
    """Runs or resumes every stage, and writes the tables."""
    with open_audit(config, work) as opened:
        manifests = {name: dict(suite.manifest) for name, suite in opened.suites.items()}
        processes.on_first(lambda: write_json(work.path / "suites.json", manifests))
        return _conclude(opened, _run_stages(opened))


def _run_stages(opened: OpenAudit) -> BesideStores:
    audited, stores, suites = opened.model, opened.stores, opened.suites
    config = audited.config
    calibration = opened.calibrate()
    calibrated = opened.biases(config.with_ablation, calibration.bias)
    stages.control(audited, stores, suites)
    _diagnose(opened, calibration, calibrated)
    answered = _sweep(opened, calibrated)
    sets = _ablate(opened, calibrated) if config.ablation_heads else {}
    return BesideStores(calibration, calibrated, answered, sets)


def _diagnose(opened: OpenAudit, calibration: Calibration, calibrated: Calibrated) -> None:
    audited, stores, suites = opened.model, opened.stores, opened.suites
    config = audited.config
    stages.diagnose(audited, stores, suites, stages.biases(config, calibration.bias))
    own_biases = {
        recipe: resolve_bias(recipe, calibrated)
        for recipe in config.by_name.values()
        if recipe_rows.measured(recipe)
    }
    if own_biases:
        recipe_rows.diagnose(audited, stores, suites, own_biases)
    stages.head_features(audited, stores, suites)


def _sweep(opened: OpenAudit, calibrated: Calibrated) -> dict[str, ChoiceTask]:
    """Every recipe in all heads: needles, prompts and texts of the user, tasks, named suites."""
    audited, stores, suites = opened.model, opened.stores, opened.suites
    config = audited.config

    def conditions(stage: str, chosen: Sequence[str] = ()) -> list[Condition]:
        return stages.sweep_conditions(audited, calibrated, stage, chosen)

    stages.evaluate(audited, stores, conditions("sweep"), {config.probe: suites[config.probe]})
    if PROMPTS in suites:
        stages.evaluate(audited, stores, conditions(PROMPTS), {PROMPTS: suites[PROMPTS]})
    if TEXTS in suites:
        stages.text_losses(audited, stores, conditions(TEXTS), suites[TEXTS])
    answered = multiple_choice.evaluate(
        audited,
        opened.folder,
        conditions(multiple_choice.SCORES),
        multiple_choice.read_questions(config),
    )
    if config.suites:
        suite_answers.evaluate(
            audited,
            stores,
            conditions(suite_answers.STAGE, config.suite_recipes),
            audit_suites.answered(suites, config),
        )
    return answered


def _ablate(opened: OpenAudit, calibrated: Calibrated) -> dict[str, np.ndarray]:
    """One recipe in sets of heads, and in single heads; the sets by name."""
    audited, stores, suites = opened.model, opened.stores, opened.suites
    config, shape = audited.config, audited.shape
    ranking = summary.ranking(summary.heads(columns(stores.rows.read()), shape))
    sets = head_sets.draw(ranking, config.ablation_heads, config.ablation_draws)
    conditions = stages.ablation_conditions(audited, calibrated, sets)
    short = {config.probe: first_prompts(suites[config.probe], config.ablation_n)}
    stages.evaluate(audited, stores, conditions, short)
    if further := suite_answers.ablated(suites, config):
        suite_answers.evaluate(audited, stores, conditions, further)
    if config.single_heads:
        alone = head_sets.singles(ranking, config.single_heads, shape[1])
        conditions = stages.ablation_conditions(audited, calibrated, alone, head_sets.SINGLE)
        stages.evaluate(audited, stores, conditions, short)
        sets |= alone
    return sets


def _conclude(opened: OpenAudit, beside: BesideStores) -> AuditSummary:
    """Writes the tables, and returns the summary of what the stages measured."""
    audited, stores = opened.model, opened.stores
    config, sets, shape = audited.config, beside.sets, audited.shape
    measured = numbers.Tables(
        stores.rows.read(),
        stores.answers.read(),
        stores.losses.read(),
        stores.features.read(),
        stores.text_losses.read(),
    )
    of_suites, own_rows = stores.suite_answers.read(), stores.recipe_rows.read()
    source = numbers.Source(
        audited.model.sha256,
        audited.model.cfg.family,
        tuple(path.name for path in audited.model.files),
        read_provenance(opened.folder, config),
    )
    linear = [
        linear_state(recipe, resolve_bias(recipe, beside.calibrated), audited.model.cfg)
        for recipe in config.by_name.values()
    ]
    result, by_head = numbers.summarise(
        measured,
        beside.calibration,
        config,
        shape,
        source,
        beside.answered,
        suite_answers.results(columns(of_suites), columns(measured.rows), config),
        linear,
        recipe_rows.shares_of_all(columns(own_rows), audited, config.probe),
        suite_answers.ablations(columns(of_suites), config),
    )
    tables = {
        "rows": numbers.with_head_types(measured.rows, by_head),
        "answers": measured.answers,
        "heads": pa.table(by_head),
    }
    if own_rows.num_rows:
        tables["recipe_rows"] = own_rows
    if config.text:
        tables["text_losses"] = measured.text_losses
    if config.suites:
        tables["suite_answers"] = of_suites
    if sets:
        tables["head_sets"] = head_sets.table(sets, shape)

    def write() -> None:
        for name, table in tables.items():
            named = schema.with_model(table, findings.model_name(result))
            write_table(opened.folder / f"{name}.parquet", named, source.provenance)

    processes.on_first(write)
    return result
