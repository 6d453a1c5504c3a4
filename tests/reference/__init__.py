"""Single-process simulations of every method, written from the papers' formulas alone."""

from tests.reference import (
    adam,
    blocking,
    chance,
    co2,
    gradients,
    kept_progress,
    overlapped,
    signs,
    streaming_diloco,
)

REFERENCES = {
    "allreduce": gradients.allreduce,
    "local_sgd": blocking.local_sgd,
    "slowmo": blocking.slowmo,
    "diloco": blocking.diloco,
    "overlap_local_sgd": overlapped.overlap_local_sgd,
    "cocod_sgd": overlapped.cocod_sgd,
    "streaming_diloco": streaming_diloco.rounds,
    "eager_diloco": overlapped.eager_diloco,
    "sparseloco": blocking.sparseloco,
    "noloco": chance.noloco,
    "co2": co2.co2,
    "co2_keep": kept_progress.co2_keep,
    "co2_released": blocking.co2_released,
    "acco": gradients.acco,
    "sparta": chance.sparta,
    "desloc": adam.desloc,
    "mt_dao": adam.mt_dao,
    "demo": gradients.demo,
    "onebit_adam": signs.onebit_adam,
    "zero_one_adam": signs.zero_one_adam,
}
"""Name to a generator of `(replicas, **settings)`: an endless iterator, one item a round, that
trains the replicas in place. After item t they hold what they start round t + 1 from, and the item
is what consensus shows then, as one vector; None for the mean of what they hold, as amid a round.
"""
