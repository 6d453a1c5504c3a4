"""Local SGD (Stich, 1805.09767): x_{t+1,0} = x_{t,0} - d_t, which is the mean of the ends."""

from collections.abc import Iterator

from tests.reference.replica import Replica, mean


def rounds(replicas: list[Replica], tau: int) -> Iterator[None]:
    while True:
        for replica in replicas:
            replica.train(tau)
        average = mean(replica.weights() for replica in replicas)
        for replica in replicas:
            replica.set_weights(average)
        yield
