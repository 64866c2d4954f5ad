"""Blocks of the pages that are rendered from results/ and published/ (`tools/render_docs.py`).

Each function returns Markdown and takes names of results, so that a marked block of a page says
where its numbers come from:

    <!-- [[[cog cog.out(kernel_times("bench_kernels/h200")) ]]] -->
"""

from tools.page_blocks.circuits import circuits, place_agreements, ratios_of_seeds
from tools.page_blocks.concepts import findings, interventions, routing
from tools.page_blocks.decoding import decoding
from tools.page_blocks.graphs import carriers
from tools.page_blocks.hybrids import hybrids
from tools.page_blocks.kernels import kernel_checks, kernel_times
from tools.page_blocks.ledger import ledger
from tools.page_blocks.lenses import lenses
from tools.page_blocks.pairs import pair
from tools.page_blocks.paper_tables import claims
from tools.page_blocks.posttraining import kinds, over_updates, posttraining
from tools.page_blocks.rankings import chosen_hybrids, ranking_runs, rankings
from tools.page_blocks.robustness import comparisons, divergences
from tools.page_blocks.sources import conditions
from tools.page_blocks.timings import (
    cpu_decoding,
    cpu_forward,
    first_steps,
    gpu_forward,
    graphs_beside_circuit_tracer,
    paper_steps,
    torch_steps,
)
from tools.page_blocks.training import arithmetic, ten_epochs, three_epochs

__all__ = [
    "arithmetic",
    "carriers",
    "chosen_hybrids",
    "circuits",
    "claims",
    "comparisons",
    "conditions",
    "cpu_decoding",
    "cpu_forward",
    "decoding",
    "divergences",
    "findings",
    "first_steps",
    "gpu_forward",
    "graphs_beside_circuit_tracer",
    "hybrids",
    "interventions",
    "kernel_checks",
    "kernel_times",
    "kinds",
    "ledger",
    "lenses",
    "over_updates",
    "pair",
    "paper_steps",
    "place_agreements",
    "posttraining",
    "ranking_runs",
    "rankings",
    "ratios_of_seeds",
    "routing",
    "ten_epochs",
    "three_epochs",
    "torch_steps",
]
