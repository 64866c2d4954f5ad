"""Programs that measure multiply float32 as float32, and those that train as fast as they can.

A CPU multiplies both alike, so that the precision is read out of the lowered programs.
"""

import ast
import importlib
from pathlib import Path
import re

import jax
import jax.numpy as jnp
import pytest

import lm_jax
from lm_jax.model.precision import exact_jit, exact_products
from lm_jax.train import step
from polyattn_jax.audit import measure
from polyattn_jax.recipes import row_maps
from sparse_jax.circuits import patching
from tests import tiny
from tests.lm_jax.train import tiny_training
from tests.sparse_jax.circuits.test_patching import prompts
from tests.sparse_jax.circuits.test_patching import small_model as circuit_model
from tests.sparse_jax.graphs import small_graphs

# The package binds the name to its function.
graph_steps = importlib.import_module("sparse_jax.graphs.attribute")
ROOT = Path(__file__).parents[1]
LIBRARIES = ("lm_jax", "sparse_jax", "protot_jax", "polyattn_jax")
# Every use of `jax.jit`, by file, with why it is no measurement.
NOT_MEASURED = {
    "lm_jax/model/precision.py": "exact_jit itself",
    "lm_jax/model/decode.py": "generates text",
    "lm_jax/weights/fill.py": "places weights; no product",
    "lm_jax/weights/adapted.py": "merges adapters, by a product of explicit precision",
    "lm_jax/train/state.py": "initialises",
    "lm_jax/train/step.py": "the training step",
    "lm_jax/train/throughput.py": "times the products of training",
    "polyattn_jax/studies/bench/run.py": "times decoding as users decode; compares by exact_jit",
    "protot_jax/studies/concepts/sae.py": "trains",
    "sparse_jax/circuits/edge_pruning.py": "trains masks",
    "sparse_jax/studies/posttrain/export.py": "merges adapters, by a product of explicit precision",
    "sparse_jax/studies/transcoders/run.py": "initialises",
}
_MATRIX = re.compile(r"tensor<\d+x\d+xf32>[,)]")
_DOT = re.compile(r"stablehlo\.dot_general.*?-> tensor<[^>]*>", re.DOTALL)


def float32_products(lowered, *, of_weights=False):
    """For each product of float32 operands of a lowered program, whether it is exact.

    Products `of_weights` have an operand of two axes; those of the kernels have more.
    """
    dots = [dot for dot in _DOT.findall(lowered.as_text()) if "xf32>, tensor" in dot]
    dots = [dot for dot in dots if not of_weights or _MATRIX.search(dot)]
    assert dots
    return ["precision = [HIGHEST, HIGHEST]" in dot for dot in dots]


def test_every_program_that_measures_is_made_by_exact_jit():
    found = set()
    for library in LIBRARIES:
        for path in (ROOT / library).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.jit":
                    found.add(path.relative_to(ROOT).as_posix())
    assert found == set(NOT_MEASURED)


def test_the_precision_of_a_function_is_its_own_whatever_the_caller_has():
    x = jnp.ones((2, 2))

    @exact_jit
    def exact(x):
        return x @ x

    plain = jax.jit(lambda x: x @ x)
    assert float32_products(exact.lower(x)) == [True]
    assert float32_products(plain.lower(x)) == [False]
    with exact_products():
        assert float32_products(plain.lower(x)) == [True]
    with jax.default_matmul_precision("bfloat16"):
        assert float32_products(exact.lower(x)) == [True]
    assert float32_products(plain.lower(x)) == [False]


@pytest.mark.parametrize("fused", [False, True])
def test_an_audit_measures_exactly(fused):
    params = lm_jax.init_params(jax.random.key(0), tiny.DECODER)
    tokens_BT, last_B1 = jnp.zeros((1, 8), jnp.int32), jnp.full((1, 1), 7)
    options = {"cfg": tiny.DECODER, "fused": fused}
    probe = measure.diagnose.lower(params, tokens_BT, last_B1, last_B1, jnp.zeros(2), **options)
    heads_LN = jnp.ones((tiny.DECODER.num_layers, tiny.DECODER.num_heads), bool)
    losses = measure.text_losses.lower(
        params,
        tokens_BT,
        jnp.array([8]),
        jnp.int32(0),
        jnp.float32(0),
        heads_LN,
        maps=(row_maps.SOFTMAX.map,),
        **options,
    )
    assert all(float32_products(probe)) and all(float32_products(losses))


def test_a_circuit_and_a_graph_are_measured_exactly():
    model, batch = circuit_model(), prompts()
    assert all(
        float32_products(patching.metric_and_activations.lower(model, batch, batch.clean_BT))
    )
    blocks, transcoder = small_graphs.small_model("llama"), small_graphs.small_transcoder()
    tokens_T = jnp.asarray(small_graphs.small_tokens(), jnp.int32)
    assert all(float32_products(graph_steps._record.lower(blocks, transcoder, tokens_T)))


def test_a_loss_is_evaluated_exactly_and_training_keeps_its_speed():
    mesh, objective = tiny_training.mesh(), tiny_training.OBJECTIVE
    tokens_BS = tiny_training.BATCHES.at(0)["tokens"]
    state = tiny_training.fresh_state(mesh)
    look = step.make_eval_step(objective, mesh).lower(state.params, (), tokens_BS)
    assert all(float32_products(look))
    update = step.make_train_step(objective, mesh, tiny_training.CONFIG)
    lowered = update.lower(state, (), tokens_BS, jax.random.key(7))
    assert not any(float32_products(lowered, of_weights=True))
