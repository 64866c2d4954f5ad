"""What the benchmarks share: timing in turns, conditions of a run, contenders and their bars."""
