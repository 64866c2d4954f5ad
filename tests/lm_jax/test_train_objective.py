"""Another job in the same loop: adapters over frozen weights, with a state of its own."""

import dataclasses
import functools

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

from lm_jax import lora
from lm_jax import params as params_lib
from lm_jax.errors import UsageError
from lm_jax.train import loop, optim, step
from lm_jax.train.config import TrainConfig, Upkeep
from lm_jax.train.objective import LanguageModelling, token_loss
from lm_jax.train.state import init_state
from tests.lm_jax import tiny_training as tiny

SETTINGS = lora.LoraSettings(rank=2, alpha=4.0)
CONFIG = TrainConfig(steps=6, learning_rate=1e-2, eval_every=3, early_stop=False)


@struct.dataclass
class Seen:
    """How many updates there were, and the sum of their losses."""

    updates: jax.Array
    losses: jax.Array


@dataclasses.dataclass(frozen=True)
class Adapting(LanguageModelling):
    """Trains adapters; its metric `pulled` is the loss times `updates`, their number before."""

    columns: tuple[str, ...] = ("pulled", "updates")

    @property
    def spec(self):
        return lora.adapter_spec(tiny.SPEC, SETTINGS)

    def start(self):
        return Seen(jnp.zeros(()), jnp.zeros(()))

    def shares(self, params, frozen, extra, tokens_BS, totals, rng):
        del rng
        laid = lora.attach(frozen, params, SETTINGS)
        loss = token_loss(laid, tokens_BS, self.cfg, self.mixer)[0] / totals["tokens"]
        return loss, {"loss": loss, "pulled": loss * extra.updates}

    def update(self, extra, metrics):
        after = Seen(extra.updates + 1, extra.losses + metrics["loss"])
        return after, {"updates": extra.updates}

    def evaluate(self, params, frozen, tokens_BS):
        laid = lora.attach(frozen, params, SETTINGS)
        total, count = token_loss(laid, tokens_BS, self.cfg, self.mixer)
        return {"loss": total, "tokens": count, "rows": jnp.ones(2, jnp.int32) * len(tokens_BS)}


OBJECTIVE = Adapting(tiny.CFG)


def train(folder, **options):
    return loop.train(
        folder,
        OBJECTIVE,
        CONFIG,
        tiny.BATCHES,
        tiny.VALIDATION,
        seed=1,
        mesh=tiny.mesh(),
        frozen=tiny.initial_params(),
        upkeep=Upkeep(log_every=2, save_every=2),
        **options,
    )


class Killed(BaseException):
    """Stands for the end of the process."""


def kill_at_4(now):
    if now == 4:
        raise Killed


def test_its_state_and_metrics_are_kept_and_resumed_to_the_bit(tmp_path):
    trained = train(tmp_path / "whole")
    table = pq.read_table(tmp_path / "whole" / "metrics.parquet").to_pydict()
    losses = np.array(table["loss"], np.float32)
    np.testing.assert_allclose(table["pulled"], losses * np.arange(6), rtol=1e-6)
    assert table["updates"] == list(range(6))
    extra = trained.state.extra
    assert float(extra.updates) == 6
    assert float(extra.losses) == pytest.approx(losses.sum(dtype=np.float64), rel=1e-6)
    # It learns, and what it evaluates is the adapted model.
    first, last = (
        row["value"]
        for row in pq.read_table(tmp_path / "whole" / "evaluations.parquet").to_pylist()
        if row["name"] == "validation/perplexity"
    )
    assert last < first < 32

    with pytest.raises(Killed):
        train(tmp_path / "killed", on_step=kill_at_4)
    tiny.assert_bitwise(train(tmp_path / "killed").state, trained.state)


def test_micro_batches_add_up_to_the_batch():
    """Gradients, metrics and the extra state of four micro-batches are those of the whole."""
    mesh, extra = tiny.mesh(), Seen(jnp.ones(()), jnp.ones(()))

    def updated(accumulate):
        config = dataclasses.replace(CONFIG, accumulate=accumulate, warmup=0.0)
        optimizer = optim.adamw(OBJECTIVE.spec, config)
        state = init_state(jax.random.key(0), mesh, OBJECTIVE.spec, optimizer, extra=extra)
        tokens_BS = jnp.asarray(tiny.BATCHES.at(0)["tokens"])
        update = step.make_train_step(OBJECTIVE, mesh, config)
        return update(state, tiny.initial_params(), tokens_BS, jax.random.key(1))

    (one, metrics), (four, others) = updated(1), updated(4)
    for name in ("loss", "pulled", "grad_norm"):
        assert float(metrics[name]) == pytest.approx(float(others[name]), rel=1e-5), name
    assert float(four.extra.losses) == pytest.approx(1.0 + float(metrics["loss"]), rel=1e-6)
    pairs = zip(jax.tree.leaves(one.params), jax.tree.leaves(four.params), strict=True)
    assert max(float(jnp.abs(a - b).max()) for a, b in pairs) < 1e-5


def test_the_first_update_moves_the_second_factor_alone():
    """The gradient by `down` is zero while `up` is."""
    mesh = tiny.mesh()
    config = dataclasses.replace(CONFIG, warmup=0.0, weight_decay=0.0)
    draw = functools.partial(init_state, jax.random.key(0), mesh, OBJECTIVE.spec)
    state = draw(optim.adamw(OBJECTIVE.spec, config), extra=OBJECTIVE.start())
    before = jax.tree.map(np.asarray, params_lib.by_path(state.params))
    tokens_BS = jnp.asarray(tiny.BATCHES.at(0)["tokens"])
    update = step.make_train_step(OBJECTIVE, mesh, config)
    after, _ = update(state, tiny.initial_params(), tokens_BS, jax.random.key(1))
    for path, leaf in params_lib.by_path(after.params).items():
        moved = not np.array_equal(leaf, before[path])
        assert moved == path.endswith("/up"), path


def test_what_cannot_be():
    with pytest.raises(UsageError, match=r"dropout = 1\.0 must be .*; dtype = 'half'"):
        LanguageModelling(tiny.CFG, dropout=1.0, dtype="half")
