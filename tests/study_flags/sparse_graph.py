"""A model whose weights are random with a transcoder, and two prompts of as many tokens."""

from tests.sparse_jax.graphs.small_command import PROMPTS, of_dense, save_all


def flags(request, folder):
    del request
    models = save_all(folder)
    prompts = [f"--prompt={text}" for text in (PROMPTS[0], PROMPTS[0].replace("Mary", "Anna"))]
    # Texts, attention scores and interventions take long to compile; the command's tests have them.
    without = [f"--config.{name}=0" for name in ("explained", "intervened", "supernodes")]
    return [*of_dense(models), *prompts, *without, "--config.corpus.source="]
