"""A run of pretraining of four steps, and two tasks that it can be fine-tuned on."""

from tests.protot_jax.studies.glue import learnable_files


def flags(request, folder):
    tasks = "--config.tasks=('sst2', 'stsb')"
    run = request.getfixturevalue("run")
    return [
        f"--config.runs=('tiny={run}',)",
        f"--config.folder={learnable_files.write(folder)}",
        tasks,
    ]
