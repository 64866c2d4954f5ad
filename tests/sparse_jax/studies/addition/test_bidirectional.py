"""The study without a causal mask: gates on all pairs, its measurements, and training by recipe."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax.model import params as params_lib
from lm_jax.model.mixers import ATTENTION, BidirectionalAttention
from lm_jax.parallel import sharding
from lm_jax.run.config import from_plain
from lm_jax.run.results import load_result
from lm_jax.study import command, frame
from lm_jax.train.metrics import METRICS
from lm_jax.train.objective import LMBatch
from sparse_jax.gates.attend import by_kernels, gated
from sparse_jax.gates.objective import Sparsifying
from sparse_jax.studies.addition import STUDY, measures, models, problems
from sparse_jax.studies.addition.report_sections import GOAL
from sparse_jax.studies.addition.results import AdditionSummary
from sparse_jax.studies.addition.settings import LEAST, AdditionConfig
from tests import tiny
from tests.sparse_jax.studies.addition.patterns import T, pattern, trace

CONFIG = "sparse/addition"
CFG = tiny.decoder(num_heads=2, num_kv_heads=1, vocab_size=20, max_length=9)


def length_batch(tokens_BS):
    """Ids above 0 are tokens, at the beginning of each row."""
    mask_BT = tokens_BS > 0
    return LMBatch(tokens_BS, mask_BT, tokens_BS, mask_BT)


@pytest.mark.parametrize("mixer", [ATTENTION, BidirectionalAttention()])
def test_gates_are_on_all_pairs_that_the_mixer_shows(mixer):
    """The same gates with scores and by kernels, and the denominator of the shares."""
    each = params_lib.init(jax.random.key(0), lm_jax.param_spec(CFG))
    each = jax.tree.map(lambda x: 8 * x, each)
    length_B = np.array([9, 6, 4])
    tokens_BT = np.where(np.arange(9) < length_B[:, None], 1 + np.arange(9), 0)
    valid_BT = jnp.asarray(tokens_BT > 0)
    attend = gated(CFG, mode="threshold", bias=-0.1, valid_BT=valid_BT)

    @jax.jit
    def run(tokens_BT):
        forward = [
            lm_jax.forward(each, tokens_BT, CFG, attend=one, mixer=mixer, valid_BT=valid_BT)
            for one in (attend, by_kernels(attend))
        ]
        return [output.aux for output in forward]

    unfused, kernels = run(tokens_BT)
    pairs_B = length_B * (length_B + 1) // 2 if mixer.causal else length_B**2
    for aux in (unfused, kernels):
        np.testing.assert_array_equal(aux["pairs_B"], np.broadcast_to(pairs_B, (2, 3)))
    np.testing.assert_array_equal(unfused["open_edges_BN"], kernels["open_edges_BN"])
    share = unfused["open_edges_BN"].sum() / (2 * 2 * pairs_B.sum())
    assert 0.2 < share < 0.8
    objective = Sparsifying(
        CFG, AdditionConfig().dual, distill=0.0, make_batch=length_batch, mixer=mixer
    )
    np.testing.assert_array_equal(objective.normalizers(tokens_BT)["pairs"], [pairs_B.sum()] * 2)


def test_runs_of_causal_models_keep_their_metadata():
    """What a checkpoint is bound to is that of runs from before there was another mixer."""
    dual = AdditionConfig().dual
    assert "mixer" not in Sparsifying(CFG, dual).metadata()["sparsifying"]
    other = Sparsifying(CFG, dual, mixer=BidirectionalAttention()).metadata()
    assert other["sparsifying"]["mixer"]["class"] == "BidirectionalAttention"


def test_a_tracer_sees_later_positions_only_without_causality():
    tokens = problems.rows(np.arange(0, 10_000, 997))
    later = np.triu(np.ones((T, T), bool), 1)
    for attention in ("causal", "bidirectional"):
        config = from_plain(STUDY.settings("smoke", attention=attention), AdditionConfig)
        dense, _ = models.tasks(config)
        result = dense.trace(params_lib.init(jax.random.key(0), dense.objective.spec), tokens)
        assert result.causal == (attention == "causal")
        assert (result.pattern_LPTS[..., later] > 0).all() == (attention == "bidirectional")
        assert result.open_LPTS[..., later].any() == (attention == "bidirectional")
        edges = measures.edges(result, seed=0)
        assert edges.all.estimate == edges.possible == 4 * (66 if result.causal else 121)


def test_chance_is_over_the_whole_row():
    ones, tens, *_ = problems.ANSWERS
    one = pattern((0, ones, 1), (0, ones, 4), (0, tens, ones), (1, tens, ones))
    both_ways = dataclasses.replace(trace(one, one), causal=False)
    result, _ = measures.operands(both_ways, 0)
    assert result.both.estimate == 1 and result.both_by_chance == pytest.approx(2 / (11 * 10))
    # In layer 1 the tens read the answer's ones, which read both operands in layer 0.
    numbers = np.array([3628, 3628])
    first, second = (measures.carry(both_ways, numbers, layer)[0] for layer in (0, 1))
    assert (first.place, first.carry) == ("tens", True)
    assert first.attends.estimate == 0 and second.attends.estimate == 1
    # Positions 1, 4 and the answer's ones hold information, of eleven.
    assert second.by_chance == pytest.approx(3 / 11)


@pytest.mark.slow
def test_the_bidirectional_study_runs(tmp_path):
    flags = ["--config.attention=bidirectional", "--config.begin=drawn"]
    where = [f"--config={CONFIG}:smoke", f"--workdir={tmp_path / 'run'}"]
    assert command.run(STUDY, ["addition", *where, *flags]) == 0
    (seed,) = load_result(tmp_path / "run" / frame.SUMMARY, AdditionSummary).seeds
    assert seed.models.dense.edges.all.estimate == seed.models.dense.edges.possible == 484
    losses = [
        pq.read_table(tmp_path / "run/seed_0" / name / "metrics.parquet")["loss"][0].as_py()
        for name in ("dense", "sparse")
    ]
    # Both losses are those of random weights: ln 14 for 14 ids.
    assert losses == pytest.approx([np.log(14)] * 2, abs=0.3)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.optimised  # thousands of updates of one program
def test_the_sparse_model_learns_to_add_from_random_weights(tmp_path):
    """By the recipe in fewer updates: the strength rises once the sums are known."""
    config = from_plain(STUDY.settings("bidirectional"), AdditionConfig)
    config = dataclasses.replace(config, sparse_steps=1_800)
    assert config.begin == "drawn"
    _, sparse = models.tasks(config)
    train_P, held_out_P = problems.split(config.held_out, 1)
    run = models.train_model(
        sparse, config, tmp_path, train_P, held_out_P, sharding.make_mesh(data=-1), seed=1
    )
    weights = sparse.weights(sharding.fetch(run.state.params))
    trace = sparse.trace(weights, problems.rows(held_out_P))
    accuracy = measures.accuracy(trace, held_out_P)
    assert accuracy.all.n == 2000 and accuracy.all.estimate >= GOAL
    strength = pq.read_table(tmp_path / METRICS)["strength"].to_numpy()
    assert strength[0] == pytest.approx(LEAST) and strength.max() > 100 * LEAST
    # A quarter of the 484 edges at most.
    assert measures.edges(trace, seed=0).all.estimate < 121
