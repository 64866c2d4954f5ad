"""Token mixers: prototype channels, and the recurrences that they are compared with."""
