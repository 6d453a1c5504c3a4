"""Single-process simulations of every method, written from the papers' formulas alone."""

from tests.reference import (
    acco,
    allreduce,
    co2,
    co2_keep,
    co2_released,
    cocod_sgd,
    demo,
    desloc,
    diloco,
    eager_diloco,
    local_sgd,
    mt_dao,
    noloco,
    onebit_adam,
    overlap_local_sgd,
    slowmo,
    sparseloco,
    sparta,
    streaming_diloco,
    zero_one_adam,
)

REFERENCES = {
    "allreduce": allreduce.rounds,
    "local_sgd": local_sgd.rounds,
    "slowmo": slowmo.rounds,
    "diloco": diloco.rounds,
    "overlap_local_sgd": overlap_local_sgd.rounds,
    "cocod_sgd": cocod_sgd.rounds,
    "streaming_diloco": streaming_diloco.rounds,
    "eager_diloco": eager_diloco.rounds,
    "sparseloco": sparseloco.rounds,
    "noloco": noloco.rounds,
    "co2": co2.rounds,
    "co2_keep": co2_keep.rounds,
    "co2_released": co2_released.rounds,
    "acco": acco.rounds,
    "sparta": sparta.rounds,
    "desloc": desloc.rounds,
    "mt_dao": mt_dao.rounds,
    "demo": demo.rounds,
    "onebit_adam": onebit_adam.rounds,
    "zero_one_adam": zero_one_adam.rounds,
}
"""Name to `rounds(replicas, **settings)`: an endless iterator, one item a round, that trains the
replicas in place. After item t they hold what they start round t + 1 from, and the item is what
consensus shows then, as one vector; None for the mean of what they hold, as amid a round."""
