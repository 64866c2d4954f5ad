"""Post-training in seconds: a synthetic corpus, a tiny Llama, and settings that close its edges."""

import dataclasses
from pathlib import Path

import jax
from ml_collections import ConfigDict

import lm_jax
from lm_jax.run.files import read_json
from lm_jax.study import frame
from lm_jax.text.tokenizer_training import train_tokenizer
from sparse_jax.studies.posttrain import STUDY
from sparse_jax.studies.posttrain.settings import PosttrainConfig
from tests import tiny
from tests.lm_jax.text.synthetic_corpus import texts
from tools import make_goldens


def write_text(folder):
    """Documents as files of a new folder."""
    folder.mkdir()
    for name, text in texts(150):
        (folder / f"{name}.txt").write_text(text, "utf-8")
    return folder


def save_base(folder, *, seed=0):
    """A Llama with random weights, larger than initial ones, and its tokenizer."""
    tokenizer = train_tokenizer((text for _, text in texts(150)), vocab_size=120)
    cfg = tiny.decoder(vocab_size=tokenizer.vocab_size, max_length=32, family="llama")
    params = jax.tree.map(lambda x: 2.0 * x, lm_jax.init_params(jax.random.key(seed), cfg))
    lm_jax.save_pretrained(folder, cfg, params, tokenizer)
    return folder


def golden_base(folder, case):
    """A golden model of a family, with a tokenizer of its vocabulary size."""
    model = lm_jax.load_pretrained(make_goldens.GOLDEN / case)
    tokenizer = train_tokenizer((text for _, text in texts(150)), vocab_size=model.cfg.vocab_size)
    lm_jax.save_pretrained(folder, model.cfg, model.params, tokenizer)
    return folder


def settings(base, text, **changes):
    config = ConfigDict(dataclasses.asdict(PosttrainConfig()))
    config.corpus.update(
        {"source": str(text), "unit": "document", "splits": (0.7, 0.3, 0.0), "max_tokens": 0}
    )
    config.adapters.update({"rank": 2, "alpha": 4.0, "targets": ("q", "k", "v", "o")})
    # The strength is high enough to close edges within these few steps.
    config.strength.update({"start": 30.0, "dual_rate": 0.05, "decay": 0.5})
    config.update(
        {
            "model": str(base),
            "context": 16,
            "batch_size": 8,
            "steps": 12,
            "eval_every": 6,
            "save_every": 4,
            "learning_rate": 3e-2,
            "mesh": (2, 2, 1),
            **changes,
        }
    )
    return config


def run_folder(folder):
    (result,) = Path(folder).glob("seed_*/target_*")
    return result


def runs_config(folder):
    """The stored config of a run."""
    stored = read_json(folder / "config.json")
    config = ConfigDict(dataclasses.asdict(PosttrainConfig()))
    tuples = {name for name, value in config.items() if isinstance(value, tuple)}
    for name, value in stored.items():
        if isinstance(value, dict):
            kept = config[name]
            kept.update({k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})
        else:
            config[name] = tuple(value) if name in tuples else value
    return config


def command(config, folder, **options):
    """Runs the command with this config."""
    return frame.execute(STUDY, config, folder, **options)
