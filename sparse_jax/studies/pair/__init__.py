"""A dense model and its sparse and control versions, all trained here on the same kind of text.

    config      settings: the text, the dense model, its post-training
    corpus      introductions of Wikipedia and task prompts, for pretraining and post-training
    dense       pretraining of the dense model to the plateau of its held-out loss
    study       the command `iaj sparse pair`: corpus, dense model, post-training, summary
    results     the dataclasses of summary.json
    report      the page

"Equal loss" of a sparse and a dense model means something only where the dense one has stopped
learning: else post-training improves it beside making it sparse.
"""
