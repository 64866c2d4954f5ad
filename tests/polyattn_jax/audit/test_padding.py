"""Rotations by length (LongRoPE) leave the padding of a batch out of every measurement."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.weights.load import Pretrained
from polyattn_jax.audit import measure, recipe_rows, stages
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.suites.batching import batches
from polyattn_jax.suites.prompts import Prompt, Suite
from tests import rounding
from tests.lm_jax.model.test_rotation_lengths import FIRST, config, model, text

CFG = config("longrope")
# One text of the first context, padded to the length of one that is longer.
T = FIRST + 3
IDS = [text(FIRST, CFG), text(T, CFG)]
RELU = parse_recipe("relu:p=2,b=0.5").map
SIGMOID = parse_recipe("sigmoid:b=0").map


def _logits(tokens_BT, lengths_B, valid_BT, substitution):
    del lengths_B
    logits_BTV = measure.logits(model(CFG), tokens_BT, valid_BT=valid_BT, **substitution)
    return logits_BTV[:, :FIRST]


def _losses(tokens_BT, lengths_B, valid_BT, substitution):
    del lengths_B, substitution
    targets_BQ = tokens_BT[:, 1:FIRST]
    queries_BQ = jnp.broadcast_to(jnp.arange(FIRST - 1), targets_BQ.shape)
    return measure.losses(
        model(CFG), tokens_BT, queries_BQ, targets_BQ, cfg=CFG, valid_BT=valid_BT
    )[0]


def _text_losses(tokens_BT, lengths_B, valid_BT, substitution):
    del valid_BT
    return measure.text_losses(model(CFG), tokens_BT, lengths_B, **substitution)["loss"]


def _evaluate(tokens_BT, lengths_B, valid_BT, substitution):
    del valid_BT
    target_B = jnp.zeros(len(tokens_BT), jnp.int32)
    return measure.evaluate(model(CFG), tokens_BT, lengths_B, target_B, **substitution)["loss"]


def _head_features(tokens_BT, lengths_B, valid_BT, substitution):
    del substitution
    valid_BT = (
        jnp.arange(tokens_BT.shape[1])[None] < lengths_B[:, None] if valid_BT is None else valid_BT
    )
    successors_BT = jnp.full(tokens_BT.shape, -1)
    features = measure.head_features(model(CFG), tokens_BT, successors_BT, valid_BT, cfg=CFG)
    return features["sink"].swapaxes(0, 1)


def _diagnose(tokens_BT, lengths_B, valid_BT, substitution):
    del substitution
    last_B1 = lengths_B[:, None] - 1
    found = measure.diagnose(
        *(model(CFG), tokens_BT, last_B1, jnp.full_like(last_B1, -1), jnp.zeros(1)),
        cfg=CFG,
        valid_BT=valid_BT,
    )
    return found.softmax["argmax"].swapaxes(0, 1)


def _recipe_rows(tokens_BT, lengths_B, valid_BT, substitution):
    del substitution
    last_B1 = lengths_B[:, None] - 1
    bias_RLN = jnp.zeros((1, CFG.num_layers, CFG.num_heads))
    found = recipe_rows.measure(
        *(model(CFG), tokens_BT, last_B1, bias_RLN), cfg=CFG, maps=(SIGMOID,), valid_BT=valid_BT
    )
    return jnp.moveaxis(found["s_own"], 2, 0)


@pytest.mark.parametrize(
    "measured",
    [_logits, _losses, _text_losses, _evaluate, _head_features, _diagnose, _recipe_rows],
)
def test_a_short_text_beside_a_longer_one_is_measured_as_alone(measured):
    heads_LN = jnp.ones((CFG.num_layers, CFG.num_heads), bool)
    given = {"index": jnp.int32(0), "bias": jnp.float32(0.5), "heads_LN": heads_LN}
    run = functools.partial(measured, substitution=given | {"cfg": CFG, "maps": (RELU,)})
    tokens_BT = jnp.array([[*IDS[0], *[0] * (T - FIRST)], IDS[1]])
    lengths_B = jnp.array([FIRST, T])
    beside = run(tokens_BT, lengths_B, jnp.arange(T)[None] < lengths_B[:, None])
    for row, length in enumerate((FIRST, T)):
        one = tokens_BT[row : row + 1, :length], lengths_B[row : row + 1]
        alone = rounding.expected(lambda one=one: run(*one, None))
        rounding.assert_within(beside[row : row + 1], alone, measured.__name__)


class SeenError(Exception):
    """Holds the mask that a stage passed on."""


@pytest.mark.parametrize("stage", ["diagnose", "losses", "recipe_rows"])
def test_stages_say_what_is_padding(stage, monkeypatch):
    prompts = [Prompt(f"{i}", tuple(ids), target=1, answer_position=0) for i, ids in enumerate(IDS)]
    suite = Suite("repeated", tuple(prompts), {})
    base = Pretrained(CFG, model(CFG), None, ())
    audited = AuditedModel(base, None, AuditConfig("model"))

    def one_batch(_audited, _store, _what, suites, work):
        (batch,) = batches(suite, 2)
        work(next(iter(suites)), batch)

    def measured(*_arguments, valid_BT, **_options):
        raise SeenError(np.asarray(valid_BT))

    for module in (stages, recipe_rows):
        monkeypatch.setattr(module, "run_units", one_batch)
    monkeypatch.setattr(stages, "evaluate", lambda *_: None)
    for name in ("diagnose", "losses"):
        monkeypatch.setattr(measure, name, measured)
    monkeypatch.setattr(recipe_rows, "measure", measured)
    suites = {"repeated": suite}
    for module in (stages, recipe_rows):
        monkeypatch.setattr(module, "diagnosed", dict)

    class Stores:
        rows = losses = recipe_rows = None

    runs = {
        "diagnose": lambda: stages.diagnose(audited, Stores, suites, {"zero": 0.0}),
        "losses": lambda: stages.control(audited, Stores, suites),
        "recipe_rows": lambda: recipe_rows.diagnose(
            audited, Stores, suites, {parse_recipe("sigmoid:b=0"): 0.0}
        ),
    }
    with pytest.raises(SeenError) as caught:
        runs[stage]()
    np.testing.assert_array_equal(caught.value.args[0].sum(1), [FIRST, T])
    assert caught.value.args[0][0, :FIRST].all()
