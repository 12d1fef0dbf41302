"""Steps: the weights and optimizer state of all stages of a stack as rows, and the update of all rows at once.

It imports runtime, stages and methods, and no other folder of this room.
"""
