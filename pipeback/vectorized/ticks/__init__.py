"""Ticks: whole ticks as one function, at which every stage does a forward, a backward and an update.

It imports all other folders of this room.
"""
