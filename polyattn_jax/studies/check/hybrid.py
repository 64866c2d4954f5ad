"""Which heads may go: the search for a hybrid of a recipe and softmax, `check --hybrid=FILE`.

The tasks that a hybrid must keep are those of `--task`, the needle by default; a hybrid of a task
that softmax does not solve is never accepted.

    iaj polyattn check --model=smollm2 --recipe=relu:p=2,b=auto --text=FILE --hybrid=heads.json
    iaj polyattn check --model=smollm2 --recipe=window:w=64,sinks=4 --text=FILE --task=niah \\
        --task=prompts:mine.jsonl --hybrid=heads.json

1. Every other text of the user is for the search, the others for the measurement.
2. Ranking: what it costs to replace one head, by `--rank` (`audit.ranking`); by default the change
   of the loss on the texts of the search with the recipe in this head alone. The K that cost most
   keep softmax. With `--by=kv_head` all heads that read one key head go together, whose cache goes
   only with all of them; with `--by=layer` all heads of a layer. `--rank=task` ranks by prompts of
   the tasks that are held back for it.
3. Frontier: the recipe in all other heads, for each K, and in random sets of as many, on the other
   texts and on the prompts of each task.
4. A set is accepted where the whole 95 % interval of its change on text (Student's t over texts, 10
   at least) is below `max_loss` nats per token, the verdict on every task is "preserve", and its
   state has at most `max_state` percent of the bytes of softmax's cache, if that is not 0. The one
   with the fewest softmax heads is saved.

The accepted set is the best of those tried, so its own interval is a little too good; the texts
that ranked the heads are not among those that it is measured on. Windows of one document that
alternate between the two are not independent, which the page says.
"""

from collections.abc import Mapping
import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.model.config import DecoderConfig
from lm_jax.run.files import write_json
from lm_jax.study import Work
from polyattn_jax.audit import audit_suites, bias_tables, decision, head_sets, ranking
from polyattn_jax.audit.audit_suites import TEXTS
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.opening import OpenAudit, Suites, open_audit
from polyattn_jax.audit.results import HeadSet, HybridResult, Search, SingleHead
from polyattn_jax.audit.results.provenance import read_provenance
from polyattn_jax.audit.stages import Condition
from polyattn_jax.recipes import linear_state
from polyattn_jax.recipes.hybrid_recipe import HybridRecipe, replaced_heads
from polyattn_jax.recipes.row_maps import SOFTMAX, Recipe, parse_recipe, resolve_bias
from polyattn_jax.studies.check import tasks
from polyattn_jax.studies.check.asked import MOST_RANKING, held_for_ranking, ranking_key, required
from polyattn_jax.studies.check.settings import CheckConfig
from polyattn_jax.suites import Suite

HEADS = "heads.json"
FRONTIER = "frontier"
# The two halves of the texts.
SEARCH, MEASURED = "search", "measured"
# Heads that keep softmax by cell, with the seed of random ones.
Sets = dict[str, tuple[int | None, np.ndarray]]


def search(config: CheckConfig, work: Work) -> HybridResult:
    """Runs or resumes a search, and saves the heads that it accepts.

    Raises:
      BadInputError: the file for the heads could not be written, or there are too few texts.
    """
    target = Path(config.hybrid)
    check_target(target, work.path / HEADS)

    asked = tasks.Asked({}, {}, {})

    def suites(audited: AuditedModel) -> Suites:
        nonlocal asked
        by_task = config.rank == "task"
        asked, of_ranking = required(config, audited, more=MOST_RANKING if by_task else 0), {}
        if by_task:
            asked, of_ranking = held_for_ranking(asked, audited.tokenizer)
        return asked.with_controls | of_ranking | split(audit_suites.texts(audited))

    with open_audit(config.audit, work, suites) as opened:
        found = _search(opened, config, asked)
    if found.best is not None:
        # The first tells a resumed search that the second is its own.
        write_json(work.path / HEADS, found.best)
        write_json(target, found.best)
    return found


def check_target(target: Path, own: Path) -> None:
    """Refuses a file of heads that could not be written, or would replace another.

    Args:
      target: file that was asked for.
      own: the same heads in the work folder, where an interrupted search has written both.

    Raises:
      BadInputError: something else is at `target`, or it is in no folder.
    """
    if os.path.lexists(target):
        if own.is_file() and target.is_file() and own.read_bytes() == target.read_bytes():
            return
        raise BadInputError(f"--hybrid={target} exists; name a file that does not, or remove it")
    if not target.parent.is_dir():
        raise BadInputError(
            f"--hybrid={target}: there is no folder {target.parent}; create it, or name another"
        )


@dataclasses.dataclass(frozen=True)
class _Conditions:
    """Maker of conditions with one recipe and bias, each stage with softmax first."""

    recipe: Recipe
    bias: float | np.ndarray
    shape: tuple[int, int]

    def __call__(self, stage: str, masks: Mapping[str, np.ndarray]) -> list[Condition]:
        every = {SOFTMAX.name: np.zeros(self.shape, bool), **masks}
        return [
            Condition(stage, name, self.recipe, self.bias, mask) for name, mask in every.items()
        ]


def _search(opened: OpenAudit, own: CheckConfig, asked: tasks.Asked) -> HybridResult:
    audited, search = opened.model, own.search
    config, shape, cfg = audited.config, audited.shape, audited.model.cfg
    recipe = parse_recipe(config.recipes[0])
    b_auto = opened.calibrate().bias if recipe.bias == "auto" else None
    calibrated = opened.biases(config.by_name, b_auto)
    conditions = _Conditions(recipe, resolve_bias(recipe, calibrated), shape)
    groups = groups_of(cfg, own.by)
    singles, ranked = _rank_heads(opened, own, recipe, conditions.bias, groups)
    sets = head_sets_of(groups[ranked], search)
    masks = {name: ~head_sets.mask(kept, shape) for name, (_, kept) in sets.items()}
    text_of = opened.text_losses(conditions(FRONTIER, masks), MEASURED)
    keys = {task.name: task.key(own.length) for task in own.tasks}
    by_task = {
        name: opened.evaluate(conditions(f"{FRONTIER} {key}", masks), key)
        for name, key in keys.items()
    }
    solved = [
        not tasks.answers_of(
            opened,
            task,
            asked,
            calibrated,
            by_task[task.name][SOFTMAX.name],
            by_task[task.name][SOFTMAX.name],
            length=own.length,
        ).unsolved
        for task in own.tasks
    ]
    kept_of = {
        name: linear_state.kept_state(recipe, conditions.bias, mask, cfg, own.length)
        for name, mask in {SOFTMAX.name: np.zeros(shape, bool), **masks}.items()
    }
    size = jnp.dtype(own.dtype).itemsize
    of_softmax = kept_of[SOFTMAX.name]
    most = search.max_state / 100 * of_softmax.numbers if search.max_state else math.inf
    first, *others = by_task
    needle_of = by_task[first]
    frontier = tuple(
        HeadSet(
            kept=len(kept),
            seed=seed,
            text=text_of[name],
            needle=needle_of[name],
            accepted=text_of[name].change.high < search.max_loss
            and all(solved)
            and kept_of[name].numbers <= most
            and all(answers[name].verdict == "preserve" for answers in by_task.values()),
            others={other: by_task[other][name] for other in others},
            freed=kept_of[name].freed,
            state=kept_of[name].numbers * size,
        )
        for name, (seed, kept) in sets.items()
    )
    best = None
    if accepted := [entry for entry in frontier if entry.accepted and entry.seed is None]:
        fewest = min(accepted, key=lambda entry: entry.kept)
        best = HybridRecipe(
            version=1,
            model=config.model,
            model_sha256=audited.model.identity.text,
            recipe=recipe.spec,
            bias=bias_tables.plain(conditions.bias),
            layers=shape[0],
            heads=shape[1],
            replaced=replaced_heads(masks[fewest.text.cell]),
        )
    texts = audit_suites.texts(audited)
    return HybridResult(
        model=config.model,
        provenance=read_provenance(opened.folder, config),
        search=search,
        recipe=recipe.spec,
        bias=bias_tables.plain(conditions.bias),
        layers=shape[0],
        heads=shape[1],
        search_texts=len(opened.suites[SEARCH].prompts),
        documents=min(texts.manifest["texts"], len(texts.prompts)),
        singles=singles,
        softmax=text_of[SOFTMAX.name],
        softmax_needle=needle_of[SOFTMAX.name],
        frontier=frontier,
        best=best,
        tasks=tuple(by_task),
        softmax_others={other: by_task[other][SOFTMAX.name] for other in others},
        kv_heads=of_softmax.key_heads,
        softmax_state=of_softmax.numbers * size,
    )


def groups_of(cfg: DecoderConfig, by: str) -> np.ndarray:
    """Flat numbers of the heads that are replaced together, one row for each group.

    Args:
      cfg: the model.
      by: "head", "kv_head" for the heads that share a key head, or "layer".
    """
    together = {"head": 1, "kv_head": cfg.num_heads // cfg.num_kv_heads, "layer": cfg.num_heads}
    return np.arange(cfg.num_layers * cfg.num_heads).reshape(-1, together[by])


def _rank_heads(
    opened: OpenAudit, own: CheckConfig, recipe: Recipe, bias: Any, groups: np.ndarray
) -> tuple[tuple[SingleHead, ...], np.ndarray]:
    """What each group costs; the groups by that, most first."""
    if own.rank == "text":
        changes = ranking.text_changes(opened, recipe, bias, groups, SEARCH)
    else:
        changes = [None] * len(groups)
    cost_G = ranking.costs(
        own.rank,
        opened,
        recipe,
        bias,
        groups,
        texts=SEARCH,
        prompts=[ranking_key(task.key(own.length)) for task in own.tasks],
        seed=own.seed,
    )
    if (cost_G == cost_G[0]).all() and len(cost_G) > 1:
        raise BadInputError(
            f"--rank={own.rank} is {cost_G[0]:g} in every group of heads under {recipe.spec}, "
            "which ranks none; rank by output, text or another statistic"
        )
    ranked = ranking.order(cost_G)
    rank_of = np.empty(len(ranked), int)
    rank_of[ranked] = np.arange(len(ranked))
    heads = opened.model.shape[1]
    singles = tuple(
        SingleHead(i // heads, i % heads, changes[at], int(rank_of[at]), float(cost_G[at]))
        for at, group in enumerate(groups)
        for i in group.tolist()
    )
    return singles, ranked


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
    halves = {SEARCH: texts.prompts[0::2], MEASURED: texts.prompts[1::2]}
    return {name: dataclasses.replace(texts, name=TEXTS, prompts=p) for name, p in halves.items()}


def head_sets_of(ranked: np.ndarray, search: Search) -> Sets:
    """The heads that keep softmax, by cell, with the seed of random ones; fewest first.

    Args:
      ranked: flat numbers of the heads by group, those of the group that costs most first.
      search: sizes and draws.
    """
    results: Sets = {}
    in_order = np.sort(ranked[:, 0])
    rows = {first: row for row, first in enumerate(ranked[:, 0].tolist())}
    for size in sorted({round(share * len(ranked) / 100) for share in search.keep}):
        heads = size * ranked.shape[1]
        results[f"but-{heads}"] = None, ranked[:size].ravel()
        # Without a head to keep there is one set.
        for seed in range(search.draws if size else 0):
            drawn = np.random.RandomState(seed).permutation(len(ranked))[:size]
            kept = [ranked[rows[first]] for first in in_order[drawn].tolist()]
            results[f"but-random-{heads}-{seed}"] = seed, np.concatenate(kept)
    return results
