"""The names of a round's phases in a profiler's trace (co2/record/trace.py, timeline.py)."""

OUTER_STEP = "co2: outer step"
"""Everything that a method does as a round ends, the two phases below included."""
SNAPSHOT = "co2: snapshot"
"""The live parameters are copied to or from a flat vector."""
WAIT = "co2: wait"
"""The computation stands still until a collective is over."""
