"""The stages that are alike, run as one; and whole ticks as one function.

Floor 5. It may import runtime, stages, methods, schedules and tensors.
"""
