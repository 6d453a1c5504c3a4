"""Measuring gear beside the library `co2`, which does not need it.

lab/       real trainings over links with real rates, on one machine
simulate/  what a cluster would do, without torch
peers/     other people's implementations, trained on equal terms
"""
