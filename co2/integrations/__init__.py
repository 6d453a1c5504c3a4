"""Other people's training loops, whose replicas a method of this library keeps in step.

Each module needs the package that it is named for, which the extra of that name brings.
"""
