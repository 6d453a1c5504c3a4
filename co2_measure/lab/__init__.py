"""The laboratory: real trainings over links with real rates, on one machine.

trial.py         what is measured: a trial and the conditions that it runs under
plan.py          the command line's words as trials
slow_network.py  a network namespace for each worker, and a link whose rate the kernel enforces
training.py      one trial, run by worker processes inside that network
measurement.py   what a trial gave: a line of cells.csv
report.py        the table and the figure
"""
