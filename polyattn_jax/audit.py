"""Audits a pretrained language model: may its softmax be replaced by a polynomial map?

    iaj polyattn audit --config=polyattn/smollm2:quickstart --workdir=runs/quickstart
    iaj polyattn audit --config=polyattn/smollm2 --config.model=FOLDER --workdir=runs/mine

The stages are those of `stages.py`. The work folder then holds

    rows.parquet     one row per layer, head, query, bias and kind of target (docs/polyattn.md)
    recipe_rows.parquet  one row per layer, head, query and recipe that has an S of its own
    answers.parquet  one row per prompt and cell: the predicted token
    text_losses.parquet  one row per text of yours and cell: its loss
    heads.parquet    one row per head: medians, type, place in the ranking
    suite_answers.parquet  one row per prompt of the named suites and cell: as answers.parquet
    choices/         log-likelihoods of the choices of multiple-choice tasks
    head_sets.parquet  one row per head and set of the ablation
    summary.json     every number of the report
    report.html      the report, one offline file

The same command resumes a killed audit, which then ends with the same summary.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pyarrow as pa
import pyarrow.parquet as pq

import lm_jax
from lm_jax.parallel import sharding
from lm_jax.run import cli
from lm_jax.run.config import canonical_json, config_hash, from_plain
from lm_jax.run.files import replace_file, write_json, write_text
from lm_jax.run.provenance import collect_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.workdir import finish_time, mark_finished, open_workdir
from lm_jax.weights import hub
from lm_jax.weights.load import resolve
from polyattn_jax import (
    audit_suites,
    bias_tables,
    head_sets,
    multiple_choice,
    recipe_rows,
    schema,
    stages,
    suite_answers,
    summary,
)
from polyattn_jax.audit_suites import PROMPTS, TEXTS, build_suites, first_prompts
from polyattn_jax.audited_model import AuditedModel
from polyattn_jax.columns import columns
from polyattn_jax.config import AuditConfig
from polyattn_jax.linear_state import linear_state
from polyattn_jax.provenance import read_provenance
from polyattn_jax.report import findings, page, terminal
from polyattn_jax.results import AuditSummary
from polyattn_jax.row_maps import parse_recipe, resolve_bias
from polyattn_jax.suites import Suite, read_jsonl, read_texts

SUMMARY, REPORT = "summary.json", "report.html"


def load(config: AuditConfig) -> AuditedModel:
    """Loads the model onto its device or mesh."""
    mesh = None
    if config.mesh != (1, 1, 1):
        data, fsdp, tensor = config.mesh
        mesh = sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    model = lm_jax.load_pretrained(config.model, dtype=jnp.dtype(config.dtype), mesh=mesh)
    return AuditedModel(model, mesh, config)


def fingerprint(audited: AuditedModel, suites: dict[str, Suite]) -> str:
    """Hash of everything that determines the rows: settings, model, suites."""
    identity: dict[str, Any] = {
        "config": canonical_json(audited.config),
        "model": audited.model.sha256,
        "suites": {name: suite.sha256 for name, suite in suites.items()},
    }
    if biases := bias_tables.digests(audited.config.by_name):
        identity["biases"] = biases
    return config_hash(identity)


def run(audited: AuditedModel, folder: Path) -> AuditSummary:
    """Runs or resumes every stage in an open work folder and returns the summary."""
    config = audited.config
    suites = build_suites(audited)
    record_provenance(
        folder,
        collect_provenance(
            seeds={"audit": config.seed},
            dtype=config.dtype,
            data=hub.identity("model", audited.model.sha256, audited.model.revision)
            | {n: s.sha256 for n, s in suites.items()},
            tokenizer=audited.tokenizer.sha256,
        ),
    )
    write_json(folder / "suites.json", {name: dict(s.manifest) for name, s in suites.items()})
    shape = (audited.model.cfg.num_layers, audited.model.cfg.num_heads)
    probe = f"niah_{config.sweep_length}"
    swept = suites[probe]
    identity = fingerprint(audited, suites)
    with stages.open_stores(folder, identity, config.degrees) as stores:
        calibration = stages.calibrated(audited, folder)
        named = config.by_name | {"ablation": parse_recipe(config.ablation_recipe)}
        calibrated = bias_tables.calibrated(audited, folder, named, calibration.bias)
        stages.control(audited, stores, suites)
        stages.diagnose(audited, stores, suites, stages.biases(config, calibration.bias))
        own_rows = recipe_rows.diagnose(
            audited,
            folder,
            identity,
            suites,
            {
                recipe: resolve_bias(recipe, calibrated)
                for recipe in config.by_name.values()
                if recipe_rows.measured(recipe)
            },
        )
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
            conditions = stages.sweep_conditions(audited, calibrated, suite_answers.STAGE)
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
        measured = summary.Tables(
            stores.rows.read(),
            stores.answers.read(),
            stores.losses.read(),
            stores.features.read(),
            stores.text_losses.read(),
        )
        of_suites = stores.suite_answers.read()
    by_suite = suite_answers.results(columns(of_suites), columns(measured.rows), config)
    source = summary.Source(
        audited.model.sha256,
        audited.model.cfg.family,
        tuple(path.name for path in audited.model.files),
        read_provenance(folder, config),
    )
    linear = [
        linear_state(recipe, resolve_bias(recipe, calibrated), audited.model.cfg)
        for recipe in config.by_name.values()
    ]
    own_shares = recipe_rows.shares_of_all(columns(own_rows), audited, probe)
    result, by_head = summary.summarise(
        measured, calibration, config, shape, source, answered, by_suite, linear, own_shares
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
        tagged = schema.tagged(table, findings.model_name(result), source.provenance)
        write_table(folder / f"{name}.parquet", tagged)
    write_json(folder / SUMMARY, result)
    write_text(folder / REPORT, page.build(result, rows, by_head))
    return result


def write_table(path: Path, table: pa.Table) -> None:
    """Writes one parquet file, whole or not at all."""
    with replace_file(path) as file:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = from_plain(arguments.config, AuditConfig)
    # A mistyped path must not claim the work folder, nor a model be loaded for faulty prompts.
    resolve(config.model)
    if config.prompts:
        read_jsonl(config.prompts)
    if config.text:
        read_texts(config.text)
    multiple_choice.read_questions(config)
    with open_workdir(arguments.folder, arguments.config, resume=arguments.resume) as work:
        if done := finish_time(work.path):
            print(f"finished {done}")
        else:
            run(load(config), work.path)
            mark_finished(work.path)
        result = load_result(work.path / SUMMARY, AuditSummary)
        terminal.print_summary(result, report=work.path / REPORT)


if __name__ == "__main__":
    cli.app(main, config="polyattn/smollm2", config_class=AuditConfig)
