"""A Llama with random weights, and text of its tokenizer; two bounds over a control."""

from tests.sparse_jax.small_runs import save_base, write_text


def flags(request, folder):
    source = write_text(folder / "text")
    return [
        f"--config.model={save_base(folder / 'model')}",
        f"--config.corpus.source={source}",
        "--config.slacks=(0.08, 4.0)",
    ]
