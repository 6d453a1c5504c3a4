"""DES-LOC (2505.22549): weights, first and second moments are averaged, each after its own period.

A round is one step here, because the periods need not be multiples of each other.
"""

from collections.abc import Iterator
from itertools import count

from tests.reference.moments import FIELDS, average
from tests.reference.replica import Replica, mean


def rounds(
    replicas: list[Replica], tau: int, first_moment_every: int, second_moment_every: int
) -> Iterator[None]:
    for step in count(1):
        for replica in replicas:
            replica.train(1)
        if step % tau == 0:
            x = mean(replica.weights() for replica in replicas)
            for replica in replicas:
                replica.set_weights(x)
        first, second = FIELDS
        if step % second_moment_every == 0:
            average(replicas, second)
        if step % first_moment_every == 0:
            average(replicas, first, divisor=second)
        yield
