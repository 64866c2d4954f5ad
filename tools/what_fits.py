"""What fits where: memory of one device for each job, by the compiler, with nothing allocated.

    python -m tools.what_fits
    python -m tools.what_fits --model=1B --context=4096

Each job is compiled for one row of `--context` tokens, with abstract bfloat16 weights: the forward
pass, the passes of an audit, the step that post-trains adapters to sparse attention, and the
step that pretrains all weights with AdamW; and an attribution graph of a prompt of that length by
transcoders of each MLP, of 16,384 features of which 20 are active at a token. Arguments are the
weights and what a job keeps between calls; temporaries are the compiler's highest. A CPU's compiler
computes bfloat16 products in float32, and forms scores where a GPU has kernels (`docs/kernels`), so
that a GPU needs less.

`--model` is as in `tools.plan_training`. Exit codes: 0, 2 usage, 3 no such model.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp

from iaj.parser import Parser, run_parsed
from iaj_kernels.row_map_attention.maps import relu_power
import lm_jax
from lm_jax.console.terminal import format_table
from lm_jax.errors import UsageError
from lm_jax.model import lora
from lm_jax.model import params as params_lib
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import param_spec
from lm_jax.model.precision import exact_jit
from lm_jax.train.objective import LanguageModelling
from polyattn_jax.audit import measure
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.gates.geco import GecoConfig
from sparse_jax.gates.objective import Sparsifying
from sparse_jax.graphs.linear import GatheredWrites, Targets, attribution_rows
from sparse_jax.graphs.replacement import record
from sparse_jax.graphs.rows import rounded, targets_at_once
from sparse_jax.transcoders.transcoder import Transcoder, TranscoderConfig
from sparse_jax.transcoders.transcoder import spec as transcoder_spec
from tools.plan_training import chosen_models, compile_objective

DTYPE = "bfloat16"
CONTEXTS = (1_024, 4_096)
# Device memory in GB (1e9 bytes), of the data sheets, smallest first.
DEVICES = {"a 24 GB card": 24.0, "an A100 40 GB": 40.0, "an H100 80 GB": 80.0, "an H200": 141.0}


# Features of each layer's transcoder of a graph, and active ones of a token in each.
FEATURES, ACTIVE = 16_384, 20


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes of a compiled job on one device."""

    arguments: int
    temporary: int

    @property
    def total(self) -> int:
        """The bytes of arguments and temporaries together."""
        return self.arguments + self.temporary

    @property
    def device(self) -> str:
        """The smallest device of `DEVICES` that holds it, or "more than one"."""
        holds = (name for name, size in DEVICES.items() if self.total <= size * 1e9)
        return next(holds, "more than one")


def forward(cfg: DecoderConfig, context: int) -> Need:
    """The logits of the last position."""

    @jax.jit
    def run(params: Any, tokens_BT: jax.Array) -> jax.Array:
        return lm_jax.forward(params, tokens_BT, cfg, logits_at=jnp.array([[context - 1]])).logits

    return _need(run.lower(_weights(cfg), _ids(1, context)))


def audit(cfg: DecoderConfig, context: int) -> Need:
    """The larger of two passes: a query's rows diagnosed at two biases, and an answer by p = 4."""
    heads_LN = jax.ShapeDtypeStruct((cfg.num_layers, cfg.num_heads), jnp.bool_)
    weights, ids, id_ = _weights(cfg), _ids(1, context), _ids(1, 1)
    diagnosing = measure.diagnose.lower(weights, ids, id_, id_, jnp.zeros(2), cfg=cfg)
    chosen = (jnp.int32(0), jnp.float32(0), heads_LN)
    answering = measure.evaluate.lower(
        weights, ids, _ids(1), _ids(1), *chosen, cfg=cfg, maps=(relu_power(4),)
    )
    both = _need(diagnosing), _need(answering)
    return Need(max(n.arguments for n in both), max(n.temporary for n in both))


def posttraining(cfg: DecoderConfig, context: int) -> Need:
    """A step of `iaj sparse posttrain` with adapters, no teacher, layers rematerialised."""
    objective = Sparsifying(
        cfg,
        GecoConfig.fixed(1.0),
        adapters=lora.LoraConfig(),
        distill=0.0,
        dtype=DTYPE,
        remat=True,
    )
    return _step(objective, context, _weights(cfg))


def pretraining(cfg: DecoderConfig, context: int) -> Need:
    """A step of `iaj protot pretrain` of a decoder with attention."""
    return _step(LanguageModelling(cfg, dtype=DTYPE), context, ())


def graph(cfg: DecoderConfig, context: int) -> Need:
    """The larger of a graph's two programs: what is frozen of a prompt, and rows of a chunk."""
    sizes = TranscoderConfig(cfg.num_layers, cfg.hidden_size, FEATURES, "jumprelu", 1)
    transcoder = Transcoder(params_lib.abstract(transcoder_spec(sizes)), sizes)
    weights = _weights(cfg)
    model = CircuitModel(weights, cfg)
    record_prompt = exact_jit(record)
    replacement, _ = jax.eval_shape(record, model, transcoder, _ids(context))
    recording = _need(record_prompt.lower(model, transcoder, _ids(context)))
    Z = rounded(ACTIVE * cfg.num_layers)
    X = targets_at_once(replacement, Z, "gpu")
    table = _ids(context, Z), _ids(context, Z), _floats(context, Z)
    writes = GatheredWrites(transcoder, *table)
    targets = Targets(_ids(X), _ids(X), _floats(X, cfg.hidden_size), _floats(X))
    rows = _need(exact_jit(attribution_rows).lower(replacement, writes, targets))
    # Weights of the model are held beside the arguments of the rows.
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
    rows = dataclasses.replace(rows, arguments=rows.arguments + held)
    return max(recording, rows, key=lambda need: need.total)


JOBS: dict[str, Callable[[DecoderConfig, int], Need]] = {
    "forward pass": forward,
    "audit": audit,
    "post-training, adapters": posttraining,
    "pretraining, all weights": pretraining,
    "attribution graph": graph,
}


def _step(objective: Any, context: int, frozen: Any) -> Need:
    compiled = compile_objective(objective, (1, context + 1), (1, 1, 1), frozen)
    return Need(compiled.arguments, compiled.temporary)


def _weights(cfg: DecoderConfig) -> Any:
    return params_lib.abstract(param_spec(cfg), jnp.bfloat16)


def _ids(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _need(lowered: jax.stages.Lowered) -> Need:
    sizes = lowered.compile().memory_analysis()
    assert sizes is not None
    return Need(sizes.argument_size_in_bytes, sizes.temp_size_in_bytes + sizes.output_size_in_bytes)


HEADS = ("model", "job", "tokens", "weights and state GB", "temporary GB", "total GB", "fits")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table, row by row in the order of models, jobs and contexts."""
    contexts = arguments.context or CONTEXTS
    if min(contexts) < 2:
        raise UsageError(f"--context={min(contexts)} must be at least 2")
    rows = []
    for name, cfg in chosen_models(arguments.model).items():
        for job, compiled in JOBS.items():
            for context in contexts:
                need = compiled(cfg, context)
                sizes = (need.arguments, need.temporary, need.total)
                numbers = [f"{size / 1e9:,.2f}" for size in sizes]
                rows.append((name, job, f"{context:,}", *numbers, need.device))
    print(f"computed for one row on one device, {DTYPE}, by a CPU's compiler")
    print(format_table(HEADS, rows, left=(0, 1, 6)))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; a refusal is one line on standard error."""
    parser = Parser("python -m tools.what_fits", __doc__)
    parser.add_argument("--model", action="append", help="135M, 1B, 7B, or a model; repeatable")
    parser.add_argument("--context", action="append", type=int, help="tokens; repeatable")
    # Nothing is run, so that any machine will do.
    jax.config.update("jax_platforms", "cpu")
    return run_parsed(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
