"""Ranks groups of heads, trains hybrids of the ranked and of random sets, and measures them.

Besides what every study has, the work folder holds

    data/             the prepared corpus
    calibration.json  b_auto, where the recipe asks for it
    ranking/          rows of the statistics, by stage
    costs.parquet     one row per statistic and group (`results.COSTS`)
    heads_SEED/       checkpoints of the first stage, of all heads
    shards/           rows of the sets that are done
    sets.parquet      one row per set (`results.SETS`)

The first stage trains every head on the frozen model's stream, where no layer depends on another
(but for the clip of the gradient's norm); so one training of all heads serves every set. Heads of a
layer share weights there: one factor of the adapters, or W of a key head. The second stage is of
each set.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from lm_jax.errors import BadInputError, UsageError
from lm_jax.evaluate.samples import sampled_inputs
from lm_jax.model import params as params_lib
from lm_jax.model.params import ParamTree
from lm_jax.run.files import make_folder
from lm_jax.run.finished import Inputs, file_inputs
from lm_jax.run.rows import Unit
from lm_jax.run.tables import write_table
from lm_jax.study import Work
from lm_jax.text.examples import IGNORE_INDEX, Examples
from lm_jax.weights import hub
from lm_jax.weights.load import identities
from polyattn_jax.audit import decision, head_sets, ranking, units
from polyattn_jax.audit.audited_model import AuditedModel, model_identity
from polyattn_jax.audit.opening import OpenAudit, Suites, fingerprint
from polyattn_jax.audit.results.provenance import read_provenance
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.studies.check import tasks
from polyattn_jax.studies.check.asked import held_for_ranking, ranking_key
from polyattn_jax.studies.check.hybrid import groups_of
from polyattn_jax.studies.distill.matching import GivenHeads, LogitMatching, Matching
from polyattn_jax.studies.distill.run import train_heads, train_logits
from polyattn_jax.studies.distill.task import Task, logits_of, objective_of, open_task
from polyattn_jax.studies.rankings import numbers
from polyattn_jax.studies.rankings.results import COSTS, SETS, STAGES, RankingsSummary
from polyattn_jax.studies.rankings.scored import Scored
from polyattn_jax.studies.rankings.settings import RankingsConfig
from polyattn_jax.suites import Suite
from polyattn_jax.suites.texts import of_windows

RANKING, MEASURED = "ranking", "measured"


def inputs(config: RankingsConfig) -> Inputs:
    """The model and the text."""
    own = {"config.task": config.asked.source} if config.asked.kind == "prompts" else {}
    return {
        **identities({"model": config.model}, model_identity),
        **file_inputs(own),
        **sampled_inputs(config.corpus),
    }


@dataclasses.dataclass(frozen=True)
class Chosen:
    """One set: which groups are replaced, of which size and seed, and what chose it."""

    seed: int
    replaced: float
    groups: tuple[int, ...]
    chosen_by: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name that no other set of the seed and size has."""
        return "-".join(map(str, self.groups))


def measure_all(config: RankingsConfig, work: Work) -> RankingsSummary:
    """Trains and measures or resumes all sets."""
    task = open_task(config.distill(config.seeds[0]), work.path)
    manifest = task.prepared.manifest
    work.record(
        data=hub.identity("model", task.base.identity.text, task.base.revision)
        | {"documents": manifest["documents_sha256"]}
        | dict(manifest["sources"]),
        tokenizer=manifest["tokenizer_sha256"],
    )
    heads = objective_of(task, work.path)
    mesh = task.mesh if task.mesh.size > 1 else None
    audited = AuditedModel(task.base, mesh, config.audit)
    suites, answers = _suites(config, task, audited)
    groups = groups_of(task.base.cfg, config.by)
    sizes = [size_of(share, len(groups)) for share in config.replaced]
    if len(set(sizes)) < len(sizes):
        raise UsageError(
            f"config.replaced = {config.replaced}: of {len(groups)} groups these are {sizes}; "
            "leave out shares that replace as many"
        )
    make_folder(work.path / RANKING)
    with units.open_stores(
        work.path / RANKING, fingerprint(audited, suites), config.audit.degrees
    ) as stores:
        opened = OpenAudit(audited, suites, stores, work.path)
        costs = _costs(config, opened, heads.bias, groups, answers)
    source = read_provenance(work.path, config)
    write_table(work.path / "costs.parquet", _cost_table(costs, groups, audited.shape), source)

    sets = list(chosen_sets(config, costs, len(groups)))
    scored = Scored(audited, suites[MEASURED], suites[answers])
    start = params_lib.init(jax.random.key(0), heads.spec)
    base = scored.measure(heads, start, np.zeros(audited.shape, bool))
    of_seed: dict[int, tuple[Task, ParamTree]] = {}

    def one(item: Chosen) -> list[dict[str, Any]]:
        if item.seed not in of_seed:
            own = task.with_seed(item.seed)
            folder = work.path / f"heads_{item.seed}"
            of_seed[item.seed] = own, train_heads(own, heads, folder).state.params
        own, first = of_seed[item.seed]
        mask = head_sets.mask(np.concatenate([groups[g] for g in item.groups]), audited.shape)
        untrained = params_lib.init(jax.random.key(item.seed), heads.spec)
        trained: list[tuple[Matching, ParamTree]] = [(heads, untrained), (heads, first)]
        folder = work.path / f"set_{item.seed}_{item.replaced:g}_{sets.index(item)}"
        logits = _given(logits_of(own, heads))
        given = {"model": own.base.params, "heads_LN": jnp.asarray(mask)}
        trained.append(
            (logits, train_logits(own, logits, first, folder, frozen=given).state.params)
        )
        shutil.rmtree(folder)
        row = {
            "seed": item.seed,
            "replaced": item.replaced,
            "set": item.name,
            "chosen_by": ",".join(item.chosen_by),
            "groups": list(item.groups),
            "right_softmax": base.right,
            "prompts": base.prompts,
        }
        for stage, (objective, params) in zip(STAGES, trained, strict=True):
            found = scored.measure(objective, params, mask)
            row |= {
                f"text_{stage}": found.text - base.text,
                f"answer_{stage}": found.answer - base.answer,
                f"right_{stage}": found.right,
            }
        return [row]

    plan: dict[Unit, Chosen] = {(s.seed, f"{s.replaced:g}", s.name): s for s in sets}
    table = work.units(
        "sets", SETS, plan, lambda item: pa.Table.from_pylist(one(item), schema=SETS), noun="sets"
    )
    found = numbers.cells(table, costs)
    return RankingsSummary(
        model=config.model,
        model_sha256=task.base.identity.text,
        provenance=read_provenance(work.path, config),
        recipe=parse_recipe(config.recipe).spec,
        by=config.by,
        task=config.asked.name,
        groups=len(groups),
        sets=table.num_rows,
        steps=config.steps,
        logit_steps=config.logit_steps,
        first_tokens=_tokens(task, 0, config.steps),
        second_tokens=_tokens(task, config.steps, config.logit_steps),
        text_softmax=base.text,
        answer_softmax=base.answer,
        right_softmax=base.right,
        prompts=base.prompts,
        solved=decision.solves(base.right, base.prompts),
        windows=len(suites[MEASURED].prompts),
        seeds=len(config.seeds),
        replaced=config.replaced,
        results=numbers.over_cells(table, costs, found),
        cells=found,
    )


def chosen_sets(
    config: RankingsConfig, costs: Mapping[str, np.ndarray], groups: int
) -> Iterator[Chosen]:
    """The sets of every seed and size: those of the statistics, each once, and random ones.

    A statistic that is the same in the last group to stay and the first to go has no set.

    Args:
      config: statistics, sizes, draws and seeds.
      costs: cost of each group by statistic.
      groups: number of groups.
    """
    for seed in config.seeds:
        for share in config.replaced:
            size = size_of(share, groups)
            by: dict[tuple[int, ...], list[str]] = {}
            for name in config.statistics:
                ranked = ranking.order(costs[name])
                last, first = costs[name][ranked[groups - size - 1 : groups - size + 1]]
                # Groups of equal cost on both sides: the statistic does not choose.
                if last != first:
                    by.setdefault(tuple(sorted(ranked[groups - size :].tolist())), []).append(name)
            generator = np.random.default_rng((seed, size))
            for _ in range(config.draws):
                drawn = sorted(generator.permutation(groups)[:size].tolist())
                own = by.setdefault(tuple(drawn), [])
                if numbers.RANDOM not in own:
                    own.append(numbers.RANDOM)
            for members, names in by.items():
                yield Chosen(seed, share, members, tuple(names))


def size_of(share: float, groups: int) -> int:
    """The number of groups that a set of this share, in percent, replaces; one to all but one."""
    return min(max(round(share * groups / 100), 1), groups - 1)


def _suites(config: RankingsConfig, task: Task, audited: AuditedModel) -> tuple[Suites, str]:
    """Texts and prompts that rank, and those that measure; the key of the prompts."""
    asked = tasks.build(audited, (config.asked,), length=config.task_length, n=config.task_n)
    if asked.refused:
        raise BadInputError(
            f"config.task = {config.task} cannot be asked of this model: "
            f"{asked.refused[config.asked.name]}"
        )
    asked, ranked = held_for_ranking(asked, audited.tokenizer)
    split = task.training
    places = np.linspace(0, split.count - 1, min(config.ranking_texts, split.count)).round()
    texts = {
        RANKING: _texts(RANKING, split, places.astype(int), audited),
        MEASURED: _texts(MEASURED, task.validation.examples, None, audited),
    }
    key = config.asked.key(config.task_length)
    return asked.suites | ranked | texts, key


def _texts(
    name: str, examples: Examples, places: np.ndarray | None, audited: AuditedModel
) -> Suite:
    places = np.arange(examples.count) if places is None else places
    rows = examples.read(places)["tokens"]
    windows = {
        f"{at}": row[row != examples.fill].tolist() for at, row in zip(places, rows, strict=True)
    }
    return of_windows(name, windows, audited.tokenizer)


def _costs(
    config: RankingsConfig, opened: OpenAudit, bias: Any, groups: np.ndarray, key: str
) -> dict[str, np.ndarray]:
    """The cost of each group by statistic."""
    recipe = parse_recipe(config.recipe)
    return {
        name: ranking.costs(
            name,
            opened,
            recipe,
            np.asarray(bias),
            groups,
            texts=RANKING,
            prompts=[ranking_key(key)],
        )
        for name in config.statistics
    }


def _cost_table(
    costs: Mapping[str, np.ndarray], groups: np.ndarray, shape: tuple[int, int]
) -> pa.Table:
    rows = [
        {
            "statistic": name,
            "group": at,
            "layer": int(groups[at][0]) // shape[1],
            "first_head": int(groups[at][0]) % shape[1],
            "cost": float(cost),
        }
        for name, cost_G in costs.items()
        for at, cost in enumerate(cost_G)
    ]
    return pa.Table.from_pylist(rows, schema=COSTS)


def _given(logits: LogitMatching) -> GivenHeads:
    """The objective of the second stage, of heads that are data."""
    return GivenHeads(**{f.name: getattr(logits, f.name) for f in dataclasses.fields(logits)})


def _tokens(task: Task, start: int, steps: int) -> int:
    """Number of tokens that are predicted in these updates of a training."""
    total = 0
    for step in range(start, start + steps):
        total += int((task.batches.at(step)["tokens"][:, 1:] != IGNORE_INDEX).sum())
    return total
