"""The simulated accelerator of `device.cpp` as torch's accelerator of this process: `sim:0` and `sim:1`.

Call `register` before the first backward of a process, in a process of its own, since a process has one accelerator.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from contextlib import contextmanager
from pathlib import Path

import torch

AT_ONCE, LATE, SIDE_FIRST, RANDOM, SIDE_LAST = range(5)
SOURCE = Path(__file__).with_name("device.cpp")


def missing() -> str | None:
    """Return why the simulated accelerator cannot be built here; None if it can."""
    for tool in ("g++", "ninja"):
        if shutil.which(tool) is None:
            return f"the simulated accelerator is compiled, and there is no {tool}"
    return None


def load(folder: Path) -> None:
    """The compiled library, made at the first call for this source and this torch; others wait meanwhile."""
    mark = hashlib.sha256(
        SOURCE.read_bytes() + SOURCE.with_name("streams.h").read_bytes() + f"{torch.__version__} {sys.version}".encode()
    ).hexdigest()[:12]
    library = folder / f"sim_{mark}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory() as place:
                _build(Path(place), library)
    torch.ops.load_library(library)


def _build(place: Path, library: Path) -> None:
    code = (
        "import sys; from torch.utils.cpp_extension import load; "
        "load('sim_device', [sys.argv[1]], build_directory=sys.argv[2], extra_cflags=['-O1'], is_python_module=False)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(SOURCE), str(place)], env={**os.environ, "MAX_JOBS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the simulated accelerator does not compile: {done.stdout[-4000:]}{done.stderr[-4000:]}")
    shutil.copy(place / "sim_device.so", library.with_suffix(".new"))
    os.replace(library.with_suffix(".new"), library)  # whole or not there at all


def register(folder: Path) -> None:
    """Have torch know the device."""
    torch.utils.rename_privateuse1_backend("sim")
    load(folder)
    torch._register_device_module("sim", _module())
    torch.utils.generate_methods_for_privateuse1_backend()


def policy(number: int) -> None:
    """What is carried out before it must be: see `Policy` in `streams.h`."""
    torch.ops.sim.policy(number)


def _module() -> types.ModuleType:
    """What torch wants of `torch.sim`."""
    module = types.ModuleType("torch.sim")
    generators = [torch.ops.sim.generator(n) for n in range(2)]

    def index(device: object = None) -> int:
        if isinstance(device, int):
            return device
        found = None if device is None else torch.device(device).index
        return torch.accelerator.current_device_index() if found is None else found

    @contextmanager
    def device(where: object):
        before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(index(where))
        try:
            yield
        finally:
            torch.accelerator.set_device_index(before)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    module.__dict__.update(
        default_generators=tuple(generators),
        device=device,
        device_count=lambda: 2,
        current_device=torch.accelerator.current_device_index,
        set_device=lambda where: torch.accelerator.set_device_index(index(where)),
        is_available=lambda: True,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
        manual_seed=lambda seed: generators[index()].manual_seed(seed),
        manual_seed_all=manual_seed_all,
        get_rng_state=lambda device=None: generators[index(device)].get_state(),
        set_rng_state=lambda state, device=None: generators[index(device)].set_state(state),
        synchronize=lambda device=None: torch.accelerator.synchronize(index(device)),
        current_stream=lambda device=None: torch.accelerator.current_stream(index(device)),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    return module
