"""The health of ranks: who is alive, doing what, and at fault.

It imports nothing of pipeback but `errors`.
"""
