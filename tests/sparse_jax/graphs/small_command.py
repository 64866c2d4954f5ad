"""A dense and a sparse model on disk with transcoders far from a fit, for the command."""

import jax
import numpy as np

import lm_jax
from lm_jax.model import params as params_lib
from lm_jax.study import command
from sparse_jax import transcoders
from sparse_jax.circuits import generators
from sparse_jax.circuits.source_model import open_identity
from sparse_jax.studies.graphs import STUDY
from sparse_jax.transcoders.transcoder import Transcoder, TranscoderConfig, spec
from tests.sparse_jax.circuits.small_study import LAYERS, save_models

# Of as many tokens, so that programs are compiled once.
PROMPTS = (
    "After the lunch , Mary and John went to the park . Mary gave a ball to",
    "After the lunch , Tom and Anna went to the store . Anna gave the ring to",
)
FEATURES = 16
CONTEXT, EXAMPLES, MEDIATED = 12, 3, 40


def save_all(folder):
    """Models `dense` and `sparse/model`, their transcoders `dense_clt` and `sparse_clt`, `text`."""
    save_models(folder)
    (folder / "text").mkdir()
    for k, text in enumerate(texts()):
        (folder / "text" / f"{k:02d}.txt").write_text(text, "utf-8")
    for role, model, seed in (("dense", "dense", 3), ("sparse", "sparse/model", 4)):
        loaded = lm_jax.load_pretrained(folder / model, without_gates=True)
        known = open_identity(folder / model).text
        save_transcoder(folder / f"{role}_clt", loaded, seed=seed, sha256=known)
    return folder


def texts(count=20):
    """Sentences of words of the tokenizer."""
    rng = np.random.default_rng(0)
    words = [*generators.words("names"), *generators.words("places"), *generators.words("things")]
    return [" ".join(rng.choice(words, rng.integers(8, 30))) for _ in range(count)]


def save_transcoder(folder, model, *, seed=3, sha256=None, layers=LAYERS, change=lambda p: p):
    cfg = TranscoderConfig(layers, model.cfg.hidden_size, FEATURES, threshold=0.1)
    params = params_lib.init(jax.random.key(seed), spec(cfg))
    for offset, name in enumerate(("encoder_bias", "decoder_bias")):
        params[name] = 0.3 * jax.random.normal(jax.random.key(offset), params[name].shape)
    digest = model.identity.text if sha256 is None else sha256
    own = Transcoder(change(params), cfg)
    transcoders.save(folder, own, transcoders.Origin("small", digest))
    return folder


def run(*arguments):
    """The exit code of `iaj sparse graph` with these flags."""
    return command.run(STUDY, ["iaj", "--compilation_cache=off", *arguments])


def of_dense(models):
    """Flags of the dense model and its transcoder in a folder of `save_all`."""
    return [f"--model={models / 'dense'}", f"--transcoder={models / 'dense_clt'}"]


def small(models):
    """Flags of a short study on the text of that folder."""
    text = f"--config.corpus.source={models / 'text'}"
    sizes = {"context": CONTEXT, "examples": EXAMPLES, "mediated": MEDIATED, "supernodes": 3}
    sizes["resamples"] = 200
    return [text, *(f"--config.{name}={value}" for name, value in sizes.items())]


# Settings of a study without what takes long to compile.
BARE = [f"--config.{name}=0" for name in ("explained", "intervened", "supernodes")]


def at(folder):
    return f"--workdir={folder}"
