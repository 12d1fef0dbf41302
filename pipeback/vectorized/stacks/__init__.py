"""Stacks: which stages run as one, and the forward and backward of such stages at a tick.

It imports `tracing`, `steps`, `buffers` and `making`.
"""
