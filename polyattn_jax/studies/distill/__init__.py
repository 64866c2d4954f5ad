"""A little training of heads that a recipe replaces: what does it repair? (`iaj polyattn distill`)

config     the settings
task       model, data and objective
matching   the objective: outputs of replaced heads against those of softmax
measure    S, errors and losses on held-out windows
trained    the trained heads as a folder
results    tables and summary.json
report     the page, and the summary for a terminal
"""
