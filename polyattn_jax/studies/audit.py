"""Audits a pretrained language model: may its softmax be replaced by a polynomial map?

    iaj polyattn audit --config=polyattn/smollm2:quickstart --workdir=runs/audit
    iaj polyattn audit --config=polyattn/smollm2 --config.model=FOLDER --workdir=runs/mine

The stages are those of `stages.py`. The work folder then holds

    rows.parquet     one row per layer, head, query, bias, kind of target (docs/polyattn/files.md)
    recipe_rows.parquet  one row per layer, head, query and recipe that has an S of its own
    answers.parquet  one row per prompt and cell: the predicted token
    text_losses.parquet  one row per text of yours and cell: its loss
    heads.parquet    one row per head: medians, type, place in the ranking
    suite_answers.parquet  one row per prompt of the named suites and cell: as answers.parquet
    choices/         log-likelihoods of the choices of multiple-choice tasks
    head_sets.parquet  one row per head and set of the ablation
    summary.json     every number of the report
    report.html      the report, one offline file

The same command resumes a killed audit, which then ends with the same summary. Several processes
(`--coordinator`, `lm_jax.run.processes`) share out the prompts, each with a copy of the model on
devices of its own; process 0 writes the results, which are those of one process.
"""

import dataclasses
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import pyarrow as pa

import lm_jax
from lm_jax.evaluate.multiple_choice.results import ChoiceTask
from lm_jax.parallel import sharding
from lm_jax.run import cli, processes
from lm_jax.run.config import canonical_json, config_hash, from_plain
from lm_jax.run.files import write_json, write_text
from lm_jax.run.finished import Inputs, file_inputs, finish_time, is_finished, mark_finished
from lm_jax.run.provenance import collect_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.tables import write_table
from lm_jax.run.workdir import Resume
from lm_jax.weights import hub
from lm_jax.weights.load import identities, resolve
from polyattn_jax.audit import (
    audit_suites,
    bias_tables,
    head_sets,
    model_calibration,
    multiple_choice,
    recipe_rows,
    schema,
    stages,
    suite_answers,
    summary,
    units,
)
from polyattn_jax.audit.audit_suites import PROMPTS, TEXTS, build_suites, first_prompts
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.columns import columns
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.provenance import read_provenance
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.recipes.calibrate import Calibration
from polyattn_jax.recipes.linear_state import linear_state
from polyattn_jax.recipes.row_maps import resolve_bias
from polyattn_jax.report import findings, page, terminal
from polyattn_jax.suites import Suite, read_jsonl, read_texts
from polyattn_jax.suites.texts import SHIPPED

SUMMARY, REPORT = "summary.json", "report.html"


@dataclasses.dataclass(frozen=True)
class BesideStores:
    """What the stages measured that is in no store of `units.ResultStores`.

    Attributes:
      calibration: of the model.
      calibrated: every calibrated bias by its name in a recipe.
      answered: multiple-choice tasks.
      sets: head sets of the ablation, by name.
    """

    calibration: Calibration
    calibrated: dict[str, Any]
    answered: dict[str, ChoiceTask]
    sets: dict[str, np.ndarray]


def load(config: AuditConfig) -> AuditedModel:
    """Loads the model onto the device of this process, or onto a mesh of its devices."""
    mesh = None
    if config.mesh != (1, 1, 1):
        data, fsdp, tensor = config.mesh
        own = jax.local_devices()
        mesh = sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=own)
    model = lm_jax.load_pretrained(config.model, dtype=jnp.dtype(config.dtype), mesh=mesh)
    return AuditedModel(model, mesh, config)


def fingerprint(audited: AuditedModel, suites: dict[str, Suite]) -> str:
    """Hash of everything that determines the rows: settings, model, suites."""
    identity: dict[str, Any] = {
        "config": canonical_json(audited.config),
        "model": audited.model.identity.text,
        "suites": {name: suite.sha256 for name, suite in suites.items()},
    }
    if biases := bias_tables.digests(audited.config.with_ablation):
        identity["biases"] = biases
    return config_hash(identity)


def run(audited: AuditedModel, folder: Path) -> None:
    """Runs or resumes every stage in an open work folder, and writes the results."""
    config = audited.config
    suites = build_suites(audited)
    processes.on_first(lambda: _begin(audited, folder, suites))
    shape = (audited.model.cfg.num_layers, audited.model.cfg.num_heads)
    probe = f"niah_{config.sweep_length}"
    swept = suites[probe]
    identity = fingerprint(audited, suites)
    with units.open_stores(folder, identity, config.degrees) as stores:
        calibration = model_calibration.calibrated(audited, folder)
        calibrated = bias_tables.calibrated(audited, folder, config.with_ablation, calibration.bias)
        stages.control(audited, stores, suites)
        stages.diagnose(audited, stores, suites, stages.biases(config, calibration.bias))
        own_biases = {
            recipe: resolve_bias(recipe, calibrated)
            for recipe in config.by_name.values()
            if recipe_rows.measured(recipe)
        }
        if own_biases:
            recipe_rows.diagnose(audited, stores, suites, own_biases)
        stages.head_features(audited, stores, suites)
        sweep = stages.sweep_conditions(audited, calibrated)
        stages.evaluate(audited, stores, sweep, {probe: swept})
        if PROMPTS in suites:
            conditions = stages.sweep_conditions(audited, calibrated, PROMPTS)
            stages.evaluate(audited, stores, conditions, {PROMPTS: suites[PROMPTS]})
        if TEXTS in suites:
            conditions = stages.sweep_conditions(audited, calibrated, TEXTS)
            stages.text_losses(audited, stores, conditions, suites[TEXTS])
        answered = multiple_choice.evaluate(
            audited,
            folder,
            stages.sweep_conditions(audited, calibrated, multiple_choice.SCORES),
            multiple_choice.read_questions(config),
        )
        if config.suites:
            conditions = stages.sweep_conditions(
                audited, calibrated, suite_answers.STAGE, config.suite_recipes
            )
            answered_suites = audit_suites.answered(suites, config)
            suite_answers.evaluate(audited, stores, conditions, answered_suites)
        sets = {}
        if config.ablation_heads:
            by_head = summary.heads(columns(stores.rows.read()), shape)
            ranking = summary.ranking(by_head)
            sets = head_sets.draw(ranking, config.ablation_heads, config.ablation_draws)
            conditions = stages.ablation_conditions(audited, calibrated, sets)
            short = first_prompts(swept, config.ablation_n)
            stages.evaluate(audited, stores, conditions, {probe: short})
            if further := suite_answers.ablated(suites, config):
                suite_answers.evaluate(audited, stores, conditions, further)
            if config.single_heads:
                alone = head_sets.singles(ranking, config.single_heads, shape[1])
                conditions = stages.ablation_conditions(
                    audited, calibrated, alone, head_sets.SINGLE
                )
                stages.evaluate(audited, stores, conditions, {probe: short})
                sets |= alone
        beside = BesideStores(calibration, calibrated, answered, sets)
        processes.on_first(lambda: _conclude(audited, folder, stores, beside))


def _begin(audited: AuditedModel, folder: Path, suites: dict[str, Suite]) -> None:
    config = audited.config
    record_provenance(
        folder,
        collect_provenance(
            seeds={"audit": config.seed},
            dtype=config.dtype,
            data=hub.identity("model", audited.model.identity.text, audited.model.revision)
            | {n: s.sha256 for n, s in suites.items()},
            tokenizer=audited.tokenizer.sha256,
        ),
    )
    write_json(folder / "suites.json", {name: dict(s.manifest) for name, s in suites.items()})


def _conclude(
    audited: AuditedModel,
    folder: Path,
    stores: units.ResultStores,
    beside: BesideStores,
) -> None:
    """Writes the tables, the summary and the report from what the stages measured."""
    config, sets = audited.config, beside.sets
    shape = (audited.model.cfg.num_layers, audited.model.cfg.num_heads)
    measured = summary.Tables(
        stores.rows.read(),
        stores.answers.read(),
        stores.losses.read(),
        stores.features.read(),
        stores.text_losses.read(),
    )
    of_suites, own_rows = stores.suite_answers.read(), stores.recipe_rows.read()
    by_suite = suite_answers.results(columns(of_suites), columns(measured.rows), config)
    source = summary.Source(
        audited.model.sha256,
        audited.model.cfg.family,
        tuple(path.name for path in audited.model.files),
        read_provenance(folder, config),
    )
    linear = [
        linear_state(recipe, resolve_bias(recipe, beside.calibrated), audited.model.cfg)
        for recipe in config.by_name.values()
    ]
    probe = f"niah_{config.sweep_length}"
    own_shares = recipe_rows.shares_of_all(columns(own_rows), audited, probe)
    result, by_head = summary.summarise(
        measured,
        beside.calibration,
        config,
        shape,
        source,
        beside.answered,
        by_suite,
        linear,
        own_shares,
        suite_answers.ablations(columns(of_suites), config),
    )
    rows = summary.with_head_types(measured.rows, by_head)
    tables = {"rows": rows, "answers": measured.answers, "heads": pa.table(by_head)}
    if own_rows.num_rows:
        tables["recipe_rows"] = own_rows
    if config.text:
        tables["text_losses"] = measured.text_losses
    if config.suites:
        tables["suite_answers"] = of_suites
    if sets:
        tables["head_sets"] = head_sets.table(sets, shape)
    for name, table in tables.items():
        named = schema.with_model(table, findings.model_name(result))
        write_table(folder / f"{name}.parquet", named, source.provenance)
    write_json(folder / SUMMARY, result)
    write_text(folder / REPORT, page.build(result, rows, by_head))


def check_inputs(config: AuditConfig) -> None:
    """Reads all that an audit needs but the weights.

    A mistyped path must not claim the work folder, nor a model be loaded for faulty prompts.

    Raises:
      BadInputError: the model or a file is not there, or cannot be read.
    """
    resolve(config.model)
    if config.prompts:
        read_jsonl(config.prompts)
    if config.text:
        read_texts(config.text)
    multiple_choice.read_questions(config)


def inputs(config: AuditConfig) -> Inputs:
    """The model and the files that an audit, check or search of these settings reads.

    Raises:
      BadInputError: the model or a file cannot be read.
    """
    biases = [recipe.bias for recipe in config.with_ablation.values() if recipe.tabled]
    return identities({"model": config.model}) | file_inputs(
        {
            "config.prompts": config.prompts,
            "config.text": config.text,
            "config.truthfulqa": config.truthfulqa,
            "config.haystack": "" if config.haystack in SHIPPED else config.haystack,
            **{f"biases {name}": str(name) for name in biases},
        }
    )


def run_in(
    config: ConfigDict | AuditConfig, folder: Path, *, resume: Resume = "auto"
) -> AuditSummary:
    """Runs or resumes an audit in a work folder unless it is finished; returns its summary.

    Args:
      config: of `AuditConfig`.
      folder: the work folder, created if needed.
      resume: when to resume, as `open_workdir` takes it.
    """
    settled = config if isinstance(config, AuditConfig) else from_plain(config, AuditConfig)
    # What was finished is shown, though a file of it is gone.
    if not is_finished(folder.expanduser()):
        check_inputs(settled)
    with processes.open_shared_workdir(folder, config, resume=resume) as workdir:
        given = inputs(settled)
        done = finish_time(workdir, given)
        if not done:
            run(load(settled), workdir)
            processes.on_first(lambda: mark_finished(workdir, given))
        elif processes.is_first():
            print(f"finished {done}")
        return load_result(workdir / SUMMARY, AuditSummary)


def main(arguments: cli.Arguments) -> None:
    """The command."""
    result = run_in(cast(ConfigDict, arguments.config), arguments.folder, resume=arguments.resume)
    if processes.is_first():
        report = arguments.folder.expanduser().absolute() / REPORT
        terminal.print_summary(result, report=report)


if __name__ == "__main__":
    cli.app(main, config="polyattn/smollm2", config_class=AuditConfig, distributed=True)
