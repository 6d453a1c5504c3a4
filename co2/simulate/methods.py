"""Which methods are simulated, and how: read from what each method declares.

Every method says in its class what a replica's computation waits for, as in
`blocking = Blocking.beyond_delay`. The lists below follow from that, so a new method is simulated
without being named here. The declarations are read from the source text and not imported, because
importing co2.methods would import torch, which the simulator does not need and a laptop may not
have.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from co2.errors import nearest, require

FOLDER = Path(__file__).parents[1] / "methods"
_REGISTERED = re.compile(r'^    "(\w+)":', re.MULTILINE)
_DECLARATION = re.compile(r"^    blocking(?:: .+)? = Blocking\.(\w+)", re.MULTILINE)
LIMIT = "none"
"""Replicas that never communicate: the limit of what any method can reach."""
ALLREDUCE = "allreduce"
"""Averages gradients, bucket by bucket, while backward still runs: a schedule of its own."""
ACCO = "acco"
"""Lets the mean of every step travel during the next one."""
NO_ROUNDS = (LIMIT, ALLREDUCE, ACCO)
"""Have no round of τ steps."""
MESSAGE_SHARE = {"sparseloco": (82 * 14 + 32) / (4096 * 32)}
"""Methods whose replicas gather messages and take no mean, each with the bytes of a message
as a share of an fp32 vector's. SparseLoCo with its default density sends 82 of 4,096 elements, at
14 bits each, and 32 bits more."""
FURTHER_VECTORS = {"desloc": (3, 6), "mt_dao": (1, 1)}
"""Methods that average further vectors as large as the weights, each with the rounds between two
means of every such vector: moments, with the methods' default periods."""
WITH_MOMENTS = ("diloco", "co2", "co2_keep")
"""Methods with `average_moments`, under which two further vectors travel in every round."""
NOT_ELASTIC = ("sparseloco",)
"""Methods with rounds whose replicas cannot come and go at the end of one, for the reason that the
method gives in `refusals`."""
LEFT_OUT = {
    "streaming_diloco": "each fragment of its model has rounds of its own",
    "noloco": "each replica waits for one other, which chance draws, and not for all",
    "sparta": "its exchanges, of a few weights, follow `delay` and no rounds",
    "demo": "what it sends depends on the shapes of the model's tensors",
    "onebit_adam": "what it sends shrinks when its variance is frozen, in the midst of training",
    "zero_one_adam": "how often it sends, and how much, changes in the course of training",
}
"""Methods that are not simulated, each with the reason."""


def declarations(folder: Path = FOLDER) -> dict[str, str]:
    """The member of `Blocking` that each method of the registry declares, in the registry's order.

    The registry has a line for each method. A method's file has the name that it is registered
    under, and its class has one line `blocking = Blocking.<member>`.
    """
    _, _, registry = (folder / "__init__.py").read_text(encoding="utf-8").partition("METHODS: ")
    return {name: _blocking(folder / f"{name}.py") for name in _REGISTERED.findall(registry)}


def _blocking(path: Path) -> str:
    members = _DECLARATION.findall(path.read_text(encoding="utf-8"))
    assert len(members) == 1, f"{path} must have one line `blocking = Blocking.<member>`"
    return members[0]


def _with_rounds(declared: Mapping[str, str], blocking: str) -> tuple[str, ...]:
    out = {*LEFT_OUT, *NO_ROUNDS}
    return tuple(name for name, own in declared.items() if own == blocking and name not in out)


_DECLARED = declarations()
BLOCKING = _with_rounds(_DECLARED, "always")
"""Stand still at the end of a round until the mean of that round has arrived."""
OVERLAPPED = _with_rounds(_DECLARED, "beyond_delay")
"""Let the mean of a round travel during the next one, and wait for it at the end of that."""
SIMULATED = (*NO_ROUNDS, *BLOCKING, *OVERLAPPED)


def require_simulated(key: str, method: str) -> None:
    """Raise `ConfigError`, with the reason or the nearest name, unless the method is simulated."""
    hint = nearest(method, SIMULATED)
    if method in LEFT_OUT:
        hint = f"is not simulated, because {LEFT_OUT[method]}"
    require(method in SIMULATED, key, method, hint)


def label(method: str, tau: int) -> str:
    """A method with its τ, if it has one."""
    return method if method in NO_ROUNDS else f"{method} τ={tau}"


def vectors_in(method: str, number: int, average_moments: bool) -> int:
    """The vectors as large as the weights that are averaged in round `number`, counted from 1."""
    periods = FURTHER_VECTORS.get(method, ())
    if average_moments and method in WITH_MOMENTS:
        periods = (1, 1)
    return 1 + sum(number % period == 0 for period in periods)
