"""Has trained models continue prompts, measures the texts, and has judges compare them.

    iaj protot judge --run=runs/protot --run=runs/llama --judge=perplexity:smollm2
    iaj protot judge --run=runs/protot --run=runs/llama --prompts=mine.jsonl --judge=tokens:FOLDER

After Prototype Transformer, section 5 (text-generation performance) and appendix B. Each model
continues the same held-out beginnings of documents (or those of a file of JSON lines with prompt
and reference), greedily and sampled. The texts are measured by BLEU and ROUGE-L against the true
continuation, distinct n-grams and repetition. A judge sees each pair of models in both orders;
judges that read nothing are always among them. Ratings are printed only of a judge that prefers
real continuations to worse ones (`lm_jax.evaluate`).

    tokens:FOLDER        a language model's most likely answer, A, B or Tie
    perplexity:FOLDER    the continuation of lower loss under a language model, or under a run
    cached:FILE          answers from a file; FILE.missing lists the prompts that have none
    chat:MODEL@URL       a chat endpoint of yours, asked at that URL and nowhere else

FOLDER is whatever `lm_jax.load_pretrained` takes: a folder, a GGUF file, a name such as smollm2.
Without `--workdir` the results are in a folder below `judging` of the first run; `run.py` lists its
files. A killed command resumes with what was generated, answered and scored, and `--resume=force`
takes up answers that were added to FILE.
"""

from lm_jax.study import Study
from protot_jax.studies.judging.results import JudgingSummary
from protot_jax.studies.judging.settings import JudgingConfig, smoke

STUDY = Study(
    command="protot judge",
    config=JudgingConfig,
    modes={"smoke": smoke},
    summary=JudgingSummary,
)
