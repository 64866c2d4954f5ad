"""Strengths scale what is read from a prototype; another text's routing is taken by position."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model import decode
from lm_jax.run import cli
import protot_jax
from protot_jax import edits, generate, steering
from protot_jax.edits import PrototypeEdit
from protot_jax.interventions.sentences import open_ids
from tests import rounding

PROMPT = "the people of the town"
GREEDY = {"sampling": decode.Sampling(), "key": jax.random.key(0)}


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
        ("layer=3,prototype=x", "is not of the form L2P5"),
        ("L2P5:scale=much", "'much' is not a number"),
        ("L2P5:scale=-1", "by = -1.0 must be a factor from 0 on"),
        ("L2P5:scale=inf", "by = inf must be a factor from 0 on"),
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

    def outputs(**mode):
        changes = protot_jax.edit(layer=1, prototype=2, **mode) if mode else {}
        return logits(model, ids, changes, record=("attn.out", "mixer.read"))

    unedited, zeroed, scaled = outputs(), outputs(mode="zero_read"), outputs(mode="scale", by=3.0)
    read, tripled = (np.asarray(one.records["mixer.read"]) for one in (unedited, scaled))
    np.testing.assert_array_equal(tripled[0], read[0])
    np.testing.assert_array_equal(tripled[1, ..., 2], 3 * read[1, ..., 2])
    others = [r for r in range(read.shape[-1]) if r != 2]
    np.testing.assert_array_equal(tripled[1][..., others], read[1][..., others])
    closed = protot_jax.edit(layer=1, prototype=2, mode="zero_read")
    for by, wanted in ((1.0, exact(model, ids)), (0.0, exact(model, ids, closed))):
        rounding.assert_within({"logits": outputs(mode="scale", by=by).logits}, wanted)
    out, without, triple = (
        np.asarray(one.records["attn.out"], np.float64)[1] for one in (unedited, zeroed, scaled)
    )
    part = out - without
    # Sums of at most R products on either side, of parts up to three times as large.
    scale = np.abs(out).max() + 3 * np.abs(part).max()
    bound = 64 * float(np.finfo(np.float32).eps) * scale
    assert np.abs(part).max() > 1000 * bound
    np.testing.assert_allclose(triple - out, 2 * part, rtol=0, atol=bound)


def test_a_sweep_is_each_strength_alone(model):
    chosen = [PrototypeEdit(1, 2, "scale"), PrototypeEdit(0, 1, "mask_write")]
    swept = steering.sweep(
        model, PROMPT, chosen, (0.0, 1.0, 8.0), tokens=8, target="people", **GREEDY
    )
    assert [one.by for one in swept] == [0.0, 1.0, 8.0]
    assert len({one.text for one in swept}) > 1
    ids = open_ids(model.tokenizer, PROMPT)
    word = model.tokenizer.encode("people", add_special_tokens=False)[0]
    eps = float(np.finfo(np.float32).eps)
    for one in swept:
        changes = edits.several(model.params, steering.with_strength(chosen, one.by))
        assert all(
            each.by == (one.by if each.mode == "scale" else None)
            for each in steering.with_strength(chosen, one.by)
        )
        pieces = generate.text(model, PROMPT, edits=changes, **GREEDY)
        wanted = "".join(piece for piece, _ in zip(pieces, range(8), strict=False))
        assert one.text.split() == f"{PROMPT}{wanted}".split()
        edited_V = np.asarray(logits(model, ids, changes).logits[0, -1], np.float64)
        p = math.exp(edited_V[word] - np.logaddexp.reduce(edited_V))
        # Two programs round the logits apart, by far less than the largest of them.
        assert one.probability == pytest.approx(p, rel=200 * eps * np.abs(edited_V).max())


def test_perplexity_is_that_of_the_model_without_edits(model, monkeypatch):
    """Of a continuation that is known: the tokens are given in place of generated ones."""
    ids = open_ids(model.tokenizer, PROMPT)
    new = ids[1:4]
    monkeypatch.setattr(steering, "stream", lambda *args, **options: iter(new))
    (one,) = steering.sweep(
        model, PROMPT, [PrototypeEdit(0, 1, "scale")], (5.0,), tokens=9, **GREEDY
    )
    log_p_TV = np.asarray(logits(model, ids + new).logits[0], np.float64)
    log_p_TV -= np.logaddexp.reduce(log_p_TV, axis=-1, keepdims=True)
    loss = -np.mean([log_p_TV[len(ids) - 1 + i, token] for i, token in enumerate(new)])
    eps = float(np.finfo(np.float32).eps)
    assert math.log(one.perplexity) == pytest.approx(loss, rel=200 * eps * len(ids))
    assert one.probability is None and math.isnan(one.repetition) == (len(new) < 4)
    assert one.text.split() == model.tokenizer.decode(ids + new, skip_special_tokens=True).split()


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
    closed = edits.several(model.params, [PrototypeEdit(1, 2, "zero_read")])
    at = steering.routing_of(model, other, closed)
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
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("times")] == [
        "times 0:",
        "times 1:",
        "times 4:",
    ]
    heads = next(i for i, line in enumerate(lines) if "probability of the target" in line)
    assert [line.split()[0] for line in lines[heads + 1 :]] == ["0", "1", "4"]
    outputs = []
    for flags in ((), (f"--routing_of={PROMPT}",), ("--edit=layer=1,prototype=2,mode=scale,by=1",)):
        assert start([*argv, *flags]) == 0
        outputs.append(capsys.readouterr().out)
    # Its own routing while it lasts, and a factor of one, change nothing.
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--strengths=0,1",), "write --edit=L2P5:scale"),
        (("--edit=L0P1:scale",), "needs a factor"),
        (("--edit=L0P1:scale", "--strengths=0,x"), "strengths: 'x' is not a number"),
        (("--edit=L0P1:scale", "--strengths=-1"), "must be a factor from 0 on"),
        (("--edit=L0P1:scale", "--strengths=1", "--tokens=0"), "tokens = 0 has no end"),
        (("--edit=L0P1:scale", "--strengths=1", "--target=zzqx"), "is not in the vocabulary"),
        (("--target=people",), "give --strengths=0,1,2 too"),
        (("--edit=L0P1:scale", "--strengths=1", "--routing_of=a"), "cannot be combined"),
    ],
)
def test_bad_flags_are_one_sentence(run, flags, message, capsys):
    argv = ["generate", f"--run={run}", f"--prompt={PROMPT}", "--tokens=3"]
    assert start([*argv, *flags]) in (2, 3)
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1
