"""Two concept reports with labels of one judge."""

from lm_jax.run.files import write_json
from tests.protot_jax.studies.concepts import synthetic_report


def flags(request, folder):
    del request
    files = [folder / f"{seed}.json" for seed in range(2)]
    for seed, file in enumerate(files):
        write_json(file, synthetic_report.build(seed=seed))
    return [f"--report={file.stem}={file}" for file in files]
