"""Fine-tunes trained models on sentence tasks: GLUE's, or embedded ones.

    iaj protot glue --config=protot/glue --config.runs="('runs/speeches',)" --workdir=runs/glue
    iaj protot glue --config=protot/glue:official --config.folder=GLUE \\
        --config.runs="('protot=runs/protot','llama=runs/llama')" --workdir=runs/official

Prototype Transformer, section 5 and appendix A.4 (Tables 2 and 10):

1. Every model is fine-tuned on the search tasks at each learning rate and warm-up, and the pair of
   the best mean metric on their selection splits is taken for all tasks.
2. With it, every model is fine-tuned on every task, once for each seed. The weights of the best
   evaluation predict.
3. Metrics are set beside those of the most frequent class, on the same examples.

The folder of the official files is the user's: `CoLA/train.tsv` and so on. Other tasks need no
folder: `iaj fetch films mc wiki` brings their text. `run.py` lists the files of the work folder.

The same command resumes a killed run; finished fine-tunings are not repeated, nor are those that
diverged: these count as worse than all others in the choice, and have no results.
"""

from lm_jax.study import Study
from protot_jax.studies.glue.results import GlueSummary
from protot_jax.studies.glue.settings import GlueConfig, official, smoke

STUDY = Study(
    command="protot glue",
    config=GlueConfig,
    modes={"smoke": smoke, "official": official},
    summary=GlueSummary,
)
