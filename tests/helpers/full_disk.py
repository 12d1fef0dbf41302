"""Full disk: files that may not grow, as a stand-in for a disk that has no room."""

import resource
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size):
    """A context in which writing fails beyond this size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
