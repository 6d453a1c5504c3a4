"""CoCoD-SGD (Shen et al., IJCAI 2019, arXiv 1906.12043). Fully overlapped.

    at the end of round t, on every replica i:
        p^i_t = x^i_{t,τ} − x^i_{t,0}               own progress
        δ_{t−1} = mean_i p^i_{t−1} arrives          its mean was taken during round t
        x^i_{t+1,0} = x^i_{t,τ} + (δ_{t−1} − p^i_{t−1})
        start the mean of p^i_t                     δ_{−1} = p^i_{−1} = 0

τ → `tau`. Local progress is kept; replicas differ by one round's disagreement.
Deviation: −p travels, the pseudo-gradient, as in every method here.
"""

from dataclasses import dataclass

import torch

from co2.methods.local import LocalMethod, check_tau


class CoCoDSGD(LocalMethod):
    held = 2  # the round's start, what was sent last
    vectors = ("start", "sent")
    rounds_apart = 2

    @dataclass
    class Config:
        tau: int | str = 12
        """Inner steps of a round, or auto (tau.py)."""

        def __post_init__(self) -> None:
            check_tau(self.tau)

    def begin(self) -> None:
        self.start = self.flat.copy()
        self.sent = self.flat.zeros()

    def end_round(self) -> None:
        arrived = self.mean.wait()
        for chunk in self.flat.chunks:
            start, sent = chunk.of(self.start), chunk.of(self.sent)
            buffer, x = chunk.of(self.mean.buffer), self.flat.local(chunk)
            if arrived is not None:
                sent.sub_(buffer)  # δ_{t−1} − p^i_{t−1}, zero before the first arrival
            torch.sub(start, x, out=buffer)  # −p^i_t
            x.add_(sent)  # x^i_{t+1,0}
            chunk.write(x)
            start.copy_(x)
            sent.copy_(buffer)  # as it travels, rounded: or replicas would drift apart
        self.mean.start()
