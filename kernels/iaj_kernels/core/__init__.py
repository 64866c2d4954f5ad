"""What all operations share: dispatch, tuned tiles, shape checks, noise and test cases."""
