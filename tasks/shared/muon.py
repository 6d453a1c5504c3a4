"""Muon for hidden matrices and AdamW for everything else, as one optimizer.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a
weight matrix by the nearest matrix with orthogonal rows or columns, so that every direction of the
update is equally long. It is made for the matrices between hidden layers. Under `method=diloco` it
is MuLoCo (Thérien et al., arXiv 2505.23725).
"""

from collections.abc import Callable
from typing import Any

from torch.optim import AdamW, Muon, Optimizer


class MuonAdamW(Optimizer):
    """Each parameter group has PyTorch's Muon or PyTorch's AdamW, whose options it holds; rates,
    state and checkpoints are those of this one optimizer.

    Args:
        groups: a group with `muon=True` is stepped by Muon and holds matrices only; with
            `muon=False`, by AdamW. All other options are those of the two classes.
    """

    # `Any`: the options of a group have nothing in common.
    def __init__(self, groups: list[dict[str, Any]]) -> None:
        # Both classes complete the groups in place, so a change of a rate reaches them.
        self.parts = [Muon([group]) if group["muon"] else AdamW([group]) for group in groups]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every group."""
        assert closure is None, "the training loop has none"
        for part, group in zip(self.parts, self.param_groups, strict=True):
            # Both are new objects after load_state_dict.
            part.state, part.param_groups = self.state, [group]
            part.step()
