"""The command that draws attribution graphs and compares two models' graphs."""
