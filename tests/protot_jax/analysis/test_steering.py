"""Strengths scale what is read from a prototype; another text's routing is taken by position."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.console import cli
from lm_jax.errors import UsageError
from lm_jax.model import decode
from lm_jax.model.sampling import Sampling
import protot_jax
from protot_jax.analysis import generate, steering
from protot_jax.analysis.token_ids import open_ids, word_ids
from protot_jax.mixers import edits
from protot_jax.mixers.edits import PrototypeEdit
from tests import rounding

PROMPT = "the people of the town"
GREEDY = {"sampling": Sampling(), "key": jax.random.key(0)}


@pytest.fixture(scope="module")
def model(run):
    """Weights ten times as large, so that an edit changes the next token."""
    own = protot_jax.load_run(run)
    drawn = lm_jax.init_params(jax.random.key(3), own.cfg, mixer=own.mixer)
    return dataclasses.replace(own, params=jax.tree.map(lambda x: 10 * x, drawn))


def exact(model, ids, changes=None, record=()):
    """Logits and records in float64, with the bounds of a float32 pass in any order of sums."""

    def run(params):
        keep = dict.fromkeys(record, lm_jax.keep)
        tokens, mixer = jnp.asarray([ids]), model.mixer
        out = lm_jax.forward(
            params, tokens, model.cfg, mixer=mixer, edits=changes or {}, record=keep
        )
        return {"logits": out.logits} | {site: out.records[site] for site in record}

    return rounding.expected(run, model.params)


def logits(model, ids, changes=None, record=()):
    return jax.jit(
        lambda params, changes: lm_jax.forward(
            params,
            jnp.asarray([ids]),
            model.cfg,
            mixer=model.mixer,
            edits=changes,
            record=dict.fromkeys(record, lm_jax.keep),
        )
    )(model.params, changes or {})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("L2P5", PrototypeEdit(2, 5, "zero_write")),
        ("L2 P5:mask_read", PrototypeEdit(2, 5, "mask_read")),
        ("L2P5:scale=0.5", PrototypeEdit(2, 5, "scale", 0.5)),
        ("L2P5:scale", PrototypeEdit(2, 5, "scale")),
        ("layer=3,prototype=7,mode=scale,by=0", PrototypeEdit(3, 7, "scale", 0.0)),
        ("prototype=7, layer=3", PrototypeEdit(3, 7, "zero_write")),
    ],
)
def test_an_edit_is_written_in_two_forms(text, wanted):
    assert edits.parse(text) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer=3,mode=scale", "is not of the form L2P5"),
        ("layer=3,prototpye=7", "'prototpye' is not one of layer, prototype, mode, by"),
        ("layer=3,layer=2,prototype=1", "names a field twice"),
        ("L2P5:scale=much", "'much' is not a number"),
        ("L2P5:scale=-1", "by = -1.0 must be a factor from 0 on"),
        ("L2P5:zero_read=2", "by = 2 goes with mode = 'scale', not with 'zero_read'"),
        ("L2P5:scael=2", "mode = 'scael' is not one of.*scale"),
    ],
)
def test_a_wrong_edit_says_what_is_wrong(text, message):
    with pytest.raises(UsageError, match=message):
        edits.parse(text)
    with pytest.raises(UsageError, match="mode = 'scale' needs a factor"):
        protot_jax.edit(layer=0, prototype=0, mode="scale")


def test_scaling_multiplies_what_is_read_from_one_prototype(model):
    """The output of a mixer is linear in its read gates: 0 is zero_read, and 1 nothing."""
    ids = open_ids(model.tokenizer, PROMPT)
    record = ("attn.out", "mixer.read")

    def changes(**mode):
        return protot_jax.edit(layer=1, prototype=2, **mode)

    unedited, zeroed, scaled = (
        exact(model, ids, one, record)
        for one in ({}, changes(mode="zero_read"), changes(mode="scale", by=3.0))
    )
    for by, wanted in ((1.0, unedited), (0.0, zeroed), (3.0, scaled)):
        out = logits(model, ids, changes(mode="scale", by=by), record)
        rounding.assert_within({"logits": out.logits} | dict(out.records), wanted)
    # In float64, but for its own rounding.
    read, tripled = (one.values["mixer.read"] for one in (unedited, scaled))
    factor_R = np.where(np.arange(read.shape[-1]) == 2, 3.0, 1.0)
    np.testing.assert_allclose(tripled[0], read[0], rtol=1e-12)
    np.testing.assert_allclose(tripled[1], read[1] * factor_R, rtol=1e-12)
    whole, without, triple = (one.values["attn.out"][1] for one in (unedited, zeroed, scaled))
    part = whole - without
    np.testing.assert_allclose(triple - whole, 2 * part, rtol=0, atol=1e-12 * np.abs(whole).max())
    assert np.abs(part).max() > 100 * scaled.bounds["attn.out"][1].max()


def log_probability(model, ids, new, changes=None):
    """Nats of tokens after others, in float64 with the bounds of float32."""

    def run(params):
        tokens = jnp.asarray([[*ids, *new]])
        out = lm_jax.forward(params, tokens, model.cfg, mixer=model.mixer, edits=changes or {})
        log_p_TV = jax.nn.log_softmax(out.logits[0])
        at = np.arange(len(ids) - 1, len(ids) - 1 + len(new))
        return log_p_TV[at, np.asarray(new)].sum()

    return rounding.expected(run, model.params)


def test_a_sweep_is_each_strength_alone(model):
    chosen = [PrototypeEdit(1, 2, "scale"), PrototypeEdit(0, 1, "mask_write")]
    ids = open_ids(model.tokenizer, PROMPT)
    word = word_ids(model.tokenizer, ["peopled"])[0]
    assert len(word) > 1
    swept = list(
        steering.sweep(model, PROMPT, chosen, (0.0, 1.0, 8.0), tokens=8, target="peopled", **GREEDY)
    )
    assert [one.by for one in swept] == [0.0, 1.0, 8.0]
    assert len({one.text for one in swept}) > 1
    for one in swept:
        own = steering.with_strength(chosen, one.by)
        assert [each.by for each in own] == [one.by, None]
        changes = edits.several(model.params, own)
        # The same programs, and so the same tokens.
        pieces = generate.text(model, PROMPT, edits=changes, **GREEDY)
        wanted = "".join(piece for piece, _ in zip(pieces, range(8), strict=False))
        assert one.text.split() == f"{PROMPT}{wanted}".split()
        rounding.assert_within(
            np.float64(math.log(one.probability)), log_probability(model, ids, word, changes)
        )


def test_others_are_prototypes_of_the_same_layer(model):
    """Three prototypes a layer: two others of a named one, drawn without repetition."""
    fixed = PrototypeEdit(0, 1, "mask_write")
    chosen = [PrototypeEdit(1, 2, "scale"), fixed]
    found = steering.others(model, chosen, count=9, seed=0)
    assert all(other == fixed for _, other in found)
    assert sorted(one for one, _ in found) == [PrototypeEdit(1, r, "scale") for r in (0, 1)]
    assert len(steering.others(model, chosen, count=1, seed=0)) == 1
    # Two named ones of a layer leave one, which is no pair.
    with pytest.raises(UsageError, match="no other prototype"):
        steering.others(model, [*chosen, PrototypeEdit(1, 0, "scale")], count=1, seed=0)


def test_the_place_among_others_by_hand():
    def swept(*probabilities):
        return [[steering.Steered(2.0, "", None, None, p)] for p in probabilities]

    # Geometric means over two prompts: 0.2, and of the others 0.1, 0.2, 0.3.
    named = swept(0.1, 0.4)
    controls = [swept(0.1, 0.1), swept(0.4, 0.1), swept(0.9, 0.1)]
    (one,) = steering.place(named, controls)
    assert (one.by, one.measure, one.prompts) == (2.0, "probability", 2)
    assert one.named == pytest.approx(0.2) and one.others == pytest.approx((0.1, 0.2, 0.3))
    assert one.as_low == 2 and one.p == 1.0
    # The highest of four: 2 x 1 / 4.
    (most,) = steering.place(swept(0.9, 0.9), controls)
    assert most.as_low == 3 and most.p == 0.5
    assert "One prompt is an example" not in generate.format_places([one])


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (1, "None could be below 0.05: with so few prototypes, the smallest p is at least 1."),
        (
            39,
            "p is not corrected for the number of factors and measures. With so many prototypes, "
            "the smallest p is at least 0.05.",
        ),
    ],
)
def test_the_least_p_is_printed_and_that_it_is_not_corrected(others, words):
    named = [[steering.Steered(2.0, "", None, None, 0.9)]]
    controls = [[[steering.Steered(2.0, "", None, None, 0.1)]]] * others
    (one,) = steering.place(named, controls)
    page = generate.format_places([one])
    assert one.p == min(1, 2 / (1 + others)) and words in page
    assert "p is not corrected for the number of factors and measures." in page


@pytest.mark.parametrize("length", [0, 3, 6])
def test_perplexity_is_that_of_the_model_without_edits(model, monkeypatch, length):
    """Of a continuation that is known: the tokens are given in place of generated ones."""
    ids = open_ids(model.tokenizer, PROMPT)
    new = (ids[1:] * 2)[:length]
    monkeypatch.setattr(steering, "stream", lambda *args, **options: iter(new))
    chosen = [PrototypeEdit(0, 1, "scale")]
    (one,) = steering.sweep(model, PROMPT, chosen, (5.0,), tokens=9, **GREEDY)
    text = model.tokenizer.decode(ids + new, skip_special_tokens=True)
    assert one.probability is None and one.text.split() == text.split()
    words = model.tokenizer.decode(new, skip_special_tokens=True).split()
    assert (one.repetition is None) == (len(words) < 4)
    if not new:
        assert one.perplexity is None
        return
    wanted = log_probability(model, ids, new)
    rounding.assert_within(np.float64(-math.log(one.perplexity) * len(new)), wanted)


def test_a_sweep_that_is_stopped_gives_what_it_has(model, monkeypatch):
    asked = iter([False, False, True, True])
    monkeypatch.setattr(steering.stop, "requested", lambda: next(asked))
    chosen = [PrototypeEdit(1, 2, "scale")]
    (one,) = steering.sweep(model, PROMPT, chosen, (0.0, 1.0), tokens=8, **GREEDY)
    new = open_ids(model.tokenizer, one.text)[len(open_ids(model.tokenizer, PROMPT)) :]
    assert one.by == 0.0 and len(new) <= 3 and one.perplexity is not None


def test_the_routing_of_another_text_is_taken_token_by_token(model):
    """With its own routing a text is unchanged; with another's, its gates are those."""
    other = "the house of a river and the town"
    ids, source = (open_ids(model.tokenizer, text) for text in (PROMPT, other))
    assert len(source) > len(ids)
    own = steering.routing_of(model, PROMPT)(0, len(ids))
    held = steering.routing_of(model, other)(0, len(ids))
    record = edits.GATES
    free, same, changed = (logits(model, ids, one, record) for one in (None, own, held))
    wanted, gates = exact(model, ids), exact(model, source, record=record)
    rounding.assert_within({"logits": same.logits}, wanted)
    begin = {
        part: {site: tree[site][:, :, : len(ids)] for site in record}
        for part, tree in gates._asdict().items()
    }
    rounding.assert_within(dict(changed.records), rounding.Expected(**begin))
    difference = np.abs(np.asarray(changed.logits) - np.asarray(free.logits))
    assert (difference > 10 * wanted.bounds["logits"]).mean() > 0.5


def test_routing_is_held_while_tokens_are_generated(model):
    """Against whole forward passes over the text so far, past the end of the other text."""
    other = "the house of a river and the town"
    ids = open_ids(model.tokenizer, PROMPT)
    chosen = [PrototypeEdit(1, 2, "zero_read"), PrototypeEdit(0, 0, "scale", 2.0)]
    closed = edits.several(model.params, chosen)
    at = steering.routing_of(model, other, chosen)
    beyond = len(open_ids(model.tokenizer, other)) - len(ids)
    assert 0 < beyond < 6
    streamed = []
    for token in decode.stream(model.params, ids, model.cfg, mixer=model.mixer, edits=at):
        streamed.append(token)
        if len(streamed) == 6:
            break
    text = list(ids)
    for _ in range(6):
        out = logits(model, text, at(0, len(text)))
        text.append(int(out.logits[0, -1].argmax()))
    assert streamed == text[len(ids) :]
    alone = list(ids)
    for _ in range(6):
        alone.append(int(logits(model, alone, closed).logits[0, -1].argmax()))
    assert alone != text


def start(argv):
    return cli.run(generate.main, argv, options=generate.Options, workdir_required=False)


def test_the_command_sweeps_and_holds(run, capsys):
    argv = ["generate", f"--run={run}", f"--prompt={PROMPT}", "--tokens=5", "--temperature=0"]
    assert start([*argv, "--edit=L1P2:scale", "--strengths=0,1,4", "--target=people"]) == 0
    printed = capsys.readouterr().out
    # The layer has two other prototypes, and the factor 1 is the same text for all.
    assert "equal or lower" in printed and "of 2" in printed
    assert "no finding; give more by --prompt." in printed
    assert printed.rstrip().endswith("the smallest p is at least 0.67.")
    lines = printed.splitlines()
    assert [line for line in lines if line.startswith("times")] == [
        "times 0:",
        "times 1:",
        "times 4:",
    ]
    heads = next(i for i, line in enumerate(lines) if "probability of the target" in line)
    assert [line.split()[0] for line in lines[heads + 1 : heads + 4]] == ["0", "1", "4"]
    model = protot_jax.load_run(run)
    other = "the house of a river and the town"
    closed = [PrototypeEdit(1, 2, "zero_read")]
    assert start([*argv, f"--routing_of={other}", "--edit=L1P2:zero_read"]) == 0
    changes = steering.routing_of(model, other, closed)
    pieces = generate.text(model, PROMPT, edits=changes, **GREEDY)
    wanted = "".join(piece for piece, _ in zip(pieces, range(5), strict=False))
    assert capsys.readouterr().out == f"{PROMPT}{wanted}\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--strengths=0,1",), "write --edit=L2P5:scale"),
        (("--edit=L0P1:scale",), "--strengths=0,1,2"),
        (("--edit=L0P1:mask_write", "--routing_of=peace"), "use zero_write"),
        (("--edit=L0P1:scale", "--strengths=0,x"), "strengths: 'x' is not a number"),
        (("--edit=L0P1:scale", "--strengths=-1"), "strengths: -1 must be a factor from 0 on"),
        (("--edit=L0P1:scale", "--strengths=1", "--tokens=0"), "tokens = 0 has no end"),
        (("--edit=L0P1:scale", "--strengths=1", "--target=zzqx"), "is not in the vocabulary"),
        (("--target=people",), "give --strengths=0,1,2 too"),
        (("--edit=L9P1",), "layer = 9 is outside"),
        (("--edit=L0P99",), "prototype = 99 is outside"),
        (("--edit=L0P1:scale", "--strengths=1", "--routing_of=a"), "cannot be combined"),
    ],
)
def test_bad_flags_are_one_sentence(run, flags, message, capsys):
    argv = ["generate", f"--run={run}", f"--prompt={PROMPT}", "--tokens=3"]
    assert start([*argv, *flags]) in (2, 3)
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1
