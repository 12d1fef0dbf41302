"""What holds for all tests: one thread per process, since ranks have one, and sums of two threads have other bits."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
