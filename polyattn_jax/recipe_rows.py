"""S of a recipe's own weights on score rows: S_phi of a feature map, S_p at a bias of each head.

`probe` measures S_p at a few biases for all heads, and reads no queries and keys. A recipe that
needs more, a feature map or a table of biases, has its rows measured here, in a forward pass with
softmax of its own. The target of a row is the key that softmax gives most weight, whatever the
recipe prefers: S < 1 says that the recipe gives it more than all other keys together.

    attend = recipe_attend(recipe.map, bias, queries_BQ, num_layers)
    lm_jax.forward(params, tokens_BT, cfg, attend=attend).aux["s_own"]      [L, B, N, Q]
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
from lm_jax.model.decoder import forward
from polyattn_jax import concentration, row_maps
from polyattn_jax.audit_suites import diagnosed
from polyattn_jax.audited_model import AuditedModel
from polyattn_jax.columns import Columns, where
from polyattn_jax.diagnostic import row_stats
from polyattn_jax.feature_maps import FeatureMap
from polyattn_jax.probe import DENSE, head_output, relative_change, rows_at
from polyattn_jax.results import RowShares, SoftmaxComparison
from polyattn_jax.row_maps import Map, Recipe
from polyattn_jax.substitute import on_scores
from polyattn_jax.suites import Suite
from polyattn_jax.suites.batching import Batch
from polyattn_jax.units import ResultStores, run_units


def measured(recipe: Recipe) -> bool:
    """Whether the rows of a recipe are measured here."""
    return isinstance(recipe.map, FeatureMap) or (recipe.power is not None and recipe.tabled)


@dataclasses.dataclass(frozen=True)
class RecipeRows:
    """Softmax that reports on the rows of chosen queries under a recipe, computed as `DENSE`.

    `data` of one layer holds `queries_BQ` and `bias_N`. The reports are `[B, N, Q]`.
    """

    map: Map


def recipe_attend(
    row_map: Map, bias: jax.Array | float, queries_BQ: jax.Array, shape: tuple[int, int]
) -> Fused:
    """The attend that reports on a recipe; `bias` broadcasts to `shape`, `[L, N]` of the model."""
    data = {
        "bias_N": jnp.broadcast_to(jnp.asarray(bias, jnp.float32), shape),
        "queries_BQ": jnp.broadcast_to(queries_BQ, (shape[0], *queries_BQ.shape)),
    }
    rows: Any = RecipeRows(row_map)
    return fused(PerLayer(rows, data), DENSE)


def _dense(attend: LayerAttend, q_BTNH, k_BSKH, v_BSKH, *, visibility, scale, cap):
    queries_BQ, row_map = attend.data["queries_BQ"], attend.fn.map
    with_rows = lambda s: (softmax(s), {"scores": rows_at(s, queries_BQ)})  # noqa: E731
    z_BTNH, aux = on_scores(with_rows, q_BTNH, k_BSKH, v_BSKH, visibility, scale, cap)
    scores_BNQS = aux["scores"]
    target_BNQ = scores_BNQS.argmax(-1).astype(jnp.int32)
    if isinstance(row_map, FeatureMap):
        q_BQNH = jnp.take_along_axis(q_BTNH, queries_BQ[:, :, None, None], axis=1)
        own_BNQS = row_map.scores(q_BQNH, k_BSKH, scale)
        own_BNQS = jnp.where(scores_BNQS == -jnp.inf, -jnp.inf, own_BNQS)
        pattern_BNQS = softmax(own_BNQS)
        stats = row_stats(own_BNQS, row_map=row_maps.softmax, target=target_BNQ)
    else:
        bias_N11 = attend.data["bias_N"][:, None, None]
        pattern_BNQS = row_map(scores_BNQS, bias_N11)
        degree = row_map.degree
        assert degree is not None
        stats = row_stats(scores_BNQS, degrees=(degree,), bias=bias_N11, target=target_BNQ)
    before_BNQH = head_output(softmax(scores_BNQS), v_BSKH)
    return z_BTNH, {
        "status": stats.status,
        "target": target_BNQ,
        "argmax": stats.argmax,
        "margin": stats.margin,
        "active": stats.active,
        "s_own": stats.s_p[..., 0],
        "s_softmax": row_stats(scores_BNQS, row_map=row_maps.softmax).s_p[..., 0],
        "change": relative_change(head_output(pattern_BNQS, v_BSKH), before_BNQH),
    }


register_fused(RecipeRows, DENSE, _dense)


@functools.partial(jax.jit, static_argnames=("cfg", "row_map"))
def measure(
    params: Any,
    tokens_BT: jax.Array,
    queries_BQ: jax.Array,
    bias_LN: jax.Array,
    *,
    cfg: DecoderConfig,
    row_map: Map,
) -> dict[str, jax.Array]:
    """The reports of `RecipeRows` on one batch, `[L, B, N, Q]`."""
    attend = recipe_attend(row_map, bias_LN, queries_BQ, (cfg.num_layers, cfg.num_heads))
    return forward(params, tokens_BT, cfg, attend=attend, logits_at=queries_BQ[:, -1:]).aux


def diagnose(
    audited: AuditedModel,
    stores: ResultStores,
    suites: Mapping[str, Suite],
    biases: Mapping[Recipe, Any],
) -> None:
    """Measures or resumes the rows of every diagnosed suite under each recipe, at its bias."""
    cfg = audited.model.cfg
    chosen = diagnosed(dict(suites))
    by_key = {f"{r.name}/{suite}": (r, suite) for r in biases for suite in chosen}

    def work(key: str, batch: Batch) -> dict[str, np.ndarray]:
        recipe, suite = by_key[key]
        bias_LN = np.broadcast_to(
            np.asarray(biases[recipe], np.float32), (cfg.num_layers, cfg.num_heads)
        )
        reports = measure(
            audited.model.params,
            *audited.put(batch.tokens_BT, batch.query_positions_BQ),
            jnp.asarray(bias_LN),
            cfg=cfg,
            row_map=recipe.map,
        )
        return _columns(suite, recipe, batch, cfg.layer_windows, reports)

    todo = {key: chosen[suite] for key, (_, suite) in by_key.items()}
    run_units(audited, stores.recipe_rows, "diagnose recipes", todo, work)


def _columns(suite, recipe, batch, windows, reports) -> dict[str, np.ndarray]:
    reports = {name: np.asarray(x) for name, x in reports.items()}
    shape = reports["s_own"].shape
    layer, b, head, q = np.meshgrid(*(np.arange(size) for size in shape), indexing="ij")
    wanted = batch.valid_B[b]
    result = {
        "suite": np.full(shape, suite),
        "length": batch.lengths_B[b],
        "prompt": np.array(batch.ids)[b],
        "query": batch.query_positions_BQ[b, q],
        "layer": layer,
        "head": head,
        "window": np.array([w or 0 for w in windows])[layer],
        "recipe": np.full(shape, recipe.name),
        **reports,
    }
    return {name: column[wanted] for name, column in result.items()}


def shares(
    rows: Columns, audited: AuditedModel, recipe: Recipe, suite: str
) -> tuple[RowShares, SoftmaxComparison | None]:
    """The shares of the rows of one suite that are safe, and what the recipe loses and sharpens.

    The top heads are those of greatest median S of the recipe on the induction prompts, or on the
    suite itself without them. Unlike the shares of S_p, these are of all rows that have a target,
    dead ones among them.
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

    def safe(unsafe: concentration.Rows, part: Columns) -> Any:
        return concentration.decided_share(~unsafe, part["prompt"], config)

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
    return RowShares(*of_recipe, *of_softmax), compared


def shares_of_all(rows: Columns, audited: AuditedModel, suite: str) -> dict[str, RowShares]:
    """The shares of the rows of one suite, by the name of each recipe measured here."""
    return {
        name: shares(rows, audited, recipe, suite)[0]
        for name, recipe in audited.config.by_name.items()
        if measured(recipe)
    }
