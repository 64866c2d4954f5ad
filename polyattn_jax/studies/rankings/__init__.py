"""Which ranking of layers or heads tells beforehand what a trained hybrid loses?

    iaj polyattn rankings --config=polyattn/rankings --workdir=runs/rankings
    iaj polyattn rankings --config=polyattn/rankings --config.model=llama_small \\
        --config.recipe=relu:p=4,b=auto --config.task=induction --workdir=runs/mine

Searches for hybrids rank layers or heads by a statistic of the model as it is, replace those that
cost least, and train the result. This measures whether the statistic was right:

1. Groups (layers, key heads or heads) are ranked by each statistic of `audit.ranking`.
2. For each budget, the share of groups that is replaced, the set that each statistic would replace
   is formed, and random sets of the same size.
3. Each set is trained in the two stages of `iaj polyattn distill`, its heads on the outputs of
   softmax, then the whole hybrid on the distribution of the next token. All sets of a seed are
   trained on the same tokens.
4. On held-out windows and on prompts: the loss over softmax, before and after either stage, and the
   right answers.
5. Over the random sets of one size and seed, the rank correlation of what each statistic says of a
   set (the sum of the costs of its groups) with what the set loses.

The same command resumes a run that was killed, set by set.
"""

from lm_jax.study import Study
from polyattn_jax.studies.rankings.results import RankingsSummary
from polyattn_jax.studies.rankings.settings import RankingsConfig, smoke

STUDY = Study(
    command="polyattn rankings",
    config=RankingsConfig,
    modes={"smoke": smoke},
    summary=RankingsSummary,
    run="run:measure_all",
)
