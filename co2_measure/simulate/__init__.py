"""The simulator: step time, communication, scaling and goodput of a cluster that you do not have.

network.py   links, servers, and how long an all-reduce takes
methods.py   which methods are simulated, as the catalogue says
schedule.py  when each replica computes, sends and waits, round after round
models.py    the sizes of models, and what a step of them costs to compute
options.py   the command line's words, checked
scaling.py   figures against the number of GPUs
failures.py  goodput where nodes fail, in closed forms
drawn.py     the same by drawing failures
goodput.py   goodput against the number of GPUs
paper.py     the CO2 paper's scaling figures beside simulated ones
report.py    console, CSV, Markdown and the picture

Nothing here imports torch. NumPy is needed; rich and matplotlib are imported where they are used.
"""
