"""Fine-tuning on sentence tasks, after appendix A.4 of the Prototype Transformer's paper.

    iaj fetch films mc wiki
    iaj protot glue --config=protot/glue --config.runs="('runs/speeches',)" --workdir=runs/glue

The embedded tasks with a grid of six, for a CPU. Mode `:official` has the nine tasks of GLUE, in
`--config.folder`, and the paper's grid of 22. Not measured on a model trained to the end.
"""

from ml_collections import ConfigDict

from protot_jax.studies.glue import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.studies.glue.settings.GlueConfig`."""
    return STUDY.settings(
        mode,
        tasks=("films", "films_rating", "qnli_like"),
        learning_rates=(1e-4, 3e-4, 1e-3),
        warmups=(0.06, 0.1),
        search_tasks=("films",),
        max_length=128,
    )
