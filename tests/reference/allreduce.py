"""AllReduce: gradients are averaged at every step. A round is one step."""

from collections.abc import Iterator

from tests.reference.replica import Replica, mean


def rounds(replicas: list[Replica]) -> Iterator[None]:
    while True:
        for replica in replicas:
            replica.gradients()
        for copies in zip(*(replica.trainable() for replica in replicas), strict=True):
            average = mean(parameter.grad for parameter in copies)
            for parameter in copies:
                parameter.grad = average.clone()
        for replica in replicas:
            replica.update()
        yield
