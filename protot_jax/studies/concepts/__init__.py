"""Analyses the prototypes of a trained model: what writes to them, and when they are read.

    iaj protot concepts --run=runs/speeches
    iaj protot concepts --run=runs/speeches --judge=local:FOLDER --top=20
    iaj protot concepts --run=runs/protot --compare=heads:runs/llama --compare=sae:runs/llama

After Prototype Transformer, section 5.1 and appendices A.7 and A.8. `--workdir` is by default the
folder `concepts` of the run; `run.py` lists what is written there, and `results.py` all statistics
and the top texts, which the page shows.

`--judge=local:FOLDER` has a language model name the themes, `--judge=cached:FILE` takes answers
from a file, `--judge=chat:MODEL@URL` asks an endpoint with OpenAI's protocol. `--rubric=FILE` has
other instructions than ours, and `--marked=0.8 --judge_temperature=1 --judge_tokens=756` are the
settings of the released script. `--compare` reads the same texts with another model, and describes
its heads by the norm of their values, or the features of a small sparse autoencoder that is trained
for it (`units.py`). `--ablated` sets the page's panel of interventions (`ablations.py`). A killed
command starts again from the beginning, but keeps the answers of its judge. Where a file of answers
has grown, `--resume=force` reads it again.
"""

from lm_jax.study import Study
from protot_jax.studies.concepts.results import ConceptReport
from protot_jax.studies.concepts.settings import ConceptConfig, smoke

STUDY = Study(
    command="protot concepts",
    config=ConceptConfig,
    modes={"smoke": smoke},
    summary=ConceptReport,
)
