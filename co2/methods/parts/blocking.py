"""BlockingMethod: methods that end a round with one outer step and wait for its mean."""

from torch import Tensor

from co2.comm.flat import Chunk
from co2.methods.parts.local import LocalMethod


class BlockingMethod(LocalMethod):
    """τ inner steps from x_{t,0}, and then d_t = mean_i (x_{t,0} − x^i_{t,τ}), for which all wait.

    A subclass has `blocking = Blocking.always`, `Config` with `tau` and `comm_share`, and
    `outer_step`, which makes x_{t+1,0}. All replicas hold the same x_{t,0}, `anchor`, which is the
    consensus right after a round's end.
    """

    def init_outer_state(self) -> None:
        self.anchor = self.flat.copy()

    def state_tensors(self) -> dict[str, Tensor]:
        return {**super().state_tensors(), "anchor": self.anchor}

    def replicated_tensors(self) -> dict[str, Tensor]:
        return {"anchor": self.anchor}

    def mean_now(self) -> Tensor:
        """Return d_t of what lies in `mean.buffer`, once it has come."""
        return self.mean.mean_now()

    def outer_step(self, chunk: Chunk, x: Tensor, d: Tensor) -> None:
        """Set x, which is x_{t,0}, to x_{t+1,0}, for the elements of one chunk of d_t."""
        raise NotImplementedError

    def end_round(self) -> None:
        self.flat.displacement(self.anchor, out=self.mean.buffer)
        mean = self.mean_now()
        for chunk in self.flat.chunks:
            x = chunk.of(self.anchor)
            self.outer_step(chunk, x, chunk.of(mean))
            chunk.write(x)
