"""Sentences over a small vocabulary."""


def flags(request, folder):
    del folder
    return [
        f"--config.corpus.source={request.getfixturevalue('text')}",
        "--config.corpus.unit=document",
        "--config.corpus.vocab_size=60",
        "--config.corpus.splits=(0.7, 0.15, 0.15)",
    ]
