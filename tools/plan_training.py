"""What a training step needs on a mesh that is not here: memory, collectives, time.

    python -m tools.plan_training
    python -m tools.plan_training --model=7B --mesh=1,8,1 --rows=1
    python -m tools.plan_training --model=135M --mesh=1,8,1 --compile

Without `--compile` every number is a formula (`memory`, `roofline`), and takes no time. With it the
step is compiled for as many devices, which this CPU plays, with abstract parameters: nothing is
allocated. Then the table has the compiler's own bytes for a device and its collectives. A CPU's
compiler keeps bfloat16 in float32 where it has no product for it, and never scatters a sum, so its
temporary memory and bytes are above those of a GPU.

`--model` is 135M (the shape of SmolLM2), 1B (Llama 3.2), 7B (Llama 2), or what
`lm_jax.load_pretrained` opens, whose weights are not read. `--mesh` is data,fsdp,tensor, one plan
each; the default is 1, 8 and 64 devices, weights split over the eight of a node. Trained are all
parameters with AdamW, as by `iaj protot pretrain --config.model=llama`.

Exit codes: 0, 2 usage, 3 no such model.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import json
import math
from pathlib import Path
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from iaj.parser import Parser, run_parsed
from lm_jax.console.terminal import format_table
from lm_jax.errors import UsageError
from lm_jax.model import params as params_lib
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import param_spec
from lm_jax.model.flops import CONVENTIONS, Causal
from lm_jax.parallel import sharding
from lm_jax.train import losses
from lm_jax.train.config import TrainConfig
from lm_jax.train.objective import LanguageModelling, Objective
from lm_jax.train.state import StateLayout
from lm_jax.train.step import check_batch, make_train_step
from lm_jax.train.throughput import data_sheet
from lm_jax.weights.load import open_pretrained
from tools.collectives import Collective, collectives

PRESETS = {
    "135M": DecoderConfig(30, 9, 3, 64, 576, 1_536, 49_152, 8_192, tie_embeddings=True),
    "1B": DecoderConfig(16, 32, 8, 64, 2_048, 8_192, 128_256, 131_072, tie_embeddings=True),
    "7B": DecoderConfig(32, 32, 32, 128, 4_096, 11_008, 32_000, 4_096),
}
MESHES = ((1, 1, 1), (1, 8, 1), (8, 8, 1))
_WIDTH = {"float32": 4, "bfloat16": 2}
_TRAINING = TrainConfig(steps=100, learning_rate=1e-3)

# Of an H100 SXM, NVIDIA's data sheets: bytes/s that one GPU sends to the others of its node
# (NVLink 4, 900 GB/s both ways), and to other nodes (one ConnectX-7 of 400 Gb/s for each GPU, as
# in a DGX H100).
NODE_BANDWIDTH, NETWORK_BANDWIDTH = 450e9, 50e9
NODE = 8


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training step: `rows` sequences of `context` tokens on each device, in `dtype`."""

    cfg: DecoderConfig
    rows: int
    context: int
    dtype: str = "bfloat16"

    @property
    def objective(self) -> LanguageModelling:
        """What is trained."""
        return LanguageModelling(self.cfg, dtype=self.dtype)

    def batch(self, ways: int) -> tuple[int, int]:
        """Rows and columns of the batch of all devices, which is split `ways` ways."""
        return self.rows * ways, self.context + 1


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device by formula.

    Attributes:
      state: float32 parameters and the two moments of AdamW.
      gradients: float32, as long as the optimizer reads them.
      copy: the parameters in the dtype of the computation, if that is another.
      saved: what the forward pass saves for the backward pass: by layer and token three vectors of
        width D, queries, keys, values, their weighted sum, and the two products of the MLP; all
        else is computed again (`lm_jax.model.layers.rematerialised`).
      work: the larger of the loss (a whole unembedding, its gradient, logits of a chunk and their
        gradient) and a layer (its weights and gradients whole, float32 scores and pattern).
    """

    state: int
    gradients: int
    copy: int
    saved: int
    work: int

    @property
    def total(self) -> int:
        """The bytes of all of it."""
        return sum(dataclasses.astuple(self))


def memory(workload: Workload, sizes: Sequence[int]) -> Memory:
    """The memory of a device on a mesh of these sizes, of which `tensor` is 1."""
    cfg, width = workload.cfg, _WIDTH[workload.dtype]
    spec = param_spec(cfg)
    held = parameters_on_a_device(spec, sizes)
    tokens = workload.rows * workload.context
    heads, keys = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    per_token = 3 * cfg.hidden_size + 2 * heads + 2 * keys + 2 * cfg.mlp_size
    table = cfg.vocab_size * cfg.hidden_size
    logits = 2 * min(losses.CHUNK_TOKENS, tokens) * cfg.vocab_size * 4
    layer = sum(math.prod(s.shape[1:]) for _, s in params_lib.leaves(spec) if s.axes[:1] == "L")
    scores = 2 * workload.rows * cfg.num_heads * workload.context**2 * 4
    return Memory(
        state=3 * 4 * held,
        gradients=4 * held,
        copy=0 if width == 4 else width * held,
        saved=cfg.num_layers * tokens * per_token * width,
        work=max(table * (width + 4) + logits, 2 * layer * width + scores),
    )


def parameters_on_a_device(spec: params_lib.ParamTree, sizes: Sequence[int]) -> int:
    """How many parameters a device holds: axes that the mesh does not divide stay whole."""
    mesh = AbstractMesh(tuple(sizes), sharding.AXES)
    return sum(
        math.prod(jax.NamedSharding(mesh, sharding.partition(mesh, leaf)).shard_shape(leaf.shape))
        for _, leaf in params_lib.leaves(spec)
    )


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of a step that its parts need alone, and the tokens of the step on one device.

    Attributes:
      compute: products, at the peak of the data sheet; by convention of causal attention.
      node: sending within nodes of `NODE` devices.
      network: sending between nodes.
      tokens: tokens of a step on one device.
    """

    compute: dict[Causal, float]
    node: float
    network: float
    tokens: int

    def rate(self, convention: Causal, *, overlap: bool) -> float:
        """Tokens/s of one device; `overlap` says whether the three happen at once or in turn."""
        parts = (self.compute[convention], self.node, self.network)
        return self.tokens / (max(parts) if overlap else sum(parts))


def roofline(workload: Workload, sizes: Sequence[int]) -> Roofline:
    """The bounds of a step on H100s with weights split over `fsdp`, `tensor` 1.

    By device and step, in the dtype of the computation: the weights are gathered twice, forward and
    backward, and the gradients scattered once, over `fsdp`; each part of the gradients is then
    summed over `data`. What crosses nodes does so once for a node, shared among its devices.

    Raises:
      UsageError: the mesh does not fill nodes.
    """
    data, fsdp, _ = sizes
    inner, outer = _within_nodes(data, fsdp)
    weights = _sent(inner, fsdp // inner)
    sums = _sent(outer, data // outer)
    rows, columns = workload.batch(data * fsdp)
    size = _WIDTH[workload.dtype] * params_lib.count(param_spec(workload.cfg))
    peak = data_sheet("H100", workload.dtype)
    assert peak is not None
    flops = {c: workload.objective.flops(rows, columns, c) for c in CONVENTIONS}
    return Roofline(
        compute={c: each / (data * fsdp * peak.flops) for c, each in flops.items()},
        node=size * (3 * weights[0] + 2 / fsdp * sums[0]) / NODE_BANDWIDTH,
        network=size * (3 * weights[1] + 2 / fsdp * sums[1]) / NETWORK_BANDWIDTH,
        tokens=workload.rows * workload.context,
    )


def _within_nodes(data: int, fsdp: int) -> tuple[int, int]:
    """How many devices along `fsdp`, and how many along `data`, share a node."""
    if data * fsdp <= NODE:
        return fsdp, data
    if data * fsdp % NODE or (NODE % fsdp and fsdp % NODE):
        raise UsageError(
            f"--mesh={data},{fsdp},1 does not fill nodes of {NODE} GPUs; let fsdp divide {NODE} or "
            f"be a multiple of it, and data x fsdp be one"
        )
    return min(fsdp, NODE), max(NODE // fsdp, 1)


def _sent(inside: int, outside: int) -> tuple[float, float]:
    """Shares of an array that a device sends in and between nodes when it is gathered or scattered.

    The array is split over `inside` devices of each of `outside` nodes.
    """
    return (inside - 1) / inside, (outside - 1) / outside / inside


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one device: bytes, and its collectives in a step.

    Attributes:
      arguments: bytes of the state and the batch.
      temporary: bytes of all else at its highest.
      collectives: the collectives of one step.
    """

    arguments: int
    temporary: int
    collectives: tuple[Collective, ...]


def compile_step(workload: Workload, sizes: Sequence[int]) -> Compiled:
    """Compiles the step for the devices of a mesh, which must be here; allocates nothing.

    Raises:
      UsageError: the batch does not divide, or there are too few devices.
    """
    return compile_objective(workload.objective, workload.batch(sizes[0] * sizes[1]), sizes)


def compile_objective(
    objective: Objective, shape: tuple[int, int], sizes: Sequence[int], frozen: Any = ()
) -> Compiled:
    """Compiles a step of any objective, with a batch of that shape and what it keeps frozen."""
    data, fsdp, tensor = sizes
    count = math.prod(sizes)
    if count > jax.device_count():
        raise UsageError(
            f"--mesh={data},{fsdp},{tensor} has {count} devices, and here are "
            f"{jax.device_count()}; give the largest mesh in the same call"
        )
    mesh = sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=jax.devices()[:count])
    check_batch(shape[0], 1, mesh)
    state = StateLayout.of(objective, mesh, _TRAINING).abstract()
    step: Any = make_train_step(objective, mesh, _TRAINING)
    tokens_BS = jax.ShapeDtypeStruct(shape, jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    compiled = step.lower(state, frozen, tokens_BS, key).compile()
    sizes_on_device = compiled.memory_analysis()
    return Compiled(
        arguments=sizes_on_device.argument_size_in_bytes,
        temporary=sizes_on_device.temp_size_in_bytes,
        collectives=tuple(collectives(compiled.as_text())),
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f}"


HEADS = (
    *("model", "GPUs", "mesh", "parameters", "state GB", "gradients GB", "copy GB", "saved GB"),
    *("work GB", "total GB", "compute ms", "node ms", "network ms", "tokens/s/GPU"),
)


def row(name: str, workload: Workload, sizes: Sequence[int]) -> tuple[str, ...]:
    """A plan by formula; the time of products is in the square convention."""
    need, bound = memory(workload, sizes), roofline(workload, sizes)
    in_turn, at_once = (round(bound.rate("square", overlap=o), -2) for o in (False, True))
    return (
        name,
        str(math.prod(sizes)),
        "x".join(map(str, sizes)),
        f"{params_lib.count(param_spec(workload.cfg)) / 1e9:.3f} B",
        *map(_gigabytes, (*dataclasses.astuple(need), need.total)),
        *(f"{1e3 * t:,.1f}" for t in (bound.compute["square"], bound.node, bound.network)),
        f"{in_turn:,.0f} to {at_once:,.0f}",
    )


_COMPILED_HEADS = ("collective", "GPUs", "a step", "MB", "MB sent by a GPU")


def _compiled_table(sizes: Sequence[int], result: Compiled) -> str:
    rows = [
        (
            *(each.op, str(each.devices), f"{each.runs:,}"),
            *(f"{size / 1e6:,.3f}" for size in (each.bytes, each.sent)),
        )
        for each in result.collectives
    ]
    head = (
        f"mesh {'x'.join(map(str, sizes))}, compiled: arguments {_gigabytes(result.arguments)} GB, "
        f"temporary {_gigabytes(result.temporary)} GB a device"
    )
    return f"{head}\n{format_table(_COMPILED_HEADS, rows)}"


def _mesh(text: str) -> tuple[int, int, int]:
    sizes = text.split(",")
    if len(sizes) != 3 or not all(s.isdecimal() and int(s) for s in sizes):
        raise UsageError(f"--mesh={text} is not data,fsdp,tensor; write 1,8,1")
    data, fsdp, tensor = map(int, sizes)
    return data, fsdp, tensor


def chosen_models(names: Sequence[str] | None) -> dict[str, DecoderConfig]:
    """The configs of the named presets and models, by name; every preset where none is named."""
    return {
        name: PRESETS[name] if name in PRESETS else open_pretrained(name).cfg
        for name in names or PRESETS
    }


def run(arguments: argparse.Namespace) -> int:
    """Prints the table, and with `--compile` the compiler's figures below it."""
    if min(arguments.rows, arguments.context) < 1:
        raise UsageError(
            f"--rows={arguments.rows} and --context={arguments.context} must be at least 1"
        )
    meshes = [_mesh(text) for text in arguments.mesh] or MESHES
    if not arguments.compile and any(sizes[2] > 1 for sizes in meshes):
        raise UsageError("the formulae are for tensor = 1; add --compile for other meshes")
    if arguments.compile:
        jax.config.update("jax_num_cpu_devices", max(map(math.prod, meshes)))
    workloads = {
        name: Workload(cfg, arguments.rows, arguments.context, arguments.dtype)
        for name, cfg in chosen_models(arguments.model).items()
    }
    rows = [
        row(name, workload, sizes)
        for name, workload in workloads.items()
        for sizes in meshes
        if sizes[2] == 1
    ]
    print(
        f"computed: {arguments.rows} rows of {arguments.context} tokens on each GPU, "
        f"{arguments.dtype}; H100 SXM"
    )
    print(format_table(HEADS, rows, left=(0, 2)), flush=True)
    results = []
    for name, workload in workloads.items() if arguments.compile else ():
        for sizes in meshes:
            result = compile_step(workload, sizes)
            print(f"\n{name}, {_compiled_table(sizes, result)}", flush=True)
            results.append({"model": name, "mesh": sizes} | dataclasses.asdict(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; a refusal is one line on standard error."""
    parser = Parser("python -m tools.plan_training", __doc__)
    parser.add_argument("--model", action="append", metavar="MODEL", help="one plan each")
    parser.add_argument("--mesh", action="append", default=[], metavar="DATA,FSDP,TENSOR")
    parser.add_argument("--rows", type=int, default=2, help="sequences on each device")
    parser.add_argument("--context", type=int, default=4_096, help="tokens of a sequence")
    parser.add_argument("--dtype", choices=tuple(_WIDTH), default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="compile the step, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="what was compiled, as JSON")
    # The devices are played by this CPU.
    jax.config.update("jax_platforms", "cpu")
    return run_parsed(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
