"""Which token is a residual stream on its way to, and from which layer on does it say so?

    iaj sparse lens --config=sparse/lens --workdir=runs/lens
    iaj sparse lens --config=sparse/lens --config.model=FOLDER \\
        --config.prompts="('The capital of France is',)" --workdir=runs/mine

Fits the Jacobian lens of a model on texts (`lm_jax.inspect.jacobian_lens`), with its standard error
by layer, and writes it as `lens.safetensors`. On held-out texts the model's next-token distribution
is compared with what that lens and the logit lens read in every layer. Of every prompt the page has
the token that each lens reads, by layer and position. `--config.lens=FILE` reads by a lens that is
there, in place of fitting one. The page is `report.html`.
"""

from lm_jax.study import Study
from sparse_jax.studies.lens.results import LensSummary
from sparse_jax.studies.lens.settings import LensConfig, smoke

STUDY = Study(
    command="sparse lens",
    config=LensConfig,
    modes={"smoke": smoke},
    summary=LensSummary,
)
