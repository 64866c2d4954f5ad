"""Draws attribution graphs: what features of a transcoder, errors and tokens cause in a prompt.

    iaj sparse graph --model=runs/pair/dense/model --transcoder=runs/clt/transcoder \\
        --prompt="When Mary and John went to the park, Mary gave a ball to" --workdir=runs/graph
    iaj sparse graph --model=smollm2 --transcoder=runs/smollm2_clt/transcoder \\
        --prompts=mine.jsonl --edge_threshold=0.98 --workdir=runs/graphs
    iaj sparse graph --model=smollm2 --neurons --prompt="The capital of France is" \\
        --workdir=runs/neurons
    iaj sparse graph --dense=runs/dense/model --dense_transcoder=runs/clt_dense/transcoder \\
        --sparse=runs/sparse/model --sparse_transcoder=runs/clt_sparse/transcoder \\
        --workdir=runs/compared

After section 4.3 of "Sparse Attention Post-Training". Each edge comes with the heads, and the pairs
of a query and a key, that carry it. With --neurons the features are
the neurons of the model's own MLPs, which need no training and are no transcoder's: most are active
on every token. With --dense and --sparse two models are compared on the same
prompts, ten of four kinds if none is named. A line of a .jsonl file is

    {"prompt": "...", "targets": [" John"], "kind": "ioi", "slug": "mary"}

where all but the prompt may be left out. Prompts with the same "meaning" say the same in other
words; whether the same heads compute them is measured too (`stability`). Labels of features come
from a file or from a judge.
`run.py` lists the files of the work folder. The same command resumes a killed run, which ends with
the same numbers. Other labels with --resume=force remake no graph.
"""

from lm_jax.study import Study
from sparse_jax.studies.graphs.results import GraphSummary
from sparse_jax.studies.graphs.settings import GraphConfig, smoke

STUDY = Study(
    command="sparse graph",
    config=GraphConfig,
    modes={"smoke": smoke},
    summary=GraphSummary,
    inputs="inputs:open_inputs",
    run="run:measure",
    report="report:build",
)
