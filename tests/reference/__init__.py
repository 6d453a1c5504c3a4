"""Single-process simulations of every method, written from the papers' formulas alone."""

from tests.reference import allreduce, co2, cocod_sgd, local_sgd, overlap_local_sgd, slowmo

REFERENCES = {
    "allreduce": allreduce.rounds,
    "local_sgd": local_sgd.rounds,
    "slowmo": slowmo.rounds,
    "overlap_local_sgd": overlap_local_sgd.rounds,
    "cocod_sgd": cocod_sgd.rounds,
    "co2": co2.rounds,
}
"""Name to `rounds(replicas, **settings)`: an endless iterator, one item a round, that trains the
replicas in place. After item t they hold what they start round t + 1 from."""
