"""Trains transcoders of growing sparsity on the two-hop model, and measures their paths.

Besides what every study has, the work folder holds `rows.parquet`, a row for each transcoder.
"""

from collections.abc import Iterator
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.parallel import sharding
from lm_jax.study import Work
from lm_jax.train.state import StateLayout
from lm_jax.train.step import make_train_step
from sparse_jax.studies.two_hop.numbers import paths
from sparse_jax.studies.two_hop.results import ROWS, Paths, TwoHopRun, TwoHopSummary
from sparse_jax.studies.two_hop.settings import TwoHopConfig
from sparse_jax.transcoders.objective import Penalties
from sparse_jax.transcoders.transcoder import Transcoder, TranscoderConfig
from sparse_jax.transcoders.two_hop_model import TwoHopModel, TwoHopTranscoding, one_token


class Unit(NamedTuple):
    """One transcoder: the model whose activations it is trained on, and its settings."""

    second_hop: str
    window: int
    sparsity: float
    seed: int

    @property
    def id(self) -> tuple[str | int, ...]:
        """The key of the transcoder in the store of rows."""
        return (self.second_hop, self.window, repr(self.sparsity), self.seed)


def plan(config: TwoHopConfig) -> Iterator[Unit]:
    """All transcoders of the study."""
    for each in itertools.product(
        config.second_hops, config.windows, config.sparsities, config.seeds
    ):
        yield Unit(*each)


def measure(config: TwoHopConfig, work: Work) -> TwoHopSummary:
    """Trains and measures every transcoder that has no row yet."""
    units = {each.id: each for each in plan(config)}
    table = work.units("rows", ROWS, units, functools.partial(_row, config))
    found = {tuple(row[name] for name in Unit._fields): row for row in table.to_pylist()}
    names = [field.name for field in dataclasses.fields(Paths)]
    runs = [
        TwoHopRun(*unit, Paths(**{name: found[tuple(unit)][name] for name in names}))
        for unit in plan(config)
    ]
    return TwoHopSummary(tuple(runs), jax.devices()[0].device_kind)


def _row(config: TwoHopConfig, unit: Unit) -> dict[str, list[Any]]:
    model = TwoHopModel(config.groups, unit.second_hop)
    measured = trained(config, model, unit.window, unit.sparsity, unit.seed)
    values = unit._asdict() | dataclasses.asdict(measured)
    return {name: [value] for name, value in values.items()}


def trained(
    config: TwoHopConfig, model: TwoHopModel, window: int, sparsity: float, seed: int
) -> Paths:
    """Trains one transcoder of a model and measures it."""
    objective = TwoHopTranscoding(
        TranscoderConfig(
            num_layers=2,
            hidden_size=model.hidden_size,
            features=config.features,
            window=window or None,
            bandwidth=config.bandwidth,
        ),
        Penalties(sparsity=sparsity),
        config.steps,
        skip_start=0,
        make_batch=one_token,
        model=model,
    )
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    update = make_train_step(objective, mesh, config.train)
    key = jax.random.key(seed)
    state = StateLayout.of(objective, mesh, config.train).init(key)
    rng = np.random.default_rng(seed)
    for _ in range(config.steps):
        drawn_XB = rng.random((config.batch_size, 4 * config.groups)) < config.probability
        state, _ = update(state, None, jnp.asarray(drawn_XB, jnp.int32), key)
    return paths(Transcoder(state.params, objective.cfg), model, config.probability)
