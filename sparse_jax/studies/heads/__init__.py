"""What does each attention head do?

    iaj sparse heads --config=sparse/heads --workdir=runs/heads
    iaj sparse heads --config=sparse/heads --config.model=FOLDER \\
        --config.heads="('5.3',)" --workdir=runs/mine

Measures every head of a model, dense or sparse, on texts and on repeated random tokens
(`lm_jax.inspect.head_measures`): where it looks, how much it writes, whether it copies. Of chosen
heads, or of the strongest of each kind, the page has the texts on which they write most, with their
weights, and the tokens that they raise there. The page is `report.html`.
"""

from lm_jax.study import Study
from sparse_jax.studies.heads.results import HeadsSummary
from sparse_jax.studies.heads.settings import HeadsConfig, smoke

STUDY = Study(
    command="sparse heads",
    config=HeadsConfig,
    modes={"smoke": smoke},
    summary=HeadsSummary,
)
