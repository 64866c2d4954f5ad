"""Time and memory of a post-training step relative to the same step with dense attention.

    python -m tools.bench.posttrain                      SmolLM2's shape at T = 512, this device
    python -m tools.bench.posttrain --layers 4 --batch 2
    python -m tools.bench.posttrain --compiled           temporary memory by length on a GPU target

Both steps train the same adapters over the same frozen weights, without a teacher, so that they
differ in the gates alone; the dense one computes attention as the library's dense training does,
without whole scores. First the gated loss with every gate open is compared with the dense
one; if they differ, nothing is timed and the exit code is 1. Steps run in turns, so that load on
the machine affects both; the median ratio is printed with its range. `--compiled` needs no GPU
(docs/kernels/without_gpu.md says what to install): it compiles loss and gradient for an H200 and
prints the temporary memory that XLA allocates.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import functools
from pathlib import Path
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.model import params as params_lib
from lm_jax.model.config import DecoderConfig, Rope
from lm_jax.model.decoder import Output, param_spec
from lm_jax.model.lora import LoraConfig
from lm_jax.model.params import ParamTree
from lm_jax.parallel import sharding
from lm_jax.train.config import TrainConfig
from lm_jax.train.objective import LMBatch, training_softmax
from lm_jax.train.state import StateLayout
from lm_jax.train.step import make_train_step
from sparse_jax.gates.geco import GecoConfig
from sparse_jax.gates.objective import Sparsifying
from tools.bench import front
from tools.gpu_code import target

SHAPE = DecoderConfig(
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    mlp_size=1536,
    vocab_size=49_152,
    max_length=8_192,
    rope=Rope(theta=100_000.0),
    tie_embeddings=True,
)
STRENGTH = GecoConfig.fixed(1.0)
# Relative difference of losses, from two orders of summation in float32.
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Dense(Sparsifying):
    """The same objective with the dense attention of the library's own training."""

    def run(self, params: ParamTree, frozen: Any, batch: LMBatch, **gates: Any) -> Output:
        del gates
        weights = self._weights(params, frozen)
        output = lm_jax.forward(
            weights,
            batch.input_BT,
            self.cfg,
            attend=training_softmax(weights, self.cfg, self.mixer),
            mixer=self.mixer,
            valid_BT=batch.input_mask_BT,
            remat=self.remat,
        )
        # The loss has no term of edges, of which none is counted.
        none_LBN = jnp.zeros((self.cfg.num_layers, 1, self.cfg.num_heads))
        return dataclasses.replace(output, aux={"expected_edges_BN": none_LBN})


def tasks(cfg: DecoderConfig, dtype: str, **options: Any) -> tuple[Dense, Sparsifying]:
    """The dense objective and the gated one."""
    adapters = LoraConfig(rank=16, alpha=32.0)
    dense = Dense(cfg, STRENGTH, adapters=adapters, distill=0.0, dtype=dtype, **options)
    fields = {f.name: getattr(dense, f.name) for f in dataclasses.fields(dense)}
    return dense, Sparsifying(**fields)


class Step:
    """A training step that continues from its own result, as training does."""

    def __init__(self, task: Sparsifying, frozen: Any, tokens_BS: np.ndarray) -> None:
        mesh = sharding.make_mesh(devices=jax.devices()[:1])
        settings = TrainConfig(steps=1_000, learning_rate=1e-4)
        self._frozen, self._key = frozen, jax.random.key(1)
        self._tokens = sharding.shard_batch(mesh, tokens_BS)
        self.state = StateLayout.of(task, mesh, settings).init(jax.random.key(0))
        step = make_train_step(task, mesh, settings)
        donating = jax.jit(step, donate_argnums=0)
        self._step = donating.lower(self.state, frozen, self._tokens, self._key).compile()
        analysis: Any = self._step.memory_analysis()
        self.bytes = analysis.temp_size_in_bytes

    def __call__(self) -> None:
        self.state, metrics = self._step(self.state, self._frozen, self._tokens, self._key)
        jax.block_until_ready(metrics)


def weights(cfg: DecoderConfig, dtype: str) -> Any:
    """Random weights of a model."""
    params = jax.jit(functools.partial(lm_jax.init_params, cfg=cfg))(jax.random.key(0))
    return jax.tree.map(lambda x: x.astype(dtype), params)


def open_difference(cfg: DecoderConfig, frozen: Any, tokens_BS: np.ndarray) -> float:
    """Relative difference of the gated loss with every gate open from the dense loss."""
    dense, gated = tasks(cfg, "float32", bias=1e4)
    params = params_lib.init(jax.random.key(0), dense.spec)
    tokens = jnp.asarray(tokens_BS)
    losses = [
        jax.jit(task.loss_terms)(
            params, frozen, task.init_state(), tokens, task.normalizers(tokens), jax.random.key(1)
        )[1]["loss"]
        for task in (dense, gated)
    ]
    return abs(float(losses[1] / losses[0]) - 1.0)


def bench(cfg: DecoderConfig, length: int, batch: int, dtype: str, repeats: int) -> dict[str, Any]:
    """Times both steps in turns; returns {} and prints a line if open gates are not dense."""
    tokens_BS = np.random.default_rng(0).integers(0, cfg.vocab_size, (batch, length + 1), np.int32)
    frozen = weights(cfg, "float32")
    label = f"training step, batch {batch} x {length}, {dtype}"
    off = open_difference(cfg, frozen, tokens_BS)
    what = "with every gate open the loss differs from the dense one by"
    if not front.agrees(label, off, TOLERANCE, what):
        return {}
    frozen = jax.tree.map(lambda x: x.astype(dtype), frozen)
    names = ("dense", "gated")
    steps = {
        name: Step(task, frozen, tokens_BS)
        for name, task in zip(names, tasks(cfg, dtype), strict=True)
    }
    memory = {name: step.bytes for name, step in steps.items()}
    seconds = front.timed(label, steps, repeats, memory=memory)
    return {"seconds": seconds, "temporary_bytes": list(memory.values())}


def compiled(cfg: DecoderConfig, lengths: Sequence[int], batch: int) -> dict[str, Any]:
    """Temporary memory in bytes of loss and gradient on the target, by length."""
    _, gated = tasks(cfg, "bfloat16", remat=True)
    frozen = params_lib.abstract(param_spec(cfg), jnp.bfloat16)
    params = params_lib.abstract(gated.spec)
    results: dict[str, int] = {}
    for length in lengths:

        def run(params: Any, frozen: Any, tokens_BS: jax.Array, seed: jax.Array) -> Any:
            key, normalizers = jax.random.key(seed), gated.normalizers(tokens_BS)
            differentiate = jax.value_and_grad(gated.loss_terms, has_aux=True)
            return differentiate(params, frozen, gated.init_state(), tokens_BS, normalizers, key)

        tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
        seed = jax.ShapeDtypeStruct((), jnp.uint32)
        with tempfile.TemporaryDirectory() as dump:
            program = target.compile_(run, params, frozen, tokens, seed, dump=Path(dump))
        analysis: Any = program.memory_analysis()
        results[str(length)] = analysis.temp_size_in_bytes
        first = results[str(lengths[0])] * length / lengths[0]
        print(
            f"  {length:7,} tokens  {results[str(length)] / 2**20:8.1f} MiB temporary, "
            f"{results[str(length)] / first:.2f} of linear growth"
        )
    return results


def run(arguments: argparse.Namespace, record: front.Record) -> bool:
    """Times both steps, or compiles one; false where open gates are not dense attention."""
    cfg = dataclasses.replace(SHAPE, num_layers=arguments.layers)
    if arguments.compiled:
        return record.keep("compiled", compiled(cfg, arguments.lengths, arguments.batch))
    given = arguments.length, arguments.batch, arguments.dtype, arguments.repeats
    return record.keep("step", bench(cfg, *given))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = front.parser("bench.posttrain", __doc__, repeats=5)
    parser.add_argument("--layers", type=int, default=SHAPE.num_layers)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compiled", action="store_true", help="memory on a GPU target instead")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1_024, 2_048, 4_096])
    return front.run(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
