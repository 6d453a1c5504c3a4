"""Experiments: which runs make a table or a figure, and tables and figures from runs."""
