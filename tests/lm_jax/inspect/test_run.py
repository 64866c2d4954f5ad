"""A model's everyday run: what it answers is what `forward` gives, and every name is understood."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.inspect import jacobian_lens, names
from lm_jax.inspect.attribution import direct_logit_attribution
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.load import Pretrained
from tests import rounding, tiny

WORDS = [f"w{i}" for i in range(38)] + ["?", "end"]
CFG = tiny.GROUPED


@pytest.fixture(scope="module")
def model():
    """A model of 40 words, whose attention is far from uniform."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Pretrained(CFG, weights(CFG), Tokenizer(backend), (Path("none"),))


def weights(cfg):
    params = lm_jax.init_params(jax.random.key(0), cfg)
    return params | {
        "blocks": jax.tree.map(lambda a: 4 * a if a.ndim > 2 else a + 0.3, params["blocks"])
    }


def forward(model, ids, **options):
    return tiny.forward(model.params, jnp.array([ids]), model.cfg, **options)


def test_a_text_its_ids_and_a_list_of_texts_give_the_same(model):
    ids = [3, 1, 4, 1, 5]
    text = "w3 w1 w4 w1 w5"
    want = forward(model, ids).logits
    for given in (text, ids, np.array(ids), jnp.array(ids)):
        run = model.run(given)
        assert run.logits.shape == (1, 5, 40) and run.tokens == text.split()
        np.testing.assert_array_equal(run.logits, model.run(text).logits)
    # Compiled as a whole, and op by op.
    wanted = rounding.expected(
        lambda p: lm_jax.forward(p, jnp.array([ids]), model.cfg).logits, model.params
    )
    rounding.assert_within(model.run(text).logits, wanted)
    several = model.run([text, "w2 w7"])
    assert several.tokens == [text.split(), ["w2", "w7"]]
    rounding.assert_within(several.logits[:1], wanted)
    best, p = several.top(1)[0][0]
    assert best == WORDS[int(want[0, -1].argmax())]
    assert p == pytest.approx(float(jax.nn.softmax(want[0, -1]).max()), rel=1e-4)


def test_answers_are_of_the_last_token_of_each_text(model):
    run = model.run(["w2 w7", "w3 w1 w4 w1 w5"])
    alone = [model.run(text) for text in ("w2 w7", "w3 w1 w4 w1 w5")]
    assert run.logit_diff("w9", "end") == pytest.approx(
        [each.logit_diff("w9", 39) for each in alone], rel=1e-4
    )
    for at in (-1, 0, 1):
        for got, one in zip(run.top(3, at=at), alone, strict=True):
            assert [token for token, _ in got] == [token for token, _ in one.top(3, at=at)]
    log_p = [jax.nn.log_softmax(each.logits[0]) for each in alone]
    nats = [-float(log_p[0][0, 7])] + [-float(log_p[1][t, i]) for t, i in enumerate([1, 4, 1, 5])]
    assert run.loss == pytest.approx(np.mean(nats), rel=1e-4)


@pytest.mark.parametrize(
    ("theirs", "site", "layer"),
    [
        ("blocks.1.attn.hook_pattern", "attn.pattern", 1),
        ("blocks.0.attn.hook_attn_scores", "attn.scores", 0),
        ("blocks.1.hook_resid_post", "resid_post", 1),
        ("blocks.1.hook_mlp_out", "mlp.out", 1),
        ("blocks.0.hook_attn_out", "attn.out", 0),
        ("blocks.0.ln1.hook_scale", "ln1.scale", 0),
        ("hook_embed", "embed", None),
        ("ln_final.hook_scale", "final.scale", None),
        ("attn.z", "attn.z", None),
    ],
)
def test_names_of_either_style_are_the_same_site(model, theirs, site, layer):
    assert names.site(theirs) == (site, layer, None)
    run = model.run("w3 w1 w4")
    recorded = lm_jax.forward(
        model.params, jnp.array([[3, 1, 4]]), CFG, record={site: lm_jax.keep}
    ).records[site]
    want = recorded if layer is None else recorded[layer]
    at_once = model.run("w3 w1 w4", record=[theirs])
    assert list(at_once.cache) == [site] and not list(run.cache)
    np.testing.assert_allclose(run.cache[theirs], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(at_once.cache[theirs], run.cache[theirs])


def test_a_site_is_recorded_later_with_the_edits_of_the_run(model):
    run = model.run("w3 w1 w4", edits=lm_jax.ablate("L0H2"))
    z_LBTNH = run.cache["attn.z"]
    assert not z_LBTNH[0, :, :, 2].any() and z_LBTNH[0, :, :, 3].any() and z_LBTNH[1, :, :, 2].any()


def test_ablations_are_the_edits_that_they_say(model):
    ids = [3, 1, 4, 1, 5]
    keep_LBTNH = jnp.ones((2, 1, 1, 4, 1)).at[1, 0, 0, 3].set(0.0)
    by_hand = {
        "L1H3": {"attn.z": lm_jax.Scale(keep_LBTNH)},
        "L1.mlp": {"mlp.out": lm_jax.OneLayer(1, lm_jax.Scale(jnp.zeros((1, 1, 1))))},
        "L1.attn": {"attn.out": lm_jax.OneLayer(1, lm_jax.Scale(jnp.zeros((1, 1, 1))))},
    }
    untouched = model.run(ids).logits
    for name, edits in by_hand.items():
        got = model.run(ids, edits=lm_jax.ablate(name)).logits
        wanted = rounding.expected(
            lambda p, edits=edits: (
                lm_jax.forward(p, jnp.array([ids]), model.cfg, edits=edits).logits
            ),
            model.params,
        )
        rounding.assert_within(got, wanted, name)
        assert not np.allclose(got, untouched, atol=1e-2)
        # The same edits, given to the core.
        rounding.assert_within(forward(model, ids, edits=lm_jax.ablate(name)).logits, wanted, name)
    both = model.run(ids, edits=lm_jax.ablate("L1H3", "L0H0", "L1.mlp")).logits
    apart = model.run(ids, edits=[lm_jax.ablate(name) for name in ("L1H3", "L0H0", "L1.mlp")])
    np.testing.assert_array_equal(both, apart.logits)


def test_a_patched_stream_is_the_other_run(model):
    other, ids = model.run([7, 8, 9, 10]), [3, 1, 4, 10]
    patched = model.run(ids, edits=lm_jax.patch(other, "blocks.1.hook_resid_post")).logits
    np.testing.assert_allclose(patched, other.logits, rtol=1e-5, atol=1e-5)
    one = model.run(ids, edits=lm_jax.patch(other, "blocks.1.hook_resid_post", at=-1)).logits
    np.testing.assert_allclose(one[:, -1], other.logits[:, -1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(one[:, :-1], model.run(ids).logits[:, :-1], rtol=1e-5, atol=1e-5)
    head = model.run(ids, edits=lm_jax.patch(other, "L0H1", at=[1, 2]))
    z_BTNH, theirs = head.cache["attn.z"][0], other.cache["attn.z"][0]
    own = model.run(ids).cache["attn.z"][0]
    np.testing.assert_array_equal(z_BTNH[:, 1:3, 1], theirs[:, 1:3, 1])
    np.testing.assert_allclose(z_BTNH[:, 0], own[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(z_BTNH[:, :, 0], own[:, :, 0], rtol=1e-5, atol=1e-6)


def test_positions_of_a_patch_are_queries_and_from_the_end_of_each_text(model):
    other = model.run(["w7 w8 w9", "w1 w2 w3 w4 w5"])
    texts = ["w3 w1 w4", "w9 w8 w7 w6 w5"]
    plain = model.run(texts)
    patched = model.run(texts, edits=lm_jax.patch(other, "blocks.0.attn.hook_pattern", at=-1))
    got, theirs, own = (run.cache["attn.pattern"][0] for run in (patched, other, plain))
    for b, last in enumerate((2, 4)):
        np.testing.assert_array_equal(got[b, :, last], theirs[b, :, last])
        np.testing.assert_allclose(got[b, :, :last], own[b, :, :last], rtol=1e-5, atol=1e-6)


def test_what_a_reducer_made_is_in_the_cache_and_nowhere_else(model):
    run = model.run("w3 w1", record={"attn.z": jnp.zeros_like, "resid_post": lambda x: x.mean(1)})
    plain = model.run("w3 w1")
    assert not run.cache["attn.z"].any() and run.cache["resid_post"].shape == (2, 1, 20)
    assert run.logit_lens() == plain.logit_lens()
    patched = model.run("w3 w1", edits=lm_jax.patch(run, "L0H0")).logits
    np.testing.assert_allclose(patched, plain.logits, rtol=1e-5, atol=1e-5)


def test_heads_of_unequal_width_have_one_share_a_layer():
    shapes = (lm_jax.LayerShape(head_dim=4), lm_jax.LayerShape(head_dim=8))
    cfg = dataclasses.replace(CFG, layers=shapes)
    got = direct_logit_attribution(
        weights(cfg), jnp.array([[3, 1, 4]]), cfg, jnp.array([2]), jnp.array([7, 9])
    )
    assert got.mixer_LBN.shape == (2, 1, 1) and abs(got.rest_B[0]) < 1e-4 * abs(got.total_B[0])
    assert {"L0.attn", "L1.attn"} <= {name for name, _ in got.top(5)}


def test_shares_of_an_edited_run_are_of_the_edited_run(model):
    run = model.run("w3 w1 w4", edits=[lm_jax.ablate("L1H2"), lm_jax.steer(jnp.ones(20), 0)])
    got = run.attribution("w1", "w2")
    assert got.mixer_LBN[1, 0, 2] == 0 and got.rest_B[0] != pytest.approx(0, abs=1e-4)
    assert got.total_B[0] == pytest.approx(run.logit_diff("w1", "w2"), rel=1e-4)


def test_steering_adds_the_vector_everywhere(model):
    vector_D = jnp.arange(20.0) / 10
    run = model.run("w3 w1", edits=lm_jax.steer(vector_D, 0))
    want = np.asarray(model.run("w3 w1").cache["resid_post"][0]) + np.asarray(vector_D)
    np.testing.assert_allclose(run.cache["resid_post"][0], want, rtol=1e-5, atol=1e-6)


def test_the_lens_of_the_last_layer_is_the_answer(model):
    run = model.run(["w3 w1 w4", "w2 w5"])
    for lens, top in zip(run.logit_lens(3), run.top(3), strict=True):
        assert len(lens) == 2
        assert [token for token, _ in lens[-1]] == [token for token, _ in top]
    want = lm_jax.unembed(
        model.params, lm_jax.final_norm(model.params, run.cache["final_input"], CFG), CFG
    )
    np.testing.assert_allclose(run.logits[0], want[0], rtol=1e-4, atol=1e-4)


def test_a_lens_of_jacobians_reads_what_a_stream_will_have_become(model):
    ids, layers = [3, 1, 4], CFG.num_layers
    matrix_SDD = np.random.default_rng(0).normal(size=(layers - 1, 20, 20)).astype(np.float32)
    lens = jacobian_lens.JacobianLens(matrix_SDD, layers, 1, 20, 0, np.full(layers - 1, np.nan))
    run = model.run(ids)
    for layer, top in enumerate(run.logit_lens(3, lens=lens)):
        h_BTD = run.cache["resid_post"][layer][:, -1:]
        logits_V = lens.logits(model.params, CFG, h_BTD, layer)[0, 0]
        best = np.argsort(-np.asarray(logits_V))[:3]
        assert [token for token, _ in top] == [WORDS[i] for i in best]
    assert run.logit_lens(3, lens=lens)[0] != run.logit_lens(3)[0]
    assert run.logit_lens(3, lens=lens)[-1] == run.logit_lens(3)[-1]


def frozen_difference(params, cfg, ids, answers, values, without=None):
    """The difference of two logits where every writer and divisor is held, but one write is 0."""
    edits = {}
    for site, value in values.items():
        if without is not None and site == without[0]:
            value = value.at[without[1]].set(0.0)
        layers = [2] if lm_jax.SITES[site].per_layer else [1]
        mask = jnp.ones(layers + [1] * (value.ndim - 1), bool)
        edits[site] = lm_jax.Replace(value, mask)
    hidden_D = lm_jax.forward(params, jnp.array([ids]), cfg, edits=edits).hidden[0, -1]
    w_VD = params["unembed"].T if "unembed" in params else params["embed"]["tokens"]
    return hidden_D @ (w_VD[answers[0]] - w_VD[answers[1]])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        tiny.GPT2,
        {"norm_placement": "both"},
        {"norm_placement": "post", "norm": "layer"},
        {"parallel_residual": True, "tie_embeddings": True},
    ],
    ids=["llama", "gpt2", "both", "post", "parallel"],
)
def test_shares_are_what_is_lost_without_a_write(changes):
    """Against an oracle of edits: all other writes and all divisors replaced by their values."""
    cfg = dataclasses.replace(CFG, **changes)
    params, ids, answers = weights(cfg), [3, 1, 4, 1, 5], (7, 9)
    got = direct_logit_attribution(
        params, jnp.array([ids]), cfg, jnp.array([4]), jnp.array(answers)
    )
    divisors = [f"{name}.scale" for name in cfg.norm_names if name.endswith("_post")]
    sites = ["embed", "attn.z", "mlp.out", "final.scale", *divisors]
    values = lm_jax.forward(
        params, jnp.array([ids]), cfg, record=dict.fromkeys(sites, lm_jax.keep)
    ).records
    whole = frozen_difference(params, cfg, ids, answers, values)
    scale = float(jnp.abs(jnp.array([*got.mixer_LBN.ravel(), *got.mlp_LB.ravel(), whole])).max())
    tolerance = 1e-4 * scale
    assert got.total_B[0] == pytest.approx(float(whole), abs=tolerance)
    where = [("embed", (), got.embed_B[0])]
    for layer in range(2):
        where.append(("mlp.out", layer, got.mlp_LB[layer, 0]))
        for head in range(4):
            at = (layer, 0, slice(None), head)
            where.append(("attn.z", at, got.mixer_LBN[layer, 0, head]))
    for site, index, share in where:
        left = frozen_difference(params, cfg, ids, answers, values, (site, index))
        assert share == pytest.approx(float(whole - left), abs=tolerance), (site, index)
    if not changes:
        assert abs(got.rest_B[0]) < tolerance
    ((_, share),) = got.top(1)
    assert abs(share) == pytest.approx(max(abs(x) for *_, x in where))


def test_what_is_asked_wrongly_is_said_in_a_sentence(model):
    run = model.run("w3 w1 w4")
    cases = {
        "no site 'attn.patern'; did you mean 'attn.pattern'": lambda: run.cache["attn.patern"],
        "attn.z holds the output of each head": lambda: run.cache["blocks.0.attn.hook_result"],
        "the model has layers 0..1": lambda: run.cache["blocks.2.attn.hook_z"],
        "head 4 of layer 1 is outside 0..3": lambda: model.run([1], edits=lm_jax.ablate("L1H4")),
        "layer = 2 is outside 0..1": lambda: model.run([1], edits=lm_jax.ablate("L2.mlp")),
        "layer = 99 is outside 0..1": lambda: model.run(
            [1], edits={"mlp.out": lm_jax.OneLayer(np.int64(99), lm_jax.Freeze())}
        ),
        "head 9 of layer 0 is outside": lambda: model.run(
            [1],
            edits={
                "attn.z": lm_jax.OneLayer(
                    0, lm_jax.Chain((lm_jax.OneHead.of(9, lm_jax.Freeze()), lm_jax.Freeze()))
                )
            },
        ),
        "k = 41 is outside of 1..40": lambda: run.top(41),
        "token ids [T] or a list, got 5": lambda: model.run(5),
        "no component 'H3'": lambda: lm_jax.ablate("H3"),
        "is a site of every layer; name one": lambda: lm_jax.ablate("attn.z"),
        "head 7 is outside 0..3": lambda: lm_jax.patch(run, "L0H7"),
        "at = 5 is outside of the 3 tokens of a text": lambda: lm_jax.patch(run, "L0H0", at=5),
        "give one vector": lambda: lm_jax.steer(jnp.ones((2, 20)), 0),
        "edits: give what ablate": lambda: model.run([1], edits=[3]),
        "is 2 tokens": lambda: run.logit_diff("w1 w2", "w3"),
        "id 40 is outside of 0..39": lambda: run.logit_diff(40, "w3"),
        "at = 3 is outside of a text of 3 tokens": lambda: run.top(at=3),
        "no text has two tokens": lambda: model.run("w1").loss,
        "33 tokens; the model reads at most 32": lambda: model.run("w1 " * 33),
        "outside of the vocabulary, 0..39": lambda: model.run([3, 40]),
        "expected a text or token ids": lambda: model.run([[[1]]]),
        "give at least one text": lambda: model.run([]),
        "a text has no tokens": lambda: model.run(""),
    }
    for words, ask in cases.items():
        with pytest.raises(UsageError) as error:
            ask()
        assert words in str(error.value)
    bare = dataclasses.replace(model, tokenizer=None)
    assert bare.run([3, 1]).logits.shape == (1, 2, 40)
    with pytest.raises(UsageError, match="no tokenizer; give token ids"):
        bare.run("w1")


def test_a_run_shows_its_answer(model):
    run = model.run("w3 w1 w4")
    assert repr(run).startswith("Run(3 tokens; next: 'w") and repr(run).count("%") == 3
    assert repr(model.run(["w3", "w1 w4"])) == "Run(2 texts, 3 tokens)"
    assert repr(run.attribution("w1", "w2")).startswith("Attribution(")
