"""Tracing: the forward and the backward of stages as graphs, and what is rewritten in them.

It imports nothing else of pipeback.
"""
