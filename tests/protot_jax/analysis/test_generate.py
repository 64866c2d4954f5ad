"""A pretraining run is loaded whole, and generates text in constant memory."""

import dataclasses
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.checkpoint import manager
from lm_jax.console import cli
from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.model import decode
from lm_jax.model.sampling import Sampling
from lm_jax.text.tokenizer_training import BOS, SPECIAL, UNKNOWN
import protot_jax
from protot_jax.analysis import generate, steering
from protot_jax.analysis.token_ids import open_ids
from protot_jax.mixers import edits
from protot_jax.studies.judging import continuations, prompts
from protot_jax.training import saved_run
from protot_jax.training.run_options import RunOptions
from tests import rounding, tiny


def perplexities(models, data):
    """Over all tokens of validation and test, for each model."""
    cfg, mixer = models[0].cfg, models[0].mixer
    splits = [split.read(np.arange(split.count))["tokens"] for split in data]

    def perplexity(params, tokens_NS):
        target_NT = jnp.asarray(tokens_NS[:, 1:])
        logits_NTV = lm_jax.forward(params, tokens_NS[:, :-1], cfg, mixer=mixer).logits
        log_p_NTV = jax.nn.log_softmax(logits_NTV)
        log_p_NT = jnp.take_along_axis(log_p_NTV, target_NT[..., None], axis=-1)[..., 0]
        total = jnp.sum(jnp.where(target_NT == 0, 0.0, log_p_NT))
        return jnp.exp(-total / jnp.sum(target_NT != 0))

    def all_of(params):
        return {
            f"{name}_perplexity": jax.lax.map(lambda p, t=tokens: perplexity(p, t), params)
            for name, tokens in zip(("validation", "test"), splits, strict=True)
        }

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(each.params for each in models))
    return rounding.expected(all_of, stacked)


def start(argv):
    return cli.run(generate.main, argv, options=generate.Options, workdir_required=False)


def test_a_run_gives_the_weights_that_its_summary_reports(run):
    """The best ones by default: of seed 2 those after 2 of 4 steps, of seed 1 the last."""
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    models, rows = [], []
    for seed, best_step, reported in zip((1, 2), (4, 2), summary["seeds"], strict=True):
        for best, step in ((True, best_step), (False, 4)):
            model = protot_jax.load_run(run, seed=seed, **({} if best else {"best": False}))
            own = reported["best" if best else "last"]
            assert (model.seed, model.step, own["step"]) == (seed, step, step)
            models.append(model)
            rows.append(own)
    data = saved_run.load_data(models[0].config, run / "data")
    wanted = perplexities(models, (data.validation, data.test))
    results = {name: np.array([own[name] for own in rows]) for name in wanted.values}
    rounding.assert_within(results, wanted)
    # The two of seed 2 differ by more than what is compared.
    for name, bound_K in wanted.bounds.items():
        assert abs(results[name][2] - results[name][3]) > bound_K[2] + bound_K[3]


def test_commands_read_the_best_weights_by_default(run):
    steps = []

    def main(arguments):
        steps.append(arguments.options.load().step)

    argv = ["test", f"--run={run}", "--run_seed=2"]
    for flags in ((), ("--checkpoint=last",)):
        assert cli.run(main, [*argv, *flags], options=RunOptions, workdir_required=False) == 0
    assert steps == [2, 4]


def test_what_is_no_run_is_refused(run, tmp_path):
    with pytest.raises(BadInputError, match=r"is no run: it has no config\.json"):
        protot_jax.load_run(tmp_path)
    with pytest.raises(UsageError, match="seed = 3 is none of 1, 2"):
        protot_jax.load_run(run, seed=3)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    with pytest.raises(
        BadInputError, match=r"is a Hugging Face model \(gpt2\), not a run"
    ) as error:
        protot_jax.load_run(tmp_path)
    assert len(str(error.value)) < len(str(tmp_path)) + 200
    (tmp_path / "config.json").write_text('{"dense": "smollm2"}')
    with pytest.raises(BadInputError, match="is no run of iaj protot pretrain; name the --workdir"):
        protot_jax.load_run(tmp_path)


def test_a_trained_model_answers_as_a_pretrained_one(run):
    model = protot_jax.load_run(run)
    text = "the people of the town"
    ids = model.tokenizer.encode(text)
    want = lm_jax.forward(model.params, jnp.array([ids]), model.cfg, mixer=model.mixer).logits
    ran = model.run(text)
    np.testing.assert_allclose(ran.logits, want, rtol=1e-4, atol=1e-4)
    assert ran.cache["mixer.write"].shape[:3] == (model.cfg.num_layers, 1, len(ids))
    shares = ran.attribution(int(want[0, -1].argmax()), 0)
    assert shares.total_B[0] == pytest.approx(
        float(shares.embed_B[0] + shares.mixer_LBN.sum() + shares.mlp_LB.sum()), abs=1e-3
    )


def test_a_flipped_bit_is_named(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    saved = saved_run.seed_folder(copy, 1) / manager.FOLDER
    arrays = manager.step_folder(saved, 4) / "arrays"
    victim = max((f for f in arrays.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(CorruptError, match=victim.name):
        protot_jax.load_run(copy)


def test_a_stream_is_what_generate_gives_and_its_cache_does_not_grow(run):
    model = protot_jax.load_run(run)
    prompt = model.tokenizer.encode("the people of the town")
    arguments = {"mixer": model.mixer, "sampling": Sampling()}
    endless = decode.stream(model.params, prompt, model.cfg, **arguments)
    streamed = list(itertools.islice(endless, 20))
    (ids,) = lm_jax.generate(
        model.params, [prompt], model.cfg, max_new_tokens=20, mixer=model.mixer
    )
    assert streamed == ids
    # Two programs, for the prompt and for one token, at any length.
    before = decode._next._cache_size()
    list(itertools.islice(endless, 200))
    assert decode._next._cache_size() == before


def test_text_ends_at_any_end_that_the_tokenizer_names(run):
    model = protot_jax.load_run(run)
    ids = open_ids(model.tokenizer, "the war")
    free = decode.stream(model.params, ids, model.cfg, mixer=model.mixer)
    first = list(itertools.islice(free, 8))
    end = next(i for count, i in enumerate(first) if count and i not in first[:count])
    kept = first[: first.index(end)]
    tokenizer = dataclasses.replace(model.tokenizer, other_stop_ids=(end,))
    model = dataclasses.replace(model, tokenizer=tokenizer)
    arguments = {"sampling": Sampling(), "key": jax.random.key(0)}
    written = "".join(generate.text(model, "the war", **arguments))
    assert written == prompts.continuation(tokenizer, ids, kept)
    (steered,) = steering.sweep(
        model, "the war", [edits.parse("L0P1:scale")], [1.0], tokens=8, **arguments
    )
    assert steered.text == tokenizer.decode(ids + kept, skip_special_tokens=True)
    (judged, *_) = continuations._batch(model, [ids], new_tokens=8, **arguments)
    assert judged == (written, len(kept) + 1, True)


def test_a_llama_run_is_continued_up_to_its_context(run):
    """Token by token with a cache, as `generate` does in one program."""
    model = protot_jax.load_run(run)
    config = dataclasses.replace(model.config, model="llama", tie_embeddings=False)
    cfg, mixer = saved_run.model(config, 60)
    # Large weights, so that what is attended to changes the next token.
    params = jax.tree.map(lambda x: 10 * x, lm_jax.init_params(jax.random.key(3), cfg, mixer=mixer))
    llama = dataclasses.replace(model, cfg=cfg, mixer=mixer, params=params)
    prompt = model.tokenizer.encode("the people of the town")
    while prompt[-1] == model.tokenizer.eos_id:
        prompt.pop()
    free = cfg.max_length - len(prompt)
    (ids,) = lm_jax.generate(params, [prompt], cfg, max_new_tokens=free, mixer=mixer)
    assert list(decode.stream(params, prompt, cfg, mixer=mixer)) == ids
    assert len(ids) == free and len(set(ids)) > 3
    with pytest.raises(BadInputError, match="leaves no place in the model's context"):
        next(decode.stream(params, [1] * cfg.max_length, cfg, mixer=mixer))
    arguments = {"sampling": Sampling(), "key": jax.random.key(0)}
    pieces = generate.text(llama, "the people of the town", **arguments)
    stop = ids.index(model.tokenizer.eos_id) if model.tokenizer.eos_id in ids else free
    text = model.tokenizer.decode(ids[:stop], skip_special_tokens=True)
    assert "".join(pieces).split() == text.split()


def test_the_command_continues_the_prompt(run, capsys):
    argv = ["generate", f"--run={run}", "--prompt=the people", "--tokens=12", "--seed=3"]
    assert start(argv) == 0
    first = capsys.readouterr().out
    assert first.startswith("the people")
    assert len(first.split()) > 3
    assert start(argv) == 0
    assert capsys.readouterr().out == first
    assert start(["generate"]) == 2
    assert "--run is missing" in capsys.readouterr().err


def test_a_prompt_speaks_no_special_token(run, monkeypatch):
    """The name of a special token in a prompt is text, or unknown if its letters are."""
    model = protot_jax.load_run(run)
    read = []

    def stream(params, ids, *args, **options):
        read.extend(ids)
        return iter(())

    monkeypatch.setattr(generate, "stream", stream)
    prompt = f"the {' '.join(SPECIAL)} people"
    options = {"sampling": Sampling(), "key": jax.random.key(0)}
    assert not list(generate.text(model, prompt, **options))
    bos, *rest = map(model.tokenizer.token, read)
    assert bos == BOS and rest[0].startswith("t") and rest[-1].endswith("e</w>")
    assert {*SPECIAL} & {*rest} <= {UNKNOWN}
    # By its names it would read them all.
    assert {*SPECIAL} <= {model.tokenizer.token(i) for i in model.tokenizer.encode(prompt)}


def test_with_a_prototype_closed_the_tokens_are_those_of_edited_forwards(run):
    """Step by step over the whole text so far, without a cache."""
    model = protot_jax.load_run(run)
    # Large weights, so that a closed prototype changes the next token.
    drawn = lm_jax.init_params(jax.random.key(3), model.cfg, mixer=model.mixer)
    params = jax.tree.map(lambda x: 10 * x, drawn)
    prompt = model.tokenizer.encode("the people of the town")[:-1]
    chosen = [(0, 1, "zero_write"), (1, 0, "zero_write"), (1, 2, "mask_read")]
    zeroed = edits.several(params, [edits.PrototypeEdit(*one) for one in chosen])
    arguments = {"mixer": model.mixer, "edits": zeroed}
    streamed = list(itertools.islice(decode.stream(params, prompt, model.cfg, **arguments), 12))
    edited = lm_jax.generate(params, [prompt], model.cfg, max_new_tokens=12, **arguments)
    ids = list(prompt)
    for left in range(12, 0, -1):
        # Later tokens, here of one length for one program, are not read.
        tokens_BT = jnp.asarray([ids + [0] * left])
        logits_TV = tiny.forward(params, tokens_BT, cfg=model.cfg, **arguments).logits[0]
        ids.append(int(logits_TV[len(ids) - 1].argmax()))
    assert streamed == edited[0] == ids[len(prompt) :]
    unedited = lm_jax.generate(params, [prompt], model.cfg, max_new_tokens=12, mixer=model.mixer)
    assert unedited[0] != edited[0]


def test_the_command_edits_prototypes_and_refuses_unknown_ones(run, capsys):
    argv = ["generate", f"--run={run}", "--prompt=the people", "--tokens=12", "--temperature=0"]
    outputs = []
    for spec in ("L0P1", "L0 P1:zero_write"):
        assert start([*argv, f"--edit={spec}"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    for spec, message in (
        ("P1", "is not of the form L2P5"),
        ("L0P1:zero", "mode = 'zero' is not one of"),
        ("L9P1", r"layer = 9 is outside"),
        ("L0P99", r"prototype = 99 is outside"),
    ):
        assert start([*argv, f"--edit={spec}"]) == 2
        assert message in capsys.readouterr().err
