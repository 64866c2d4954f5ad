"""A model that has learnt nothing, and prompts of words that it knows."""

from tests.sparse_jax.circuits.small_study import save_models


def flags(request, folder):
    del request
    models = save_models(folder)
    asked = [f"--dense={models / 'dense'}", f"--task={models / 'mine.jsonl'}"]
    return [*asked, "--config.components=('heads',)"]
