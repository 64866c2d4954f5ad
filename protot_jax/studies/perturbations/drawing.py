"""Draws the sentences of a benchmark from its corpora, and records each corpus.

No sentence of the held-out splits is taken that stands in a training document (`held_out.py`).
"""

from collections import Counter
import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm_jax import assets
from lm_jax.errors import BadInputError
from lm_jax.run import stop
from lm_jax.text import corpora
from lm_jax.text.splits import SPLITS, split_of, split_point
from protot_jax.studies.perturbations.results import Source
from protot_jax.studies.perturbations.screening import counted, whole_sentence
from protot_jax.studies.perturbations.settings import PerturbationsConfig, parse_corpus
from protot_jax.studies.robustness import held_out, sentences
from protot_jax.studies.robustness.sentences import KINDS

# Sentences of one corpus of text.
_MOST_TEXT = 8_000


class Origin(NamedTuple):
    """Where a sentence of the mix is from: the name of its source, and the split there."""

    source: str
    split: str


def draw(
    config: PerturbationsConfig, counts: Counter[str]
) -> tuple[dict[str, Origin], list[Source]]:
    """The origin of every sentence of the mix, in random order, and the record of every corpus.

    Words of the corpora are added to `counts`.

    Raises:
      BadInputError: a corpus cannot be read, or has no such sentence.
    """
    # A source may be of two kinds.
    mix: dict[tuple[str, str], list[tuple[str, str]]] = {}
    fragments: dict[tuple[str, str], int] = {}
    documents: dict[str, Counter[str]] = {}
    training: list[str] = []
    for kind, source in map(parse_corpus, config.corpus):
        stop.check("while sampling sentences")
        share = max(1, config.mix // len(config.corpus))
        if kind == "text":
            share = min(share, _MOST_TEXT, max(1, config.mix // 2))
        again = source in documents
        texts, documents[source] = _texts(source, config, Counter() if again else counts)
        drawn: dict[str, str] = {}
        for split in config.splits:
            # Each split gives its part, so that a small one is not left out by chance.
            of_split = sentences.sample(texts[split], share, config.seed, KINDS[kind])
            drawn |= dict.fromkeys(of_split, split) | drawn
        order = np.random.default_rng(config.seed).permutation(len(drawn))
        known = list(drawn.items())
        chosen = [known[i] for i in order[:share]]
        mix[kind, source] = [one for one in chosen if whole_sentence(one[0])]
        fragments[kind, source] = len(chosen) - len(mix[kind, source])
        if "train" not in config.splits and not again:
            training += texts["train"]
    trained = held_out.found((text for found in mix.values() for text, _ in found), training)
    records, flat = [], []
    for kind, source in map(parse_corpus, config.corpus):
        kept = [one for one in mix[kind, source] if one[0] not in trained]
        if not kept:
            raise BadInputError(
                f"{source} has no whole sentence of {KINDS[kind].shortest} to "
                f"{KINDS[kind].longest} words in {', '.join(config.splits)} that its training "
                "text has not; name another corpus, or more splits by --splits"
            )
        licence, version = _licence(source, config.licence)
        # The files say nothing of the machine that made them.
        name = Path(source).name
        cut = dataclasses.replace(held_out.heldout_corpus(source, config.field), source=name)
        flat += [(text, Origin(name, split)) for text, split in kept]
        records.append(
            Source(
                name,
                kind,
                licence,
                version,
                corpora.hashes(source),
                len(kept),
                fragments[kind, source],
                cut,
                dict(documents[source]),
                len(mix[kind, source]) - len(kept),
            )
        )
    origin: dict[str, Origin] = {}
    for i in np.random.default_rng(config.seed).permutation(len(flat)):
        origin.setdefault(*flat[i])
    return origin, records


def _texts(
    source: str, config: PerturbationsConfig, counts: Counter[str]
) -> tuple[dict[str, list[str]], Counter[str]]:
    """The documents of a source by split, and their number; counts their words."""
    cut = held_out.heldout_corpus(source, config.field)
    documents = corpora.documents(source, unit=cut.unit, words=cut.words, field=cut.field)
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    usable = (text for _, text in corpora.usable(documents, Counter()))
    for text in counted(usable, counts):
        texts[split_of(split_point(text.encode(), cut.seed), cut.splits)].append(text)
    return texts, Counter({split: len(found) for split, found in texts.items()})


def _licence(source: str, of_files: str) -> tuple[str, str | None]:
    if source in assets.entries():
        asset = assets.entry(source)
        return asset.data_licence, asset.version
    return of_files or "not stated", None
