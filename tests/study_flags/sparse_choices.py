"""A model that has learnt nothing, and questions of TruthfulQA's form."""

import json

import jax

import lm_jax
from lm_jax.text.tokenizer_training import train_tokenizer
from tests import tiny
from tests.lm_jax.text.synthetic_corpus import texts


def flags(request, folder):
    tokenizer = train_tokenizer((text for _, text in texts(60)), vocab_size=110)
    cfg = tiny.decoder(vocab_size=tokenizer.vocab_size, max_length=64, family="llama")
    params = lm_jax.init_params(jax.random.key(0), cfg)
    lm_jax.save_pretrained(folder / "model", cfg, params, tokenizer)
    answers = {"choices": ["a cat", "two dogs"], "labels": [1, 0]}
    lines = [json.dumps({"question": f"who is {i}", "mc1_targets": answers}) for i in range(3)]
    (folder / "questions.jsonl").write_text("\n".join(lines), "utf-8")
    return [
        f"--config.dense={folder / 'model'}",
        "--config.tasks=()",
        f"--config.truthfulqa={folder / 'questions.jsonl'}",
    ]
