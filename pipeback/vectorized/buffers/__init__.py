"""Buffers: what waits between the forward and the backward of a micro-batch, and between two ticks.

It imports `tracing` and `steps`.
"""
