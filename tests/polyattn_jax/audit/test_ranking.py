"""The statistics that rank groups of heads, each against a direct computation in float64."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import lm_jax
from lm_jax.errors import UsageError
from polyattn_jax.audit import audit_suites, audited_model, ranking, units
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.opening import OpenAudit
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.recipes.substitute import substitute
from polyattn_jax.studies.check import tasks
from polyattn_jax.studies.check.hybrid import groups_of
from tests.polyattn_jax.conftest import PROSE

L, N = 3, 4
RECIPE, BIAS = parse_recipe("relu:p=8,b=0"), 0.0

# A log probability is below 2^4 in float32, and a loss or KL is a mean of differences of two.
ROUNDING = 2.0**4 * np.finfo(np.float32).eps


@pytest.fixture(scope="module")
def opened(tiny, tmp_path_factory):
    """An open audit of the tiny model, on eight texts of two lengths and ten needles."""
    rng = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("ranking")
    rows = [
        {"id": f"{i}", "text": " ".join(rng.choice(PROSE, 20 + 10 * (i % 2)))} for i in range(8)
    ]
    (folder / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    config = AuditConfig(
        model=str(tiny), recipes=(RECIPE.spec,), text=str(folder / "mine.jsonl"), batch_size=3
    )
    audited = audited_model.load(config)
    asked = tasks.build(audited, (tasks.parse_task("needle"),), length=64, n=10)
    suites = asked.suites | {"texts": audit_suites.texts(audited)}
    with units.open_stores(folder, "one", config.degrees) as stores:
        yield OpenAudit(audited, suites, stores, folder)


def each_text(opened):
    for prompt in opened.suites["texts"].prompts:
        yield prompt, jnp.asarray(np.array(prompt.tokens)[None])


def logits(opened, tokens_1T, group=None):
    """Float64 log probabilities `[T, V]` with the recipe in one group of heads, or in none."""
    model, mask = opened.model.model, np.zeros(L * N, bool)
    if group is not None:
        mask[group] = True
    attend = substitute([RECIPE.map], 0, BIAS, jnp.asarray(mask.reshape(L, N)))
    out = lm_jax.forward(model.params, tokens_1T, model.cfg, attend=attend)
    return special.log_softmax(np.asarray(out.logits[0], np.float64), axis=-1)


def costs(opened, name, groups, **options):
    return ranking.costs(name, opened, RECIPE, BIAS, groups, texts="texts", **options)


@pytest.mark.parametrize("by", ["head", pytest.param("kv_head", marks=pytest.mark.long)])
def test_loss_and_divergence_are_those_of_each_group_alone(opened, by):
    groups = groups_of(opened.model.model.cfg, by)
    rise, kl, tokens, read = np.zeros(len(groups)), np.zeros(len(groups)), 0, 0
    for _, tokens_1T in each_text(opened):
        ids = np.asarray(tokens_1T[0])
        before_TV = logits(opened, tokens_1T)
        at = np.arange(len(ids) - 1), ids[1:]
        for i, group in enumerate(groups):
            after_TV = logits(opened, tokens_1T, group)
            rise[i] += (before_TV[:-1][at] - after_TV[:-1][at]).sum()
            kl[i] += (np.exp(before_TV) * (before_TV - after_TV)).sum()
        tokens, read = tokens + len(ids) - 1, read + len(ids)
    rise, kl = rise / tokens, kl / read
    np.testing.assert_allclose(costs(opened, "text", groups), rise, atol=ROUNDING)
    np.testing.assert_allclose(costs(opened, "kl", groups), kl, atol=ROUNDING)
    assert kl.max() > 10 * ROUNDING and np.abs(rise).max() > 10 * ROUNDING


def test_a_group_costs_a_task_what_its_answers_lose(opened):
    groups = groups_of(opened.model.model.cfg, "layer")
    (key,) = (name for name in opened.suites if name.startswith("niah"))
    wanted = np.zeros(L)
    for prompt in opened.suites[key].prompts:
        tokens_1T = jnp.asarray(np.array(prompt.tokens)[None])
        before = logits(opened, tokens_1T)[-1, prompt.target]
        wanted += [before - logits(opened, tokens_1T, group)[-1, prompt.target] for group in groups]
    found = costs(opened, "task", groups, prompts=[key])
    np.testing.assert_allclose(found, wanted / len(opened.suites[key].prompts), atol=ROUNDING)
    with pytest.raises(UsageError, match="no task has prompts"):
        costs(opened, "task", groups)


def test_statistics_of_rows_are_those_of_the_score_matrices(opened):
    """S, the change of the output and the entropy, of the rows of each text's 16 positions."""
    model = opened.model.model
    found = {name: [] for name in ranking.OF_ROWS}
    for prompt, tokens_1T in each_text(opened):
        sites = {"attn.scores": lambda x: x, "attn.v": lambda x: x}
        out = lm_jax.forward(model.params, tokens_1T, model.cfg, record=sites)
        z_LNTS = np.asarray(out.records["attn.scores"], np.float64)[:, 0]
        v_LSKH = np.asarray(out.records["attn.v"], np.float64)[:, 0]
        v_LNSH = np.repeat(v_LSKH.transpose(0, 2, 1, 3), N // v_LSKH.shape[2], axis=1)
        rows = {name: [] for name in ranking.OF_ROWS}
        for t in prompt.query_positions:
            z_LNS = z_LNTS[:, :, t, : t + 1]
            w_LNS = special.softmax(z_LNS, axis=-1)
            r_LNS = np.maximum(z_LNS + BIAS, 0) ** 8
            top = z_LNS.argmax(-1)[..., None]
            target = np.take_along_axis(r_LNS, top, -1)[..., 0]
            with np.errstate(divide="ignore", invalid="ignore"):
                s = np.where(target > 0, (r_LNS.sum(-1) - target) / target, np.inf)
            own = r_LNS / np.where(r_LNS.sum(-1) == 0, 1, r_LNS.sum(-1))[..., None]
            before, after = (
                np.einsum("lns,lnsh->lnh", w, v_LNSH[:, :, : t + 1]) for w in (w_LNS, own)
            )
            rows["s"].append(s)
            rows["unsafe"].append(s >= 1)
            kept = w_LNS.max(-1)
            rows["lost"].append((s >= 1) & (1 - kept < kept))
            rows["output"].append(
                np.linalg.norm(after - before, axis=-1) / np.linalg.norm(before, axis=-1)
            )
            most = np.log(t + 1)
            rows["entropy"].append(
                1 - special.entr(w_LNS).sum(-1) / most if most else np.ones((L, N))
            )
        for name, values in rows.items():
            found[name] += values
    by_head = {name: np.array(values) for name, values in found.items()}
    groups = groups_of(model.cfg, "head")
    for name, values in by_head.items():
        mean = np.median if name == "s" else np.mean
        wanted = mean(values, axis=0).ravel()
        np.testing.assert_allclose(costs(opened, name, groups), wanted, rtol=1e-4, atol=1e-5)
    layers = groups_of(model.cfg, "layer")
    wanted = by_head["output"].mean(0).mean(-1)
    np.testing.assert_allclose(costs(opened, "output", layers), wanted, rtol=1e-4)


def test_random_costs_are_those_of_the_seed_and_ties_keep_their_order(opened):
    groups = groups_of(opened.model.model.cfg, "head")
    one, again, other = (costs(opened, "random", groups, seed=seed) for seed in (0, 0, 1))
    assert (one == again).all() and (one != other).all()
    assert ranking.order(np.array([1.0, np.inf, 1.0, 2.0])).tolist() == [1, 3, 0, 2]


def test_signed_weights_have_no_s():
    signed = parse_recipe("poly:p=3")
    for name in ("unsafe", "lost", "s"):
        with pytest.raises(UsageError, match=r"S is not defined for poly:p=3.*rank by output"):
            ranking.check_statistic(name, signed)
    ranking.check_statistic("output", signed)
