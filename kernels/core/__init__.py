"""What every operation uses: dispatch, tuned tiles, shape checks, noise and test cases."""
