"""The health of ranks: which ranks are alive, what each is doing, and which one is at fault.

It imports nothing of pipeback but `errors`.
"""
