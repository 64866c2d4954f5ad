"""Workloads of every operation, by name, for tests, benchmarks and tuning."""

from iaj_kernels.core.cases import Suite
from iaj_kernels.delta_rule.cases import SUITE as DELTA_RULE
from iaj_kernels.gated_attention.cases import SUITE as GATED_ATTENTION
from iaj_kernels.gated_slots.cases import SUITE as GATED_SLOTS
from iaj_kernels.prefix_mean.cases import SUITE as PREFIX_MEAN
from iaj_kernels.row_map_attention.cases import SUITE as ROW_MAP_ATTENTION
from iaj_kernels.score_stats.cases import SUITE as SCORE_STATS
from iaj_kernels.selective_scan.cases import SUITE as SELECTIVE_SCAN

SUITES: dict[str, Suite] = {
    suite.op: suite
    for suite in (
        PREFIX_MEAN,
        GATED_ATTENTION,
        ROW_MAP_ATTENTION,
        SCORE_STATS,
        SELECTIVE_SCAN,
        DELTA_RULE,
        GATED_SLOTS,
    )
}
