"""A decoder of two layers and batches drawn by their number, for the tests of training."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

import lm_jax
from lm_jax.parallel import sharding
from lm_jax.train import optim
from lm_jax.train.config import TrainConfig
from lm_jax.train.objective import LanguageModelling
from lm_jax.train.state import StateLayout
from tests import rounding, tiny

CFG = tiny.decoder(vocab_size=32, max_length=16)
SPEC = lm_jax.param_spec(CFG)
CONFIG = TrainConfig(steps=12, learning_rate=3e-3, eval_every=6, early_stop=False)
OBJECTIVE = LanguageModelling(CFG, dropout=0.1)
SEED = 234
U = 2.0**-24


@dataclasses.dataclass(frozen=True)
class FakeBatches:
    """Counting sequences with padding at the end of some rows; `bad` batches are out of range."""

    fingerprint: str = "fake"
    per_epoch: int = 6
    rows: int = 8
    context: int = 11
    bad: tuple[int, ...] = ()

    def at(self, k: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(k)
        first_B1 = rng.integers(0, 31, (self.rows, 1))
        tokens_BS = (first_B1 + np.arange(self.context + 1)) % 31 + 1
        length_B1 = rng.integers(3, self.context + 2, (self.rows, 1))
        tokens_BS[np.arange(self.context + 1) >= length_B1] = 0
        if k in self.bad:
            # Past the vocabulary, where the embedding is NaN.
            tokens_BS[1, :3] = 99
        return {
            "tokens": tokens_BS.astype(np.int32),
            "document": np.arange(k * self.rows, (k + 1) * self.rows, dtype=np.int64),
        }


BATCHES = FakeBatches()
VALIDATION = FakeBatches(fingerprint="held out", per_epoch=2)


@functools.cache
def initial_params():
    """Host arrays, so that every test draws them once."""
    drawn = jax.jit(functools.partial(lm_jax.init_params, cfg=CFG))(jax.random.key(0))
    return jax.tree.map(np.asarray, drawn)


def fresh_state(mesh, config=CONFIG):
    """The state before the first step, from the initial parameters."""
    return StateLayout.of(OBJECTIVE, mesh, config).init(jax.random.key(0), initial_params())


def mesh(ways: int = 1):
    """One device, or four: two for data, two for fsdp."""
    if ways == 1:
        return sharding.make_mesh(devices=jax.devices()[:1])
    return sharding.make_mesh(data=2, fsdp=2)


def assert_bitwise(left, right):
    """Equal trees of arrays, to the last bit."""
    left, right = lm_jax.params.by_path(left), lm_jax.params.by_path(right)
    assert left.keys() == right.keys()
    for name in left:
        a, b = np.asarray(left[name]), np.asarray(right[name])
        assert a.dtype == b.dtype, name
        assert a.tobytes() == b.tobytes(), name


def assert_is_the_update_of(after, metrics, mean, before, spec, config):
    """Loss, norm, first moment and parameters after one step of Adam, to which decay is added.

    `mean` is the loss and its gradient at `before`, with the bounds of both; `config` has no
    warm-up.
    """
    (loss, grads), (loss_bound, bounds) = mean
    rounding.assert_within(metrics["loss"], rounding.Expected(loss, loss_bound))
    leaves = jax.tree.leaves(grads)
    norm = math.sqrt(sum(np.sum(g**2) for g in leaves))
    # Of a sum of squares, added in any order, and as far as the entries may lead.
    size = sum(g.size for g in leaves)
    room = math.sqrt(sum(np.sum(b**2) for b in jax.tree.leaves(bounds)))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, abs=room + size * U * norm)
    # Adam's first moment after one step is a tenth of the gradient.
    tenth = jax.tree.map(lambda g: g / 10, grads)
    within = jax.tree.map(lambda g, b: b / 10 + 4 * U * np.abs(g), grads, bounds)
    rounding.assert_within(after.opt_state[0].mu, rounding.Expected(tenth, within))
    # Its step is the rate wherever the sign of the gradient is known, for epsilon is far below.
    rate, sure = config.learning_rate, 0
    declared = dict(lm_jax.params.leaves(spec))
    kept, slopes, bounds = map(lm_jax.params.by_path, (before, grads, bounds))
    for path, leaf in lm_jax.params.by_path(after.params).items():
        g = slopes[path]
        known = (np.abs(g) > 1e-5 + bounds[path]) | ((g == 0) & (bounds[path] == 0))
        decay = config.weight_decay * optim.is_weight(path, declared[path])
        want = kept[path] * (1 - rate * decay) - rate * g / (np.abs(g) + 1e-8)
        off = np.abs(np.float64(leaf) - want)
        # Sums and products at the size of the parameter and of the step; 1 - 0.999, by which Adam
        # corrects, has the rounding of 0.999; epsilon moves it by its share of the gradient.
        relative = (16 + 1 / 0.001) * U + 1e-8 / np.maximum(np.abs(g), 1e-5)
        room = 4 * U * np.abs(kept[path]) + rate * relative
        assert np.all(off[known] <= room[known]), path
        sure += known.sum()
    assert sure > 0.8 * size
