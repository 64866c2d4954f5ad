"""A model whose weights are random with a transcoder, and two prompts of words that it knows."""

from tests.sparse_jax.graphs.small_command import PROMPTS, of_dense, save_all


def flags(request, folder):
    del request
    models = save_all(folder)
    prompts = [f"--prompt={text}" for text in PROMPTS]
    text = f"--config.corpus.source={models / 'text'}"
    # What takes long to compile; tests of the command have it.
    without = [f"--config.{name}=0" for name in ("explained", "intervened", "supernodes")]
    return [*of_dense(models), *prompts, text, *without]
