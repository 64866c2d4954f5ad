"""Post-training of a pretrained language model to sparse attention at equal loss.

After "Sparse Attention Post-Training for Mechanistic Interpretability".

    gates          Bernoulli gates on every edge (Eq. 1 to 3), GECO (Eq. 4, 5 and 7), SparseModel
    circuits       tasks, patching, ablations and component edges, in dense and sparse models
    transcoders    sparse features that stand for MLPs
    graphs         attribution graphs between such features, with heads that carry their edges
    studies        commands: posttrain, pair, circuits, transcoder, graph and others
"""

from lm_jax.run.moved import keep_names
from sparse_jax.gates.attend import by_kernels, gated
from sparse_jax.gates.model import SparseModel, load

keep_names(
    "sparse_jax",
    {
        "gates": "attend open_edges geco objective model",
        "circuits": "source_model edge_graph",
        "studies": "pair addition two_hop multiple_choice "
        "circuits.measurements circuits.paper circuits.parts circuits.piece "
        "circuits.report circuits.report_curves circuits.report_figures "
        "circuits.report_lead circuits.report_text circuits.results "
        "transcoders.measure transcoders.neurons transcoders.report "
        "transcoders.report_text transcoders.results transcoders.scores graphs.case_study "
        "graphs.comparison graphs.explanations graphs.inputs graphs.labels "
        "graphs.mass graphs.page graphs.piece graphs.prompts graphs.report "
        "graphs.report_text graphs.results graphs.stability",
        "studies.posttrain": "task evaluation export patterns report report_text results "
        "run_identity paper",
    },
    {
        "config": "studies.posttrain.settings",
        "posttrain": "studies.posttrain.run",
        "transcoders.comparison": "studies.transcoders.numbers",
        "transcoders.config": "studies.transcoders.settings",
        "transcoders.train": "studies.transcoders.run",
        "circuits.analysis": "studies.circuits.numbers",
        "circuits.config": "studies.circuits.settings",
        "circuits.study": "studies.circuits.run",
        "graphs.config": "studies.graphs.settings",
        "graphs.study": "studies.graphs.run",
    },
)

__all__ = ["SparseModel", "by_kernels", "gated", "load"]
