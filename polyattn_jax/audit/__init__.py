"""Stages, suites and statistics that all studies of an audited model share."""
