"""Tracing lock: held while modules are traced, whose parameters are replaced for that time.

Workers in threads trace a new form of micro-batch when it comes, and one at a time: torch's tracing is not made for
several threads. Whoever looks at the parameters of modules from another thread holds the lock as well.
"""

from __future__ import annotations

import threading

TRACING = threading.RLock()
