"""Which methods are simulated, and how, as the catalogue says (co2/catalogue.py)."""

from co2.catalogue import CATALOGUE, Entry
from co2.config import Blocking
from co2.errors import nearest, require

LIMIT = "none"
"""Replicas that never communicate: the limit of what any method can reach."""
ALLREDUCE = "allreduce"
"""Averages gradients, bucket by bucket, while backward still runs: a schedule of its own."""
ENTRIES = {LIMIT: Entry("", "nothing", Blocking.never, copies=0, rounds=False)} | {
    name: entry for name, entry in CATALOGUE.items() if not entry.not_simulated
}
NO_ROUNDS = tuple(name for name, entry in ENTRIES.items() if not entry.rounds)
"""Have no round of τ steps."""


def _with_rounds(blocking: Blocking) -> tuple[str, ...]:
    waits = ((name, entry.blocking) for name, entry in ENTRIES.items() if entry.rounds)
    return tuple(name for name, own in waits if own is blocking)


BLOCKING = _with_rounds(Blocking.always)
"""Stand still at the end of a round until the mean of that round has arrived."""
OVERLAPPED = _with_rounds(Blocking.beyond_delay)
"""Let the mean of a round travel during the next one, and wait for it at the end of that."""
SIMULATED = (*NO_ROUNDS, *BLOCKING, *OVERLAPPED)
WITH_MOMENTS = tuple(name for name, entry in ENTRIES.items() if entry.average_moments)
"""Methods with `average_moments`, under which two further vectors travel in every round."""
WITH_FRAGMENTS = tuple(name for name, entry in ENTRIES.items() if entry.fragments)
"""Methods with `fragments`, which travel one after the other."""


def require_simulated(key: str, method: str) -> None:
    """Raise `ConfigError`, with the reason or the nearest name, unless the method is simulated."""
    hint = nearest(method, SIMULATED)
    if method in CATALOGUE:
        hint = f"is not simulated, because {CATALOGUE[method].not_simulated}"
    require(method in ENTRIES, key, method, hint)


def label(method: str, tau: int) -> str:
    """A method with its τ, if it has one."""
    return method if method in NO_ROUNDS else f"{method} τ={tau}"
