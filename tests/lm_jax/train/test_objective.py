"""Another job in the same loop: adapters over frozen weights, with a state of its own."""

import dataclasses
import functools

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

from lm_jax.errors import UsageError
from lm_jax.model import lora
from lm_jax.model import params as params_lib
from lm_jax.model.decoder import forward
from lm_jax.train import loop, optim, step
from lm_jax.train.config import CheckpointPolicy, TrainConfig
from lm_jax.train.objective import LanguageModelling, token_loss
from lm_jax.train.state import init_state
from tests import rounding
from tests.lm_jax.train import tiny_training as tiny

SETTINGS = lora.LoraConfig(rank=2, alpha=4.0)
CONFIG = TrainConfig(steps=6, learning_rate=1e-2, eval_every=3, early_stop=False)


@struct.dataclass
class AuxState:
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

    def init_state(self):
        return AuxState(jnp.zeros(()), jnp.zeros(()))

    def loss_terms(self, params, frozen, aux_state, tokens_BS, normalizers, rng):
        del rng
        laid = lora.attach(frozen, params, SETTINGS)
        loss = token_loss(laid, tokens_BS, self.cfg, self.mixer)[0] / normalizers["tokens"]
        return loss, {"loss": loss, "pulled": loss * aux_state.updates}

    def update(self, aux_state, metrics):
        after = AuxState(aux_state.updates + 1, aux_state.losses + metrics["loss"])
        return after, {"updates": aux_state.updates}

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
        policy=CheckpointPolicy(log_every=2, save_every=2),
        **options,
    )


class Killed(BaseException):
    """Simulates the end of the process."""


def kill_at_4(now):
    if now == 4:
        raise Killed


def test_its_state_and_metrics_are_kept_and_resumed_to_the_bit(tmp_path):
    train_result = train(tmp_path / "whole")
    table = pq.read_table(tmp_path / "whole" / "metrics.parquet").to_pydict()
    losses = np.array(table["loss"], np.float32)
    np.testing.assert_array_equal(table["pulled"], losses * np.arange(6, dtype=np.float32))
    assert table["updates"] == list(range(6))
    aux_state = train_result.state.aux_state
    assert float(aux_state.updates) == 6
    # One after the other, each sum in float32.
    assert float(aux_state.losses) == np.cumsum(losses)[-1]
    # It learns, and evaluates the adapted model.
    first, last = (
        row["value"]
        for row in pq.read_table(tmp_path / "whole" / "evaluations.parquet").to_pylist()
        if row["name"] == "validation/perplexity"
    )
    assert last < first < 32

    with pytest.raises(Killed):
        train(tmp_path / "killed", on_step=kill_at_4)
    tiny.assert_bitwise(train(tmp_path / "killed").state, train_result.state)


def test_micro_batches_add_up_to_the_batch():
    """Gradients, metrics and the extra state of four micro-batches are those of the whole."""
    mesh, aux_state = tiny.mesh(), AuxState(jnp.ones(()), jnp.ones(()))
    tokens_BS = jnp.asarray(tiny.BATCHES.at(0)["tokens"])
    target_BT = tokens_BS[:, 1:]

    def started(config):
        optimizer = optim.adamw(OBJECTIVE.spec, config)
        return init_state(jax.random.key(0), mesh, OBJECTIVE.spec, optimizer, aux_state=aux_state)

    def mean(adapters, frozen):
        laid = lora.attach(frozen, adapters, SETTINGS)
        log_p_BTV = jax.nn.log_softmax(forward(laid, tokens_BS[:, :-1], tiny.CFG).logits)
        log_p_BT = jnp.take_along_axis(log_p_BTV, target_BT[..., None], axis=-1)[..., 0]
        return -jnp.sum(jnp.where(target_BT == 0, 0.0, log_p_BT)) / jnp.sum(target_BT != 0)

    config = dataclasses.replace(CONFIG, warmup=0.0)
    before = jax.tree.map(np.asarray, started(config).params)
    wanted = rounding.expected(jax.value_and_grad(mean), before, tiny.initial_params())
    for accumulate in (1, 4):
        config = dataclasses.replace(config, accumulate=accumulate)
        update = step.make_train_step(OBJECTIVE, mesh, config)
        state = started(config)
        after, metrics = update(state, tiny.initial_params(), tokens_BS, jax.random.key(1))
        tiny.assert_is_the_update_of(after, metrics, wanted, before, OBJECTIVE.spec, config)
        # Times the one update before, and added to the one of its loss.
        assert float(metrics["pulled"]) == float(metrics["loss"])
        assert float(after.aux_state.losses) == np.float32(1) + np.float32(metrics["loss"])


def test_the_first_update_moves_the_second_factor_alone():
    """The gradient by `down` is zero while `up` is."""
    mesh = tiny.mesh()
    config = dataclasses.replace(CONFIG, warmup=0.0, weight_decay=0.0)
    draw = functools.partial(init_state, jax.random.key(0), mesh, OBJECTIVE.spec)
    state = draw(optim.adamw(OBJECTIVE.spec, config), aux_state=OBJECTIVE.init_state())
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
