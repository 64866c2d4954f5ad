"""Pretraining and its studies, saved runs, exports."""
