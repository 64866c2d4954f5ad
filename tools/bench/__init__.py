"""What the benchmarks share: timing in turns, conditions of a run, programs and their bars."""
