"""Trains transcoders of growing sparsity on the two-hop model, and measures their paths.

The work folder then holds

    summary.json    `TwoHopSummary`, written last
    report.html     the page, one offline file

Nothing is resumed: the whole study takes about two minutes.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.parallel import sharding
from lm_jax.run.files import to_jsonable, write_json, write_text
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.train import optim
from lm_jax.train.state import init_state
from lm_jax.train.step import make_train_step
from sparse_jax.studies.two_hop import report
from sparse_jax.studies.two_hop.config import TwoHopConfig
from sparse_jax.studies.two_hop.measures import paths
from sparse_jax.studies.two_hop.results import Paths, TwoHopRun, TwoHopSummary
from sparse_jax.studies.two_hop.toy import TwoHopModel, TwoHopTranscoding, one_token
from sparse_jax.transcoders.objective import Penalties
from sparse_jax.transcoders.transcoder import Transcoder, TranscoderConfig

SUMMARY, REPORT = "summary.json", "report.html"


def run(config: TwoHopConfig, folder: Path) -> TwoHopSummary:
    """The whole study; writes the files named in the head of this module."""
    seeds = {f"run {seed}": seed for seed in config.seeds}
    record_provenance(folder, collect_provenance(seeds=seeds, dtype="float32"))
    runs = [
        TwoHopRun(
            second_hop,
            window,
            sparsity,
            seed,
            trained(config, TwoHopModel(config.groups, second_hop), window, sparsity, seed),
        )
        for second_hop in config.second_hops
        for window in config.windows
        for sparsity in config.sparsities
        for seed in config.seeds
    ]
    summary = TwoHopSummary(tuple(runs), jax.devices()[0].device_kind)
    origin = to_jsonable(read_provenance(folder))
    write_text(folder / REPORT, report.build(config, summary.runs, provenance=origin))
    write_json(folder / SUMMARY, summary)
    return summary


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
    optimizer = optim.adamw(objective.spec, config.train, optim.is_weight)
    key = jax.random.key(seed)
    state = init_state(key, mesh, objective.spec, optimizer, aux_state=objective.init_state())
    rng = np.random.default_rng(seed)
    for _ in range(config.steps):
        drawn_XB = rng.random((config.batch_size, 4 * config.groups)) < config.probability
        state, _ = update(state, None, jnp.asarray(drawn_XB, jnp.int32), key)
    return paths(Transcoder(state.params, objective.cfg), model, config.probability)
