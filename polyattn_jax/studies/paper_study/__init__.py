"""The paper's tables and figures on given models: its numbers beside ours (`iaj polyattn paper`).

tables     published numbers that a report of one audit does not need (`polyattn_jax.report.paper`:
           others)
rows       comparison of an audit's numbers with them, one row for each
items      all tables and figures, and why some have no number of ours
claims     the paper's claims, and whether they hold
results    the dataclasses of summary.json
page       the report, and the summary for a terminal
"""
