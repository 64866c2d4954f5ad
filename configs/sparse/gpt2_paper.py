"""A cross-layer transcoder of GPT-2 on a node of eight H100 GPUs, as in Table 3 of the paper.

    iaj sparse transcoder --config=sparse/gpt2_paper --config.model=gpt2 --workdir=runs/clt_gpt2 \\
        --config.corpus.source=/path/to/openwebtext

Neither the weights nor the text are in a package registry: give a folder of each. The paper has
1,024 tokens of 64-token windows per rank, here 128 windows on eight: 24,414 updates see 200 million
tokens, and the coefficient of sparsity rises over the first 18,749 of them. Training ends earlier
where the mean over layers is 3 active features per token. One setting of Table 3 differs: the rate
falls as a cosine over the whole run, not over its last 1,874 updates.

On paper: 24,576 features a layer are 1.70 billion parameters, with gradient and two moments 27 GB,
3.4 GB on each device with features split eight ways. Features, pre-activations and their gradients
of 8,192 tokens are 1.2 GB an array and device, six of them at once 7 GB. An update is 85 TFLOP,
0.05 seconds at 200 TFLOP/s a device, and adds up one array of 302 MB over the devices: 25 minutes
in all, without evaluations. Their graphs are computed on one device, which then holds the whole
transcoder, 6.8 GB. It was not run.
"""

from ml_collections import ConfigDict

from lm_jax.text.preparation import CorpusConfig
from sparse_jax.studies.transcoders import STUDY
from sparse_jax.transcoders.objective import Penalties

STEPS = 24_414


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.transcoders.settings.TranscoderTraining`."""
    return STUDY.settings(
        mode,
        corpus=CorpusConfig("openwebtext", "document", splits=(0.999, 0.001, 0.0)),
        context=64,
        features=24_576,
        penalties=Penalties(
            sparsity=2.0, tanh_scale=4.0, dead=1e-5, ramp=18_749 / STEPS, silent_steps=250
        ),
        firing_rate=10_000 / 24_576,
        batch_size=128,
        steps=STEPS,
        learning_rate=2e-4,
        warmup=1_000 / STEPS,
        stop_l0=3.0,
        eval_every=500,
        scores_every=1_000,
        save_every=1_000,
        mesh=(1, 1, 8),
    )
