"""The pairs of sentences that are measured: made, given, and those that are left out."""

from collections import Counter
from collections.abc import Sequence
import dataclasses

from lm_jax.errors import BadInputError
from lm_jax.text.preparation import CorpusConfig
from protot_jax.studies.interventions.models import SubjectModel
from protot_jax.studies.robustness import (
    held_out,
    lists,
    meaning,
    perturb,
    results,
    sentences,
)
from protot_jax.studies.robustness.sentences import Pair
from protot_jax.studies.robustness.settings import DEFAULT, PERTURBATIONS, RobustnessConfig
from protot_jax.studies.robustness.similarity import Encoder, similarities

# A source of more sentences than are wanted of a slice, which has no place in most of them.
_SENTENCES = 20


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The pairs of an experiment.

    Attributes:
      pairs: those that are measured, slice by slice.
      similarity: similarity of each pair; None if it was not measured.
      dissimilar: number of pairs left out as too dissimilar, by slice.
      skipped: slices without pairs.
      trained: number of pairs left out because a model was trained on one of their sentences, by
        slice.
      models: number of sentences in each model's training text, or the reason why it is not
        known.
    """

    pairs: tuple[Pair, ...]
    similarity: tuple[float, ...] | None
    dissimilar: dict[str, int]
    skipped: tuple[results.SkippedSlice, ...]
    trained: dict[str, int]
    models: tuple[results.TrainedOn, ...]


def make_pairs(
    subjects: Sequence[SubjectModel],
    given: sentences.Given | None,
    wordnet: lists.WordNet | None,
    config: RobustnessConfig,
) -> Pairs:
    """Samples sentences, or takes those of the user, and perturbs them.

    Pairs of a sentence that stands in the training text of any of the models are left out.

    Raises:
      BadInputError: the corpus of the first run cannot be read, a slice that was asked for by name
        needs data that are not here, or there is no pair.
    """
    # A slice of which the file has pairs is measured on those.
    own = {pair.slice for pair in given.pairs} if given else set()
    wanted = [name for name in config.slices or DEFAULT if name not in own]
    if given and not given.sentences:
        wanted = [name for name in wanted if name not in PERTURBATIONS]
    made, skipped = perturbations(wanted, wordnet, named=bool(config.slices))
    pairs: list[Pair] = []
    if given is None and made:
        texts = sentences.sample_validation(
            subjects[0].model.config.corpus, _SENTENCES * config.pairs, config.seed
        )
    else:
        texts = given.sentences if given else ()
    found = sentences.perturbed(texts, made, count=config.pairs, seed=config.seed)
    for name in made:
        if texts and not any(pair.slice == name for pair in found):
            skipped.append(
                results.SkippedSlice(name, f"none of {len(texts)} sentences has a place for it")
            )
    pairs += found
    pairs += given.pairs if given else ()
    flips = sentences.flipped(config.pairs, config.seed)
    pairs += [pair for pair in flips if pair.slice in wanted]
    pairs, trained, of_models = _without_trained(subjects, pairs)
    for name in trained.keys() - {pair.slice for pair in pairs}:
        reason = f"a model was trained on a sentence of each of its {trained[name]} pairs"
        skipped.append(results.SkippedSlice(name, reason))
    similarity, dissimilar = None, {}
    if config.least_similarity is not None and pairs:
        encoder = Encoder()
        cosines = similarities(encoder, [(pair.text, pair.perturbed) for pair in pairs])
        keep = [
            pair.slice in meaning.SLICES or cosine >= config.least_similarity
            for pair, cosine in zip(pairs, cosines, strict=True)
        ]
        for pair, kept in zip(pairs, keep, strict=True):
            dissimilar[pair.slice] = dissimilar.get(pair.slice, 0) + (not kept)
        pairs = [pair for pair, kept in zip(pairs, keep, strict=True) if kept]
        similarity = tuple(float(x) for x, kept in zip(cosines, keep, strict=True) if kept)
    if not pairs:
        known = f" ({sum(trained.values())} stand in training text)" if trained else ""
        raise BadInputError(
            f"there is no pair to measure{known}; give more sentences or other slices"
        )
    return Pairs(tuple(pairs), similarity, dissimilar, tuple(skipped), trained, of_models)


def _without_trained(
    subjects: Sequence[SubjectModel], pairs: Sequence[Pair]
) -> tuple[list[Pair], dict[str, int], tuple[results.TrainedOn, ...]]:
    """The pairs that no model was trained on, the others by slice, and what each model has."""
    # Both texts, for a perturbed one may be the one that stands in a corpus.
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.text, pair.perturbed)))
    by_corpus: dict[CorpusConfig, held_out.Trained] = {}
    found = []
    for one in subjects:
        # Models of one text may have tokenizers of their own.
        corpus = dataclasses.replace(one.model.config.corpus, vocab_size=0)
        if corpus not in by_corpus:
            by_corpus[corpus] = held_out.trained_on(texts, corpus)
        found.append(by_corpus[corpus])
    gone = frozenset[str]().union(*(one.texts for one in found))
    kept = [pair for pair in pairs if not {pair.text, pair.perturbed} & gone]
    left_out = Counter(pair.slice for pair in pairs if {pair.text, pair.perturbed} & gone)
    models = tuple(results.TrainedOn(len(one.texts), one.unknown) for one in found)
    return kept, dict(left_out), models


def perturbations(
    wanted: Sequence[str], wordnet: lists.WordNet | None, *, named: bool
) -> tuple[dict[str, perturb.Perturbation], list[results.SkippedSlice]]:
    """The wanted ones of `PERTURBATIONS` by name, and those whose data are missing.

    Raises:
      BadInputError: data are missing, and the slices were asked for by name.
    """
    made, reasons = perturb.without_data(), {}
    if wordnet is not None:
        made |= perturb.of_wordnet(wordnet)
    else:
        missing_words = "WordNet is missing; name a folder with its index.sense by --wordnet"
        reasons |= dict.fromkeys(("synonym", "synonym_pos"), missing_words)
    try:
        made |= perturb.of_inflections()
    except BadInputError as error:
        reasons["morphology"] = str(error)
    missing = {name: reason for name, reason in reasons.items() if name in wanted}
    if named and missing:
        name, reason = next(iter(missing.items()))
        raise BadInputError(f"the slice {name} cannot be made: {reason}")
    skipped = [results.SkippedSlice(name, reason) for name, reason in missing.items()]
    return {name: made[name] for name in PERTURBATIONS if name in wanted and name in made}, skipped
