"""The processes of a pipeline: how they come together, which stages each holds, transports and health.

Floor 6. It may import streaming and all rooms below.
"""
