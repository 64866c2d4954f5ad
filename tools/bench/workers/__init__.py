"""Programs that run in environments of their own, started by benchmarks."""
