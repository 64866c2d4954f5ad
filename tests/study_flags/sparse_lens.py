"""A Llama with random weights, text of its tokenizer and a prompt."""

from tests.sparse_jax.small_runs import save_base, write_text


def flags(request, folder):
    source = write_text(folder / "text")
    return [
        f"--config.model={save_base(folder / 'model')}",
        f"--config.corpus.source={source}",
        "--config.skipped=2",
        "--config.prompts=('the capital is',)",
    ]
