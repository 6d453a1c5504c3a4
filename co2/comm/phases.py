"""Names of the phases of a round in a profiler's trace (co2/record/trace.py, timeline.py)."""

OUTER_STEP = "co2: outer step"
"""The end of a round; the two below are parts of it."""
SNAPSHOT = "co2: snapshot"
WAIT = "co2: wait"
"""Computation stands still until a collective is over."""
