"""Results of a run: `summary.json`.

The dataclasses are in `protot_jax.training.results`, where ablations and exports read them too.
"""

from protot_jax.training.results import CorpusSummary, PretrainSummary, SeedSummary

__all__ = ["CorpusSummary", "PretrainSummary", "SeedSummary"]
