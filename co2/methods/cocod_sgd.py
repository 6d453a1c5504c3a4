"""CoCoD-SGD (Shen et al., IJCAI 2019, arXiv 1906.12043). Fully overlapped.

    at the end of round t, on every replica i:
        p^i_t = x^i_{t,τ} − x^i_{t,0}               own progress
        δ_{t−1} = mean_i p^i_{t−1} arrives          its mean was taken during round t
        x^i_{t+1,0} = x^i_{t,τ} + (δ_{t−1} − p^i_{t−1})
        start the mean of p^i_t                     δ_{−1} = p^i_{−1} = 0

With `blocking_share` the first rounds wait for δ_t, which takes the place of p^i_t at once: they
are those of local SGD, and the first round after them is as round 0.

τ → `tau`. Local progress is kept; replicas differ by one round's disagreement, which their mean is
free of: the consensus is the mean of the x^i_{t,τ}, right after a round's end too.
Deviation: the pseudo-gradient −p travels, as in every method here.
"""

from dataclasses import dataclass

from co2.methods.shared.local_method import LocalMethod
from co2.methods.shared.rounds import LateRounds


class CoCoDSGD(LocalMethod):
    may_change = frozenset({"tau", "blocking_share"})

    @dataclass
    class Config(LateRounds):
        """Rounds are all that it has."""

    def init_outer_state(self) -> None:
        self.round_start = self.hold("start", self.flat.copy())
        self.last = self.hold("last", self.flat.zeros())  # −p of the last round

    def end_round(self) -> None:
        arrived = self.mean.wait()
        for chunk in self.flat.chunks:
            start, last = chunk.of(self.round_start), chunk.of(self.last)
            buffer, x = chunk.of(self.mean.buffer), chunk.read()
            if arrived is not None:
                last.sub_(buffer)  # δ_{t−1} − p^i_{t−1}, zero before the first arrival
            start.sub_(x)  # −p^i_t
            buffer.copy_(start)
            x.add_(last)  # x^i_{t+1,0}
            chunk.write(x)
            # `last` is exactly what x has gained, although it travels rounded. So x is p^i_t plus a
            # sum of means, which are equal on all replicas. If it were the rounded value, each
            # round's rounding error would stay in x, and the replicas would drift apart.
            last.copy_(start)
            start.copy_(x)
        self.mean.start()
        if self.waits:
            self._take_in_at_once()

    def _take_in_at_once(self) -> None:
        """Wait for what was just sent; nothing is left for the next round's end."""
        self.mean.wait()
        for chunk in self.flat.chunks:
            start, last = chunk.of(self.round_start), chunk.of(self.last)
            start.add_(last.sub_(chunk.of(self.mean.buffer)))
            chunk.write(start)
            last.zero_()
