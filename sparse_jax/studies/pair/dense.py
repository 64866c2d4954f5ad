"""Pretraining of the dense model: a constant rate to the plateau of its held-out loss, then none.

    <folder>/plateau/     the first phase (`lm_jax.train.loop`), which ends where the held-out loss
                          no longer falls (`DenseConfig.plateau`)
    <folder>/cooldown/    the second one, from its last weights: the rate falls linearly to zero
    <folder>/result.json  `results.DenseTraining`
    <folder>/model/       the model as a Hugging Face folder, written last

The second phase reads the batches that follow those of the first.
"""

from pathlib import Path

import jax
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import count_params
from lm_jax.model.params import ParamTree
from lm_jax.parallel import sharding
from lm_jax.run import processes
from lm_jax.run.files import write_bytes, write_json
from lm_jax.run.results import load_result
from lm_jax.text.examples import Batch, Batches, Examples, OnePass
from lm_jax.text.prepared import Prepared
from lm_jax.train.config import CheckpointPolicy
from lm_jax.train.loop import TrainResult, TrainRun, train
from lm_jax.train.metrics import METRICS
from lm_jax.train.objective import LanguageModelling, ignore_index_batch
from lm_jax.weights import card as cards
from lm_jax.weights.save import save_pretrained
from sparse_jax.studies.pair.folders import MODEL
from sparse_jax.studies.pair.results import DenseTraining, Phase
from sparse_jax.studies.pair.settings import PairConfig

RESULT = "result.json"
PLATEAU, COOLDOWN = "plateau", "cooldown"


class Following:
    """The batches after the first `skip` of another sequence."""

    def __init__(self, batches: Batches, skip: int):
        self._batches, self._skip = batches, skip
        self.fingerprint = f"{batches.fingerprint} skip={skip}"
        self.per_epoch = batches.per_epoch

    def at(self, k: int) -> Batch:
        """Batch `skip + k` of the sequence."""
        return self._batches.at(self._skip + k)


def train_dense(
    config: PairConfig, prepared: Prepared, folder: Path, mesh: jax.sharding.Mesh
) -> DenseTraining:
    """Trains the dense model, or resumes its training, and exports it.

    Args:
      config: settings of the pair.
      prepared: the text of pretraining.
      folder: folder of the dense model, created if need be.
      mesh: the devices.

    Raises:
      As `lm_jax.train.loop.train`.
    """
    if not (folder / MODEL).exists():
        _train(config, prepared, folder, mesh)
    return load_result(folder / RESULT, DenseTraining)


def _train(config: PairConfig, prepared: Prepared, folder: Path, mesh: jax.sharding.Mesh) -> None:
    dense = config.dense
    processes.on_first(lambda: folder.mkdir(parents=True, exist_ok=True))
    share = sharding.own_block(mesh, dense.batch_size)
    examples, held_out = (
        Examples(prepared, split, context=config.context, mode="window")
        for split in ("train", "validation")
    )
    batches = Batches(examples, seed=dense.seed, **share)
    validation = OnePass(held_out, **share)
    cfg = dense.decoder(prepared.tokenizer.vocab_size, config.context)
    objective = LanguageModelling(cfg, make_batch=ignore_index_batch)
    policy = CheckpointPolicy(save_every=dense.eval_every, allow_fallback=config.allow_fallback)

    def phase(name: str, batches: Batches | Following, params: ParamTree | None) -> TrainResult:
        return train(
            folder / name,
            TrainRun(
                objective=objective,
                config=dense.phase(cooldown=name == COOLDOWN),
                batches=batches,
                validation=validation,
                seed=dense.seed,
                params=params,
            ),
            mesh,
            policy,
        )

    first = phase(PLATEAU, batches, None)
    steps = int(first.state.step)
    # Passed on as host arrays: a step consumes the state it is given.
    weights = sharding.fetch(first.state.params)
    second = phase(COOLDOWN, Following(batches, steps), weights)
    final = sharding.fetch(second.state.params)
    result = DenseTraining(
        parameters=count_params(cfg),
        context=config.context,
        vocab_size=cfg.vocab_size,
        batches_per_epoch=batches.per_epoch,
        plateau=_phase(folder / PLATEAU, first),
        reached_plateau=first.history.stopped_early,
        cooldown=_phase(folder / COOLDOWN, second),
    )
    text = _card(config, result).encode()
    processes.on_first(lambda: _save(folder, cfg, final, prepared, result, text))


def _phase(folder: Path, run: TrainResult) -> Phase:
    rows = pq.read_table(folder / METRICS)
    if run.history.last is None:
        raise ValueError(f"{folder} was not evaluated")
    return Phase(
        steps=int(run.state.step),
        tokens=int(pc.sum(rows["tokens"]).as_py()),
        seconds=float(pc.sum(rows["seconds"]).as_py()),
        loss=run.history.last,
    )


def _save(
    folder: Path,
    cfg: DecoderConfig,
    params: ParamTree,
    prepared: Prepared,
    result: DenseTraining,
    text: bytes,
) -> None:
    write_json(folder / RESULT, result)
    save_pretrained(folder / MODEL, cfg, params, prepared.tokenizer)
    write_bytes(folder / MODEL / cards.CARD, text)


def _card(config: PairConfig, result: DenseTraining) -> str:
    text, dense = config.text, config.dense
    return cards.card(
        "The dense model of a pair",
        "A decoder of Llama's blocks, trained from nothing until its held-out loss stood still or "
        "its updates were used up, then with a falling rate; sparse models are made from it.",
        {
            "parameters": result.parameters,
            "layers": dense.num_layers,
            "heads a layer": dense.num_heads,
            "width": dense.hidden_size,
            "vocabulary": result.vocab_size,
            "context": result.context,
            "text": f"{cards.portable(text.source)}, and prompts as {text.task_share:.0%} of the "
            f"documents: {', '.join(text.tasks)}",
            "updates": result.plateau.steps + result.cooldown.steps,
            "tokens trained on": result.plateau.tokens + result.cooldown.tokens,
            "plateau reached": "yes" if result.reached_plateau else "no",
            "held-out loss, nats per token": result.cooldown.loss,
            "seed": f"{dense.seed}, one run",
        },
        'Load it with `lm_jax.load_pretrained("this folder")` or `transformers`. It is far too '
        "small to be of use as a language model; its text decides its licence.",
    )
