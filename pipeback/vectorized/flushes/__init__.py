"""Flushes: whole flushes, stage after stage, each stage on all micro-batches at once.

It imports all folders of this room but `ticks`.
"""
