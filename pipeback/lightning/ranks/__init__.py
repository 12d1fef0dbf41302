"""Fits under Lightning that run on several devices, with one process per device.

These files may import those of `pipeback.lightning`, of which only `strategy` imports them.
"""
