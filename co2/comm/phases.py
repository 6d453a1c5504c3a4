"""Names in a profiler's trace: of the phases of a round, and of the end of a step.

co2/record/trace.py makes the trace, co2/record/timeline.py reads it.
"""

OUTER_STEP = "co2: outer step"
"""Everything that a method does as a round ends, the two phases below included."""
SNAPSHOT = "co2: snapshot"
"""The live parameters are copied to or from a flat vector."""
WAIT = "co2: wait"
"""The computation stands still until a collective is over."""
STEP_END = "co2: end of step"
"""A moment. Another one stands where the trace begins."""
