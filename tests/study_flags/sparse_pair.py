"""A text with a small vocabulary, prompts of one task, and two post-trainings."""

from tests.sparse_jax.small_runs import write_text

# The text that it writes is known by its path to what is prepared of it.
STAYS = True


def flags(request, folder):
    return [
        f"--config.text.source={write_text(folder / 'text')}",
        "--config.text.vocab_size=300",
        "--config.text.tasks=('copy',)",
        "--config.variants=('sparse', 'teacher')",
    ]
