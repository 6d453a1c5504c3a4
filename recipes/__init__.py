"""Which runs make a table, and tables from runs."""
