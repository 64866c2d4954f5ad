"""Circuits of dense and sparse models: tasks, patching, ablations, curves.

tasks, generators, metrics    prompts in pairs, aligned for a tokenizer, and what is measured
runs                          a model on a task, under edits
patching                      effects of heads and token edges, exact and by attribution
component_graph               writers to the residual stream, readers of it, edges between them
place_patching                effects of the stream, attention, MLPs and heads by position
atp_star                      estimates of these by AtP*, and a bound on what they overlook
upper_runs                    runs that begin at the layer of their patch
components                    effects of component edges: exact, EAP and EAP-IG
rules                         local derivatives of attributions: frozen norms, half products, GIM
component_ablation            component edges ablated in one forward pass
agreement                     rank correlation of an attribution with exact patching
ablation, discover, curves    circuits of growing size, and how much of the metric they explain
edge_pruning                  a circuit by gradient descent on masks
mib                           files and areas of MIB
"""

from sparse_jax.circuits.component_graph import ComponentGraph, num_edges
from sparse_jax.circuits.curves import cpr_cmd

__all__ = ["ComponentGraph", "cpr_cmd", "num_edges"]
