"""What it costs to replace a group of heads, by statistics that need no training: `check --rank`.

A group is a head, the heads that read one key head, or a layer. Its cost, higher for a group that
should keep softmax, is one of

    text      rise of the loss on texts with the recipe in this group alone, nats per token
    task      rise of the loss on the answers to prompts, likewise, the mean over tasks
    kl        KL(softmax || recipe in this group alone) of the next token, nats, on texts
    unsafe    share of rows whose S under the recipe is 1 or more, dead rows among them
    lost      share of rows with S below 1 under softmax and not under the recipe
    s         median of S under the recipe over rows
    output    mean over rows of |z' - z| / |z| of the head's output
    entropy   1 - H / log n, of a row of n keys with softmax and entropy H, the mean over rows:
              0 of a head that attends evenly, 1 of one that attends to one key
    random    a number drawn from a seed, which any other is to beat

The first three take a forward pass for each group. S is "When Does Polynomial Attention
Concentrate?", Appendix T, on the key that softmax gives most weight; it, the change of outputs and
the entropy are of 16 rows of each text and head in one pass of the model with softmax, and a group
has the mean of its heads, or the median of S.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from polyattn_jax.audit import head_sets, recipe_rows
from polyattn_jax.audit.opening import OpenAudit
from polyattn_jax.audit.results import LossInterval
from polyattn_jax.audit.stages import Condition
from polyattn_jax.recipes.row_maps import SOFTMAX, Recipe
from polyattn_jax.suites import batches

Statistic = Literal["text", "task", "kl", "unsafe", "lost", "s", "output", "entropy", "random"]
STATISTICS: tuple[str, ...] = get_args(Statistic)
# What a statistic is called in a page, and its unit.
WORDS = {
    "text": "change of the loss on text, nats per token",
    "task": "change of the loss on answers, nats per token",
    "kl": "KL of the next token from softmax, nats",
    "unsafe": "share of rows with S of 1 or more",
    "lost": "share of rows with S below 1 under softmax alone",
    "s": "median S",
    "output": "relative change of the head's output",
    "entropy": "1 - entropy / log n of softmax",
    "random": "a random number",
}
OF_ROWS = ("unsafe", "lost", "s", "output", "entropy")


def check_statistic(name: str, recipe: Recipe) -> None:
    """Refuses a statistic that a recipe does not have.

    Raises:
      UsageError: S of a map whose weights may be negative.
    """
    if name in ("unsafe", "lost", "s") and getattr(recipe.map, "signed", False):
        raise UsageError(
            f"--rank={name}: S is not defined for {recipe.spec}, whose weights may be negative; "
            "rank by output, text or another statistic"
        )


def alone(
    stage: str, recipe: Recipe, bias: Any, groups: np.ndarray, shape: tuple[int, int]
) -> list[Condition]:
    """Conditions with softmax everywhere and with the recipe in each group alone.

    Args:
      stage: name of the stage.
      recipe, bias: arguments of `Condition`.
      groups: flat numbers of the heads of each group `[G, ...]`.
      shape: layers, and heads of a layer.
    """
    masks = {SOFTMAX.name: np.zeros(shape, bool)}
    masks |= {cell_of(own): head_sets.mask(own, shape) for own in groups}
    return [Condition(stage, name, recipe, bias, mask) for name, mask in masks.items()]


def cell_of(group: np.ndarray) -> str:
    """The name of the cell of one group: its head, or its first and last."""
    return f"{group[0]}" if len(group) == 1 else f"{group[0]}-{group[-1]}"


def text_changes(
    opened: OpenAudit, recipe: Recipe, bias: Any, groups: np.ndarray, texts: str
) -> list[LossInterval]:
    """The change of the loss on a suite of texts with the recipe in each group alone."""
    conditions = alone(head_sets.SINGLE, recipe, bias, groups, opened.model.shape)
    losses = opened.text_losses(conditions, texts)
    return [losses[cell_of(own)].change for own in groups]


def costs(
    name: str,
    opened: OpenAudit,
    recipe: Recipe,
    bias: Any,
    groups: np.ndarray,
    *,
    texts: str,
    prompts: Sequence[str] = (),
    seed: int = 0,
) -> np.ndarray:
    """The cost of each group `[G]` by one statistic, float64; inf where it is not finite.

    Args:
      name: one of `STATISTICS`.
      opened: the model, its suites and its stores, which resume what was measured.
      recipe, bias: what replaces softmax, with the resolved bias.
      groups: flat numbers of the heads of each group `[G, ...]`.
      texts: name of the suite of texts.
      prompts: names of the suites of prompts, for "task".
      seed: random seed of "random".

    Raises:
      UsageError: the recipe does not have this statistic, or there are no prompts.
    """
    check_statistic(name, recipe)
    shape = opened.model.shape
    match name:
        case "random":
            result = np.random.default_rng(seed).random(len(groups))
        case "text":
            changes = text_changes(opened, recipe, bias, groups, texts)
            result = np.array([change.estimate for change in changes])
        case "kl":
            conditions = alone(head_sets.SINGLE, recipe, bias, groups, shape)
            by_cell = opened.divergences(conditions, texts)
            result = np.array([by_cell[cell_of(own)] for own in groups])
        case "task":
            if not prompts:
                raise UsageError("--rank=task: no task has prompts; name one, --task=niah")
            result = np.zeros(len(groups))
            for key in prompts:
                stage = f"{head_sets.SINGLE} {key}"
                answers = opened.evaluate(alone(stage, recipe, bias, groups, shape), key)
                base = answers[SOFTMAX.name].loss
                result += [answers[cell_of(own)].loss - base for own in groups]
            result /= len(prompts)
        case _ if name in OF_ROWS:
            by_head = of_rows(opened, recipe, bias, texts)[name].ravel()
            mean = np.median if name == "s" else np.mean
            result = np.array([mean(by_head[own]) for own in groups])
        case _:
            raise ValueError(f"no statistic {name!r}")
    return np.nan_to_num(result, nan=np.inf, posinf=np.inf)


def order(cost_G: np.ndarray) -> np.ndarray:
    """Numbers of the groups by their cost, most first; ties in the order of the groups."""
    return np.argsort(-cost_G, kind="stable")


def of_rows(opened: OpenAudit, recipe: Recipe, bias: Any, texts: str) -> dict[str, np.ndarray]:
    """The statistics `OF_ROWS` of every head `[L, N]`, from a pass with softmax over the texts."""
    audited = opened.model
    bias_1LN = jnp.asarray(np.broadcast_to(np.float32(bias), audited.shape))[None]
    names = ("s_own", "s_softmax", "change", "sharpness")
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for batch in batches(opened.suites[texts], audited.config.batch_size):
        tokens_BT, queries_BQ, valid_BT = audited.put(
            batch.tokens_BT, batch.query_positions_BQ, batch.valid_BT
        )
        reports = recipe_rows.measure(
            audited.model.params,
            tokens_BT,
            queries_BQ,
            bias_1LN,
            cfg=audited.model.cfg,
            maps=(recipe.map,),
            valid_BT=valid_BT,
        )
        for name, found in parts.items():
            rows_LBNQ = np.asarray(reports[name], np.float64)[:, 0][:, batch.valid_B]
            found.append(rows_LBNQ.transpose(0, 2, 1, 3).reshape(*audited.shape, -1))
    s_LNR, own_LNR, change_LNR, sharp_LNR = (np.concatenate(parts[name], -1) for name in names)
    # A row without an S has no weight on the key.
    s_LNR = np.nan_to_num(s_LNR, nan=np.inf, posinf=np.inf)
    return {
        "unsafe": (s_LNR >= 1).mean(-1),
        "lost": ((s_LNR >= 1) & (own_LNR < 1)).mean(-1),
        "s": np.median(s_LNR, axis=-1),
        "output": change_LNR.mean(-1),
        "entropy": sharp_LNR.mean(-1),
    }
