"""python -m tests.simulated FOLDER [FILE LINE]: see `asking` and `runs`."""

import sys
from pathlib import Path

from tests.simulated.without import leave_out

if len(sys.argv) > 2:
    leave_out(sys.argv[2], int(sys.argv[3]))

from tests.simulated.runs import main

main(Path(sys.argv[1]))
