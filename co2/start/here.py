"""HERE: what this process, a worker, knows of the run that it works for.

It is of the whole process, as PyTorch's default process group is: who asks for it is called by a
task's, a method's or a user's code, through which it would have to be passed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from co2.elastic.members import Members
from co2.elastic.replicas import Replicas


@dataclass
class Here:
    """What this process knows of its run."""

    store: dist.Store | None = None
    """What the workers share. None: there are no others, or not yet."""
    join: Callable[[str], Members] | None = None
    """In an elastic run: become a member of it, with this backend. None in all others."""
    replicas: Replicas | None = None
    """Those of an elastic run, once this process is one of its members."""


HERE = Here()
