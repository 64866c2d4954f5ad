"""How fast does a model decode with a recipe in all heads, and how much does it keep?

    iaj polyattn bench --config=polyattn/bench --workdir=runs/bench
    iaj polyattn bench --config=polyattn/bench --config.model=llama_small \\
        --config.recipes="('window:w=64,sinks=4', 'elu1')" --workdir=runs/mine

For each length of the text before it: tokens per second of one text, and bytes of what is kept of
it, with softmax and its KV cache and with each recipe in constant memory (`recipes.decoding`,
which says what recipes have that). All are timed in turns in one run, so that load on the machine
affects all of them, and the ratio of the rates of a turn is what to read. Before that, decoding is
compared with the recipe on whole rows of scores. The text before is not read, since what it holds
changes no time: the cache is empty but for its length. What the recipe costs in quality is asked
by `iaj polyattn check`.
"""

from lm_jax.study import Study
from polyattn_jax.studies.bench.results import BenchSummary
from polyattn_jax.studies.bench.settings import BenchConfig, smoke

STUDY = Study(
    command="polyattn bench",
    config=BenchConfig,
    modes={"smoke": smoke},
    summary=BenchSummary,
    run="run:measure_all",
)
