"""The runtime: who runs which operation, and when: workers, loops, links, the event loop and threads.

Floor 4. It may import stages, methods, schedules and tensors.
"""
