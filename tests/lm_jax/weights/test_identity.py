"""A model is the same where its weights, configuration and tokenizer are, and only there."""

import dataclasses
import json
import shutil

import jax
import pytest

import lm_jax
from lm_jax.evaluate.judge import judge_inputs
from lm_jax.model.config import DecoderConfig
from lm_jax.run.identity import ModelIdentity, difference
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.text.tokenizer_training import train_tokenizer
from lm_jax.weights.identity import config_digest, tokenizer_digest
from lm_jax.weights.load import open_pretrained
from tests import tiny
from tests.lm_jax.text.synthetic_corpus import texts

# The first digits of the digest of `tiny.DECODER`, which stored results have.
GOLDEN = "d4419622dfdc1dec"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "saved"
    tokenizer = train_tokenizer((text for _, text in texts(30)), vocab_size=110)
    cfg = tiny.decoder(vocab_size=tokenizer.vocab_size)
    params = lm_jax.init_params(jax.random.key(0), cfg)
    lm_jax.save_pretrained(folder, cfg, params, tokenizer)
    return folder


@pytest.fixture
def model(saved, tmp_path):
    """A copy of the saved model, whose files a test may change."""
    return shutil.copytree(saved, tmp_path / "model")


def test_an_opened_model_is_the_loaded_one(saved):
    opened, loaded = open_pretrained(saved), lm_jax.load_pretrained(saved)
    assert opened.identity == loaded.identity
    assert opened.identity.weights == loaded.sha256
    assert opened.identity.chat_template == ""
    assert opened.identity.text.startswith(loaded.sha256)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
        {"rope_parameters": None, "rope_theta": 10000.0},
        {"rms_norm_eps": 0.00001},
        {"_name_or_path": "elsewhere", "transformers_version": "4.0.0", "use_cache": False},
        {"torch_dtype": "bfloat16"},
        {"pad_token_id": 3},
        {"attention_dropout": 0.0, "initializer_range": 0.5, "pretraining_tp": 1},
    ],
    ids=str,
)
def test_two_spellings_of_a_configuration_are_one(saved, model, spelling):
    tiny.edit_json(model / "config.json", **spelling)
    assert open_pretrained(model).identity == open_pretrained(saved).identity


def test_the_order_of_keys_and_defaults_that_are_left_out_change_nothing(saved, model):
    config = json.loads((model / "config.json").read_text())
    assert config.pop("rms_norm_eps") == 1e-5
    config["rms_norm_eps"] = 1e-5
    for name in ("mlp_bias", "attention_bias"):
        assert config.pop(name) is False
    (model / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert open_pretrained(model).identity == open_pretrained(saved).identity


@pytest.mark.parametrize(
    "same",
    [
        {"windows": (None, None)},
        {"local_rope": lm_jax.Rope(theta=5.0)},
        {"attention_scale": 8**-0.5},
        {"embed_scale": 1, "norm_offset": 0},
        {"rope": lm_jax.Rope(theta=10_000)},
        {"pad_id": 1},
    ],
    ids=str,
)
def test_settings_that_compute_the_same_are_one_configuration(same):
    assert config_digest(tiny.decoder(**same)) == config_digest(tiny.DECODER)


# A changed value of every field that decides a result; `windows` and ropes only with each other.
CHANGES = {
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 4,
    "hidden_size": 32,
    "mlp_size": 0,
    "vocab_size": 41,
    "max_length": 63,
    "family": "gemma",
    "norm": "layer",
    "norm_eps": 1e-6,
    "norm_offset": 1.0,
    "norm_weights": False,
    "norm_placement": "both",
    "qk_norm": "head",
    "kv": "tied",
    "parallel_residual": True,
    "activation": "gelu",
    "gated_mlp": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "rope": lm_jax.Rope(theta=500_000.0),
    "windows": (4, None),
    "layers": (lm_jax.LayerShape(mlp_size=8), lm_jax.LayerShape()),
    "block_end": lm_jax.BlockEnd(),
    "attention_scale": 0.5,
    "score_softcap": 30.0,
    "logit_softcap": 30.0,
    "embed_scale": 2.0,
    "tie_embeddings": True,
}


def test_every_field_of_a_configuration_counts():
    digests = [config_digest(tiny.decoder(**{name: value})) for name, value in CHANGES.items()]
    local = [tiny.decoder(windows=(4, None), local_rope=lm_jax.Rope(theta=t)) for t in (5.0, 6.0)]
    learned = [tiny.decoder(rope=None), tiny.decoder(rope=lm_jax.Rope(fraction=0.5))]
    digests += [config_digest(cfg) for cfg in (tiny.DECODER, *local, *learned)]
    assert len(set(digests)) == len(digests)
    fields = {field.name for field in dataclasses.fields(DecoderConfig)}
    assert fields - CHANGES.keys() == {"local_rope", "pad_id"}


def test_digests_stay_what_they_were_and_a_later_field_at_its_default_changes_none():
    assert config_digest(tiny.DECODER)[:16] == GOLDEN

    later = dataclasses.make_dataclass(
        "DecoderConfig", [("sinks", int, 0)], bases=(DecoderConfig,), frozen=True
    )
    assert config_digest(later(**vars(tiny.DECODER))) == config_digest(tiny.DECODER)
    assert config_digest(later(**vars(tiny.DECODER), sinks=1)) != config_digest(tiny.DECODER)


def test_what_a_tokenizer_does_counts_and_a_chat_template_where_it_is_used(saved):
    tokenizer = Tokenizer.from_folder(saved)
    other = dataclasses.replace(tokenizer, eos_id=5)
    longer = Tokenizer.from_folder(saved)
    longer.backend.add_tokens(["zzyzx"])
    chat = dataclasses.replace(tokenizer, chat_template="{{ messages }}")
    digests = {tokenizer_digest(each) for each in (tokenizer, other, longer)}
    assert len(digests) == 3
    assert tokenizer_digest(chat) == tokenizer_digest(tokenizer)
    model = lm_jax.load_pretrained(saved)
    plain, chatting = (
        dataclasses.replace(model, tokenizer=each).identity for each in (tokenizer, chat)
    )
    assert plain.text == chatting.text and plain.digest != chatting.digest
    words = difference(plain.chat_text, chatting.chat_text, where="x")
    assert words.startswith("chat template none, not ")
    assert dataclasses.replace(model, tokenizer=None).identity.tokenizer == ""


def test_an_edited_tokenizer_is_another_model(saved, model):
    tiny.edit_json(model / "tokenizer_config.json", add_bos_token=None, eos_token="e")
    words = difference(
        open_pretrained(saved).identity.text, open_pretrained(model).identity.text, where="x"
    )
    assert words.startswith("tokenizer ") and "weights" not in words


def test_identities_are_read_back_and_parts_that_are_not_known_not_compared(capsys):
    whole = ModelIdentity("a" * 64, "b" * 64, "", "c" * 64)
    assert ModelIdentity.parse(whole.chat_text) == whole
    assert ModelIdentity.parse(whole.text) == dataclasses.replace(whole, chat_template=None)
    assert ModelIdentity.parse("a" * 64) == ModelIdentity("a" * 64)
    other = dataclasses.replace(whole, weights="d" * 64, config="e" * 64)
    assert difference(whole.text, other.text, where="file") == (
        "weights aaaaaaaaaaaa, not dddddddddddd and configuration bbbbbbbbbbbb, not eeeeeeeeeeee"
    )
    assert not capsys.readouterr().err
    for _ in range(2):
        assert not difference("a" * 64, whole.text, where="an old file")
    (line,) = capsys.readouterr().err.splitlines()
    assert "an old file" in line and "by its weights alone" in line
    assert difference("d" * 64, whole.text, where="an old file")


def test_a_judge_is_another_with_another_chat_template(saved, model):
    """A finished run that asked it is compared by `judge_inputs`."""
    tiny.edit_json(model / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    before, after = (
        judge_inputs(f"local:{folder}")[f"judge local:{folder}"] for folder in (saved, model)
    )
    assert difference(before, after, where="x").startswith("chat template none, not ")
    assert open_pretrained(model).identity.text == open_pretrained(saved).identity.text


def test_a_judge_that_is_gone_is_no_input(tmp_path):
    assert judge_inputs(f"local:{tmp_path / 'gone'}") == {}
