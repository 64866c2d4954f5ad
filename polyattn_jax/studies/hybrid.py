"""Which heads may go: the search for a hybrid of a recipe and softmax, `check --hybrid=FILE`.

    iaj polyattn check --model=smollm2 --recipe=relu:p=2,b=auto --text=FILE --hybrid=heads.json

1. Every other text of the user is for the search, the others for the measurement.
2. Single heads: the recipe in one head alone, for each head, and the change of the loss on the
   texts of the search. It ranks the heads; the K that cost most keep softmax.
3. Frontier: the recipe in all other heads, for each K, and in random sets of as many, on the other
   texts and on the needle prompts.
4. A set is accepted where the whole 95 % interval of its change on text (Student's t over texts, 10
   at least) is below `max_loss` nats per token and the verdict on the needle is "preserve". The one
   with the fewest softmax heads is saved.

The accepted set is the best of those tried, so its own interval is a little too good; the texts
that ranked the heads are not among those that it is measured on. Windows of one document that
alternate between the two are not independent, which the page says.
"""

from collections.abc import Mapping
import dataclasses
import os
from pathlib import Path

import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.run.files import write_json, write_text
from lm_jax.run.finished import finish_time, mark_finished
from lm_jax.run.provenance import collect_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.workdir import Resume, open_workdir
from polyattn_jax.audit import (
    audit_suites,
    bias_tables,
    decision,
    head_sets,
    model_calibration,
    opening,
    stages,
    summary,
    units,
)
from polyattn_jax.audit.audit_suites import TEXTS
from polyattn_jax.audit.audited_model import AuditedModel, load
from polyattn_jax.audit.columns import columns
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.hybrid_results import HeadSet, HybridResult, Search, SingleHead
from polyattn_jax.audit.provenance import read_provenance
from polyattn_jax.audit.stages import Condition
from polyattn_jax.recipes.hybrid_recipe import HybridRecipe, replaced_heads
from polyattn_jax.recipes.row_maps import SOFTMAX, parse_recipe, resolve_bias
from polyattn_jax.report import hybrid as page
from polyattn_jax.studies.diagnosis import folder_or_temporary
from polyattn_jax.suites import Suite

RESULT, REPORT = "hybrid.json", "report.html"
FRONTIER = "frontier"


def run(audited: AuditedModel, folder: Path, search: Search) -> HybridResult:
    """Runs or resumes a search in an open work folder."""
    config, cfg = audited.config, audited.model.cfg
    shape = (cfg.num_layers, cfg.num_heads)
    probe = f"niah_{config.sweep_length}"
    suites = {name: s for name, s in audit_suites.build_suites(audited).items() if name == probe}
    texts = audit_suites.texts(audited)
    suites |= split(texts)
    record_provenance(
        folder,
        collect_provenance(
            seeds={"hybrid": config.seed},
            dtype=config.dtype,
            data={"model": audited.model.identity.text} | {n: s.sha256 for n, s in suites.items()},
            tokenizer=audited.tokenizer.sha256,
        ),
    )
    recipe = parse_recipe(config.recipes[0])
    with units.open_stores(folder, opening.fingerprint(audited, suites), config.degrees) as stores:
        b_auto = None
        if recipe.bias == "auto":
            b_auto = model_calibration.calibrated(audited, folder).bias
        calibrated = bias_tables.calibrated(audited, folder, config.by_name, b_auto)
        bias = resolve_bias(recipe, calibrated)

        def conditions(stage: str, masks: Mapping[str, np.ndarray]) -> list[Condition]:
            every = {SOFTMAX.name: np.zeros(shape, bool), **masks}
            return [Condition(stage, name, recipe, bias, mask) for name, mask in every.items()]

        single = {f"{i}": head_sets.mask(np.array([i]), shape) for i in range(shape[0] * shape[1])}
        stages.text_losses(audited, stores, conditions(head_sets.SINGLE, single), suites["search"])
        losses = summary.text_losses(columns(stores.text_losses.read()), head_sets.SINGLE)
        by_cell = {entry.cell: entry.change for entry in losses}
        change = np.array([by_cell[name].estimate for name in single])
        # Ties, and what is not finite, by layer and head; the latter cost most.
        ranking = np.argsort(-np.nan_to_num(change, nan=np.inf), kind="stable")
        sets = head_sets_of(ranking, search)
        masks = {name: ~head_sets.mask(kept, shape) for name, (_, kept) in sets.items()}
        tried = conditions(FRONTIER, masks)
        stages.text_losses(audited, stores, tried, suites["measured"])
        stages.evaluate(audited, stores, tried, {probe: suites[probe]})
        changes = summary.text_losses(columns(stores.text_losses.read()), FRONTIER)
        needles = summary.behaviour(columns(stores.answers.read()), FRONTIER, config)
    text_of, needle_of = {e.cell: e for e in changes}, {e.cell: e for e in needles}
    place = np.empty(len(ranking), int)
    place[ranking] = np.arange(len(ranking))
    frontier = [
        HeadSet(
            kept=len(kept),
            seed=seed,
            text=text_of[name],
            needle=needle_of[name],
            accepted=text_of[name].change.high < search.max_loss
            and needle_of[name].verdict == "preserve",
        )
        for name, (seed, kept) in sets.items()
    ]
    accepted = [entry for entry in frontier if entry.accepted and entry.seed is None]
    best = None
    if accepted:
        entry = min(accepted, key=lambda each: each.kept)
        best = HybridRecipe(
            version=1,
            model=config.model,
            model_sha256=audited.model.identity.text,
            recipe=recipe.spec,
            bias=bias_tables.plain(bias),
            layers=shape[0],
            heads=shape[1],
            replaced=replaced_heads(masks[entry.text.cell]),
        )
    return HybridResult(
        model=config.model,
        provenance=read_provenance(folder, config),
        search=search,
        recipe=recipe.spec,
        bias=bias_tables.plain(bias),
        layers=shape[0],
        heads=shape[1],
        search_texts=len(suites["search"].prompts),
        documents=min(texts.manifest["texts"], len(texts.prompts)),
        singles=tuple(
            SingleHead(i // shape[1], i % shape[1], by_cell[name], int(place[i]))
            for i, name in enumerate(single)
        ),
        softmax=text_of[SOFTMAX.name],
        softmax_needle=needle_of[SOFTMAX.name],
        frontier=tuple(frontier),
        best=best,
    )


def split(texts: Suite) -> dict[str, Suite]:
    """Every other text for the search, and the rest to measure on.

    Raises:
      BadInputError: for so few texts that no interval over those to measure on decides.
    """
    least = 2 * decision.FEWEST
    if len(texts.prompts) < least:
        raise BadInputError(
            f"--text holds {len(texts.prompts)} texts, but the search needs {least}, half of them "
            "to measure on; give more text, or lower --text_length"
        )
    halves = {"search": texts.prompts[0::2], "measured": texts.prompts[1::2]}
    return {name: dataclasses.replace(texts, name=TEXTS, prompts=p) for name, p in halves.items()}


def head_sets_of(ranking: np.ndarray, search: Search) -> dict[str, tuple[int | None, np.ndarray]]:
    """The heads that keep softmax, by cell, with the seed of random ones; fewest first."""
    results: dict[str, tuple[int | None, np.ndarray]] = {}
    for size in sorted({round(share * len(ranking) / 100) for share in search.keep}):
        results[f"but-{size}"] = None, ranking[:size]
        # Without a head to keep there is one set.
        for seed in range(search.draws if size else 0):
            drawn = np.random.RandomState(seed).permutation(len(ranking))[:size]
            results[f"but-random-{size}-{seed}"] = seed, drawn
    return results


def check_target(target: Path) -> None:
    """Refuses a file of heads that could not be written, or would replace another.

    Raises:
      BadInputError: something is at `target`, or it is in no folder.
    """
    if os.path.lexists(target):
        raise BadInputError(f"--hybrid={target} exists; name a file that does not, or remove it")
    if not target.parent.is_dir():
        raise BadInputError(
            f"--hybrid={target}: there is no folder {target.parent}; create it, or name another"
        )


def find(
    config: AuditConfig, search: Search, workdir: Path | None, *, resume: Resume
) -> HybridResult:
    """Runs or resumes `check --hybrid`.

    Raises:
      UsageError: without a text.
    """
    if not config.text:
        raise UsageError("--hybrid measures the loss on texts; name a file, --text=FILE")
    settings = dataclasses.asdict(config) | {"hybrid": dataclasses.asdict(search)}
    with (
        folder_or_temporary(workdir) as folder,
        open_workdir(folder, settings, resume=resume) as work,
    ):
        given = opening.inputs(config)
        if not finish_time(work.path, given):
            result = run(load(config), work.path, search)
            write_json(work.path / RESULT, result)
            write_text(work.path / REPORT, page.build(result))
            mark_finished(work.path, given)
        return load_result(work.path / RESULT, HybridResult)
