"""A Llama with random weights, and text of its tokenizer."""

from tests.sparse_jax.small_runs import save_base, write_text


def flags(request, folder):
    source = write_text(folder / "text")
    return [f"--config.model={save_base(folder / 'model')}", f"--config.corpus.source={source}"]
