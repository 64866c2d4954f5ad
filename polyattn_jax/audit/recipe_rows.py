"""S of recipes' own weights on score rows: of sigmoids, feature maps, or at a bias of each head.

`probe` measures S_p at a few biases for all heads, and reads no queries and keys. Every other
normalised recipe has its rows measured here (Appendix T), all recipes of a run in one forward pass
with softmax. The target of a row is the key that softmax gives most weight, whatever the recipe
prefers: S < 1 says that the recipe gives it more than all other keys together.

    attend = recipe_attend((recipe.map,), bias_RLN, queries_BQ)
    lm_jax.forward(params, tokens_BT, cfg, attend=attend).aux["s_own"]      [L, R, B, N, Q]
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model.attention import Fused, LayerAttend, PerLayer, fused, register_fused, softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.precision import exact_jit
from lm_jax.statistics import Interval
from polyattn_jax.audit import concentration
from polyattn_jax.audit.audit_suites import diagnosed
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.columns import Columns, where
from polyattn_jax.audit.results import RowShares, SoftmaxComparison
from polyattn_jax.audit.units import ResultStores, run_units
from polyattn_jax.recipes import row_maps
from polyattn_jax.recipes.diagnostic import row_stats
from polyattn_jax.recipes.feature_maps import FeatureMap
from polyattn_jax.recipes.input_maps import with_inputs
from polyattn_jax.recipes.probe import DENSE, head_output, relative_change, rows_at
from polyattn_jax.recipes.row_maps import SOFTMAX, Map, Recipe
from polyattn_jax.recipes.substitute import on_scores
from polyattn_jax.recipes.trained_model import forward
from polyattn_jax.suites import Suite
from polyattn_jax.suites.batching import Batch


def measured(recipe: Recipe) -> bool:
    """Whether the rows of a recipe are measured here."""
    return recipe.map.normalised and recipe.degree is None and recipe != SOFTMAX


@dataclasses.dataclass(frozen=True)
class RecipeRows:
    """Softmax that reports on the rows of chosen queries under recipes, computed as `DENSE`.

    `data` of one layer holds `queries_BQ` and `bias_RN`. The reports are `[R, B, N, Q]`.
    """

    maps: tuple[Map, ...]


def recipe_attend(maps: tuple[Map, ...], bias_RLN: jax.Array, queries_BQ: jax.Array) -> Fused:
    """The attend that reports on R recipes, each with a bias of every head."""
    bias_LRN = jnp.swapaxes(jnp.asarray(bias_RLN, jnp.float32), 0, 1)
    data = {
        "bias_RN": bias_LRN,
        "queries_BQ": jnp.broadcast_to(queries_BQ, (len(bias_LRN), *queries_BQ.shape)),
    }
    rows: Any = RecipeRows(maps)
    return fused(PerLayer(rows, data), DENSE)


def _dense(attend: LayerAttend, q_BTNH, k_BSKH, v_BSKH, *, visibility, scale, cap):
    queries_BQ = attend.data["queries_BQ"]
    with_rows = lambda s: (softmax(s), {"scores": rows_at(s, queries_BQ)})  # noqa: E731
    z_BTNH, aux = on_scores(with_rows, q_BTNH, k_BSKH, v_BSKH, visibility, scale, cap)
    scores_BNQS = aux["scores"]
    target_BNQ = scores_BNQS.argmax(-1).astype(jnp.int32)
    q_BQNH = jnp.take_along_axis(q_BTNH, queries_BQ[:, :, None, None], axis=1)
    before_BNQH = head_output(softmax(scores_BNQS), v_BSKH)
    of_softmax = {
        "target": target_BNQ,
        "s_softmax": row_stats(scores_BNQS, row_map=row_maps.softmax).s_p[..., 0],
        "sharpness": sharpness(scores_BNQS),
    }
    reports = []
    for row_map, bias_N in zip(attend.fn.maps, attend.data["bias_RN"], strict=True):
        own_BNQS, bias_N11 = scores_BNQS, bias_N[:, None, None]
        if isinstance(row_map, FeatureMap):
            own_BNQS = row_map.log_weights(q_BQNH, k_BSKH, scale, scores_BNQS)
            row_map = row_maps.softmax
        weights_of = with_inputs(row_map, q_BQNH, k_BSKH, scale)
        after_BNQH = head_output(weights_of(own_BNQS, bias_N11), v_BSKH)
        change_BNQ = relative_change(after_BNQH, before_BNQH)
        signed = getattr(row_map, "signed", False)
        if signed:
            row_map = row_maps.softmax
        weights = {"row_map": row_map} if row_map.degree is None else {"degrees": (row_map.degree,)}
        stats = row_stats(own_BNQS, bias=bias_N11, target=target_BNQ, **weights)
        # Weights of both signs have no S.
        s_BNQ = jnp.full_like(change_BNQ, jnp.nan) if signed else stats.s_p[..., 0]
        reports.append(
            of_softmax
            | {
                "status": stats.status,
                "argmax": stats.argmax,
                "margin": stats.margin,
                "active": stats.active,
                "s_own": s_BNQ,
                "change": change_BNQ,
            }
        )
    return z_BTNH, jax.tree.map(lambda *leaves: jnp.stack(leaves), *reports)


register_fused(RecipeRows, DENSE, _dense)


def sharpness(scores_BNQS: jax.Array) -> jax.Array:
    """1 - H / log n of each row, H the entropy of its softmax over n keys; 1 where n is 1."""
    kept = scores_BNQS != -jnp.inf
    pattern = softmax(scores_BNQS)
    entropy = -jnp.where(pattern > 0, pattern * jnp.log(jnp.where(pattern > 0, pattern, 1)), 0)
    most = jnp.log(jnp.maximum(kept.sum(-1), 1).astype(entropy.dtype))
    return 1 - jnp.where(most > 0, entropy.sum(-1) / jnp.where(most > 0, most, 1), 0)


@functools.partial(exact_jit, static_argnames=("cfg", "maps"))
def measure(
    params: Any,
    tokens_BT: jax.Array,
    queries_BQ: jax.Array,
    bias_RLN: jax.Array,
    *,
    cfg: DecoderConfig,
    maps: tuple[Map, ...],
    valid_BT: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """The reports of `RecipeRows` on one batch, `[L, R, B, N, Q]`; `valid_BT` as in `measure`."""
    attend = recipe_attend(maps, bias_RLN, queries_BQ)
    last_B1 = queries_BQ[:, -1:]
    out = forward(params, tokens_BT, cfg, attend=attend, valid_BT=valid_BT, logits_at=last_B1)
    return out.aux


def diagnose(
    audited: AuditedModel,
    stores: ResultStores,
    suites: Mapping[str, Suite],
    biases: Mapping[Recipe, Any],
) -> None:
    """Measures or resumes the rows of every diagnosed suite under the recipes, at their biases."""
    cfg, recipes = audited.model.cfg, tuple(biases)
    bias_RLN = np.array([np.broadcast_to(np.float32(biases[r]), audited.shape) for r in recipes])

    def work(suite: str, batch: Batch) -> dict[str, np.ndarray]:
        tokens_BT, queries_BQ, valid_BT = audited.put(
            batch.tokens_BT, batch.query_positions_BQ, batch.valid_BT
        )
        reports = measure(
            audited.model.params,
            tokens_BT,
            queries_BQ,
            jnp.asarray(bias_RLN),
            cfg=cfg,
            valid_BT=valid_BT,
            maps=tuple(recipe.map for recipe in recipes),
        )
        return _columns(suite, recipes, batch, cfg.layer_windows, reports)

    run_units(audited, stores.recipe_rows, "diagnose recipes", diagnosed(dict(suites)), work)


def _columns(suite, recipes, batch, windows, reports) -> dict[str, np.ndarray]:
    # Recipes first, so that the rows of one stay together.
    reports = {
        name: np.asarray(x).swapaxes(0, 1) for name, x in reports.items() if name != "sharpness"
    }
    shape = reports["s_own"].shape
    recipe, layer, b, head, q = np.meshgrid(*(np.arange(size) for size in shape), indexing="ij")
    wanted = batch.valid_B[b]
    result = {
        "suite": np.full(shape, suite),
        "length": batch.lengths_B[b],
        "prompt": np.array(batch.ids)[b],
        "query": batch.query_positions_BQ[b, q],
        "layer": layer,
        "head": head,
        "window": np.array([w or 0 for w in windows])[layer],
        "recipe": np.array([recipe.name for recipe in recipes])[recipe],
        **reports,
    }
    return {name: column[wanted] for name, column in result.items()}


def shares(
    rows: Columns, audited: AuditedModel, recipe: Recipe, suite: str
) -> tuple[RowShares, SoftmaxComparison | None]:
    """The shares of the rows of one suite that are safe, and what the recipe loses and sharpens.

    The top heads are those of greatest median S of the recipe on the induction prompts, or on the
    suite itself without them. All shares are of the rows that have a target, dead ones among them.
    """
    config, N = audited.config, audited.model.cfg.num_heads
    own = where(rows, recipe=recipe.name)
    c = concentration.with_target(where(own, suite=suite))
    if not len(c["status"]):
        return RowShares(), None
    ranked = where(own, suite="induction" if "induction" in rows["suite"] else suite)
    flat = ranked["layer"].astype(int) * N + ranked["head"]
    median = np.array([np.median(ranked["s_own"][flat == head]) for head in range(flat.max() + 1)])
    top = np.argsort(-median, kind="stable")[: config.top_heads]
    parts = (c, concentration.of_heads(c, top, N))

    def safe(unsafe: concentration.Rows, part: Columns) -> Interval | None:
        if not len(part["status"]):
            return None
        return concentration.decided_share(~unsafe, concentration.clusters(part, config), config)

    of_recipe = [safe(concentration.own_unsafe(part, recipe.map), part) for part in parts]
    of_softmax = [safe(concentration.softmax_unsafe(part), part) for part in parts]
    compared = concentration.comparison(
        (suite, recipe.bias_kind, recipe.power or 1),
        concentration.own_unsafe(c, recipe.map),
        c["change"],
        c,
        concentration.softmax_unsafe(c),
        config,
    )
    dead = [concentration.dead_share(part, config) for part in parts]
    return RowShares(*of_recipe, *of_softmax, *dead), compared


def shares_of_all(rows: Columns, audited: AuditedModel, suite: str) -> dict[str, RowShares]:
    """The shares of the rows of one suite, by the name of each recipe measured here."""
    return {
        name: shares(rows, audited, recipe, suite)[0]
        for name, recipe in audited.config.by_name.items()
        if measured(recipe)
    }
