"""The stages of an audit, each a loop over small units of work that a killed run keeps.

    1. calibrate   b_auto on the shipped text                       -> calibration.json
    2. control     softmax: needles found with, and not without, the needle; induction loss
    3. diagnose    row statistics of every suite at b = 0 and b_auto   -> row shards
    4. head types  features of the patterns over whole induction prompts
    5. sweep       every recipe in every head                          -> answer shards
    6. texts       loss on texts of the user, under the conditions of the sweep
       choices     multiple choice (`choices`), under the same conditions
       suites      harder needles and other suites by name (`suite_answers`), likewise
    7. ablate      one recipe in the top, bottom and random K heads by median S_p, and in single
                   heads

The loops are those of `units`, so the same command resumes where a killed one stopped. Several
processes share out the units of a stage, each with a copy of the model, and go on to the next stage
together. Stage 1 is in `model_calibration`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyattn_jax.audit import head_sets, head_types, measure
from polyattn_jax.audit.audit_suites import diagnosed, first_prompts
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.schema import row_columns
from polyattn_jax.audit.units import ResultStores, run_units
from polyattn_jax.recipes.row_maps import SOFTMAX, Calibrated, Recipe, parse_recipe, resolve_bias
from polyattn_jax.suites import Suite
from polyattn_jax.suites.batching import Batch


@dataclasses.dataclass(frozen=True)
class Condition:
    """One way to run the model: a recipe in some heads, with one bias or `[L, N]` of all heads."""

    stage: str
    name: str
    recipe: Recipe
    bias: Any
    heads_LN: np.ndarray

    @property
    def one_bias(self) -> float:
        """The bias as tables hold it: NaN where each head has its own."""
        return float("nan") if np.ndim(self.bias) else float(self.bias)


def biases(config: AuditConfig, b_auto: float) -> dict[str, float]:
    """The biases that rows are diagnosed at, by kind: 0, b_auto, and those that recipes name."""
    measured = [r for r in config.by_name.values() if r.degree is not None and r.bias != "auto"]
    return {"zero": 0.0, "auto": b_auto} | {r.bias_kind: float(r.bias) for r in measured}


def diagnose(
    audited: AuditedModel,
    stores: ResultStores,
    suites: dict[str, Suite],
    by_kind: Mapping[str, float],
) -> None:
    """Row statistics at the query positions of every diagnosed suite, at each of the biases."""
    biases = jnp.asarray(list(by_kind.values()), jnp.float32)

    def work(name: str, batch: Batch) -> dict[str, np.ndarray]:
        *arrays, valid_BT = audited.put(
            batch.tokens_BT, batch.query_positions_BQ, batch.answer_position_BQ, batch.valid_BT
        )
        diagnosis = measure.diagnose(
            audited.model.params,
            *arrays,
            biases,
            cfg=audited.model.cfg,
            valid_BT=valid_BT,
            degrees=audited.config.degrees,
            fused=audited.fused,
        )
        windows = audited.model.cfg.layer_windows
        return row_columns(name, batch, windows, diagnosis, by_kind, audited.config.degrees)

    run_units(audited, stores.rows, "diagnose", diagnosed(suites), work)


def head_features(audited: AuditedModel, stores: ResultStores, suites: dict[str, Suite]) -> None:
    """The features of the head types on the first induction prompts, if there are any."""
    if "induction" not in suites:
        return
    shape = audited.shape

    def work(_name: str, batch: Batch) -> dict[str, np.ndarray]:
        valid_BT = batch.valid_BT
        found_BT = np.stack([head_types.successors(row) for row in batch.tokens_BT])
        successors_BT = np.where(valid_BT, found_BT, -1).astype(np.int32)
        sums_LBN = measure.head_features(
            audited.model.params,
            *audited.put(batch.tokens_BT, successors_BT, valid_BT),
            cfg=audited.model.cfg,
            fused=audited.fused,
        )
        rows_B = dict.fromkeys(head_types.FEATURES, batch.lengths_B)
        rows_B["induction"] = (successors_BT >= 0).sum(1)
        kept = np.flatnonzero(batch.valid_B)
        layer, b, head = np.meshgrid(np.arange(shape[0]), kept, np.arange(shape[1]), indexing="ij")
        return {
            "prompt": np.array(batch.ids)[b.ravel()],
            "layer": layer.ravel(),
            "head": head.ravel(),
            **{
                name: (np.asarray(sums) / rows_B[name][:, None])[:, kept].ravel()
                for name, sums in sums_LBN.items()
            },
        }

    first = first_prompts(suites["induction"], head_types.PROMPTS)
    run_units(audited, stores.features, "head types", {"induction": first}, work)


def control(audited: AuditedModel, stores: ResultStores, suites: dict[str, Suite]) -> None:
    """Softmax on every needle suite and on the control; losses on repeated tokens."""
    heads = np.zeros(audited.shape, bool)
    cell = Condition("control", SOFTMAX.name, SOFTMAX, 0.0, heads)
    chosen = {k: s for k, s in suites.items() if k.startswith("niah") or k == "control"}
    evaluate(audited, stores, [cell], chosen)

    def work(_name: str, batch: Batch) -> dict[str, np.ndarray]:
        *arrays, valid_BT = audited.put(
            batch.tokens_BT, batch.query_positions_BQ, batch.target_BQ, batch.valid_BT
        )
        loss_BQ, correct_BQ = measure.losses(
            audited.model.params,
            *arrays,
            cfg=audited.model.cfg,
            valid_BT=valid_BT,
        )
        loss_BQ, correct_BQ = np.asarray(loss_BQ), np.asarray(correct_BQ)
        half = loss_BQ.shape[1] // 2
        copies = [slice(0, half), slice(half, 2 * half)]
        valid = np.flatnonzero(batch.valid_B)
        return {
            "prompt": np.repeat(np.array(batch.ids)[valid], 2),
            "copy": np.tile([1, 2], len(valid)),
            "loss": np.array([loss_BQ[b, c].mean() for b in valid for c in copies]),
            "correct": np.array([correct_BQ[b, c].mean() for b in valid for c in copies]),
            "tokens": np.full(2 * len(valid), half),
        }

    run_units(audited, stores.losses, "losses", {"repeated": suites["repeated"]}, work)


def evaluate(
    audited: AuditedModel,
    stores: ResultStores,
    conditions: Sequence[Condition],
    suites: dict[str, Suite],
) -> None:
    """Whether decoding writes the answer to every prompt, under every condition of one stage."""
    by_name = {
        f"{condition.stage}/{condition.name}/{name}": (condition, name)
        for condition in conditions
        for name in suites
    }

    def work(key: str, batch: Batch) -> dict[str, np.ndarray]:
        condition, suite = by_name[key]
        judged = dict(judge(audited, condition, batch))
        del judged["step"]
        return condition_columns(condition, suite, batch, judged)

    stage = conditions[0].stage
    todo = {key: suites[name] for key, (_, name) in by_name.items()}
    run_units(audited, stores.answers, stage, todo, work)


def judge(audited: AuditedModel, condition: Condition, batch: Batch) -> dict[str, jax.Array]:
    """Whether decoding writes the answers of a batch (`measure.answers`)."""
    return measure.answers(
        audited.model.params,
        *audited.put(batch.tokens_BT, batch.lengths_B, batch.query_positions_BQ, batch.target_BQ),
        **substitution(audited, condition),
    )


def text_losses(
    audited: AuditedModel, stores: ResultStores, conditions: Sequence[Condition], suite: Suite
) -> None:
    """The language-modelling loss of every text, under every condition of one stage."""
    by_name = {f"{condition.stage}/{condition.name}": condition for condition in conditions}

    def work(key: str, batch: Batch) -> dict[str, np.ndarray]:
        condition = by_name[key]
        measured = measure.text_losses(
            audited.model.params,
            *audited.put(batch.tokens_BT, batch.lengths_B),
            **substitution(audited, condition),
        )
        return condition_columns(condition, suite.name, batch, measured)

    stage = f"{conditions[0].stage}, loss"
    run_units(audited, stores.text_losses, stage, dict.fromkeys(by_name, suite), work)


def divergences(
    audited: AuditedModel, stores: ResultStores, conditions: Sequence[Condition], suite: Suite
) -> None:
    """KL of the next token from softmax to every condition of one stage, of every text."""
    by_name = {f"{condition.stage}/{condition.name}": condition for condition in conditions}
    of_softmax: dict[tuple[str, ...], jax.Array] = {}

    def work(key: str, batch: Batch) -> dict[str, np.ndarray]:
        condition = by_name[key]
        arrays = audited.put(batch.tokens_BT, batch.lengths_B)
        params, cfg = audited.model.params, audited.model.cfg
        if batch.ids not in of_softmax:
            of_softmax[batch.ids] = measure.hidden(params, *arrays, cfg=cfg)
        measured = measure.divergences(
            params, *arrays, of_softmax[batch.ids], **substitution(audited, condition)
        )
        return condition_columns(condition, suite.name, batch, measured)

    stage = f"{conditions[0].stage}, KL"
    run_units(audited, stores.divergences, stage, dict.fromkeys(by_name, suite), work)


def substitution(audited: AuditedModel, condition: Condition) -> dict[str, Any]:
    """The arguments of `measure` that put a condition's map into its heads."""
    maps = audited.maps
    return {
        "index": jnp.int32(maps.index(condition.recipe.map)),
        "bias": jnp.asarray(condition.bias, jnp.float32),
        "heads_LN": jnp.asarray(condition.heads_LN),
        "cfg": audited.model.cfg,
        "maps": maps,
        "fused": audited.fused,
    }


def condition_columns(
    condition: Condition, suite: str, batch: Batch, measured: Mapping[str, jax.Array]
) -> dict[str, np.ndarray]:
    """The columns of one batch under one condition; `measured` by name, along the batch."""
    keep = batch.valid_B
    columns = {
        "stage": condition.stage,
        "cell": condition.name,
        "recipe": condition.recipe.name,
        "bias": condition.one_bias,
        "heads": int(condition.heads_LN.sum()),
        "suite": suite,
    }
    return {
        **{name: np.full(int(keep.sum()), value) for name, value in columns.items()},
        "length": batch.lengths_B[keep],
        "prompt": np.array(batch.ids)[keep],
        **{name: np.asarray(value)[keep] for name, value in measured.items()},
    }


def sweep_conditions(
    audited: AuditedModel,
    calibrated: Calibrated,
    stage: str = "sweep",
    chosen: Sequence[str] = (),
    heads_LN: np.ndarray | None = None,
) -> list[Condition]:
    """Softmax and recipes, with the biases of `resolve_bias`.

    The recipes are those `chosen`, or all of the config; the heads those of a mask, or all.
    """
    everywhere = np.ones(audited.shape, bool) if heads_LN is None else heads_LN
    recipes = [SOFTMAX, *(parse_recipe(text) for text in chosen or audited.config.recipes)]
    return [Condition(stage, r.name, r, resolve_bias(r, calibrated), everywhere) for r in recipes]


def ablation_conditions(
    audited: AuditedModel,
    calibrated: Calibrated,
    sets: dict[str, np.ndarray],
    stage: str = "ablation",
) -> list[Condition]:
    """The ablation's recipe in no head and in each of the head sets (`head_sets`)."""
    recipe = parse_recipe(audited.config.ablation_recipe)
    bias = resolve_bias(recipe, calibrated)
    return [
        Condition(stage, name, recipe, bias, head_sets.mask(flat, audited.shape))
        for name, flat in {SOFTMAX.name: np.empty(0, int), **sets}.items()
    ]
