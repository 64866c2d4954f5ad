"""Post-trains a pretrained model to sparse attention under a bound on its loss.

    iaj sparse posttrain --config=sparse/quickstart --workdir=runs/sparse_quickstart
    iaj sparse posttrain --config=sparse/smollm2 --config.seeds="(0, 1, 2)" --workdir=runs/sparse

1. Settings that do not fit the model are refused before anything is written. The corpus is
   tokenized with the model's tokenizer and split into windows; then the weights are loaded.
2. The dense model is evaluated. A target below its loss is refused; usually the target is its loss
   plus a slack.
3. Each run, one per seed and target, trains in its own folder, from its last checkpoint if there is
   one.
4. Adapters are merged into the weights; the model is compared with the dense one and exported.
5. With `control`, a further run of each seed trains on the same text with every gate open; with
   `slack_over="control"` it comes first, and bounds are relative to its loss.

`run.py` lists the files of the work folder. The same command resumes a killed run, which ends with
the same parameters; on another mesh or device with nearly the same. `--resume=force` under other
settings renames the folders of earlier runs and trains again.
"""

from lm_jax.study import Study
from sparse_jax.studies.posttrain.results import PosttrainSummary
from sparse_jax.studies.posttrain.settings import PosttrainConfig, smoke

STUDY = Study(
    command="sparse posttrain",
    config=PosttrainConfig,
    modes={"smoke": smoke},
    summary=PosttrainSummary,
    inputs="run:inputs",
    run="run:train_all",
    report="report:build",
)
