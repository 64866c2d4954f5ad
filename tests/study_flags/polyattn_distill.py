"""A model that finds needles, and documents of words that it knows."""

from tests.polyattn_jax.conftest import write_documents


def flags(request, folder):
    source = write_documents(folder / "documents")
    model = request.getfixturevalue("tiny_with_head")
    return [f"--config.model={model}", f"--config.corpus.source={source}"]
