"""``pymux run``: a program's cudaMalloc served from a region, without a change to the program.

What it is not: the serving; a preloaded library does that in the program (csrc/preload.cpp).
"""

from __future__ import annotations

import mmap
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pymux import _core, config
from pymux.errors import ConfigError

_ELF = b"\x7fELF"
# A text that every CUDA runtime has in it, and of which a program that links one dynamically has at most the name.
_RUNTIME_MARK = b"cudaErrorMemoryAllocation\x00"


def broker_command(driver: str) -> list[str]:
    """Return the command by which a process starts the node's broker."""
    return [sys.executable, "-m", "pymux.cli", "broker", "--background", "--driver", driver]


def prepare(command: Sequence[str], job: str | None, environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Work out what to execute for a command.

    Args:
        command: the program and its arguments.
        job: name of the job; None: the script's, or else the program's.
        environ: the environment that it would have.

    Returns:
        The program's path, and the environment to run it in.

    Raises:
        ConfigError: the program cannot be served so, and why.
    """
    path = shutil.which(command[0])
    if path is None:
        raise ConfigError(f"{config.clip(command[0])}: there is no such program.")
    _check_program(Path(path))
    settings = config.load()
    if settings.expandable_segments:
        raise ConfigError(
            "PYTORCH_CUDA_ALLOC_CONF turns on expandable_segments, with which torch maps memory itself and never calls "
            "cudaMalloc. Remove it."
        )
    library = Path(_core.__file__).with_name("libpymux_preload.so")
    if not library.is_file():
        raise ConfigError(f"{library} is missing: install pymux again.")
    driver = _core.load_driver(settings.driver)
    script = next((a for a in command[1:] if a.endswith(".py")), command[0])
    job = Path(script).stem[: config.MAX_NAME] if job is None else job
    config.check_name("job", job)
    said = [
        ("socket", str(settings.socket)),
        ("driver", driver),
        ("job", job),
        *(("spawn", word) for word in broker_command(driver)),
        ("page_size", str(settings.page_size)),
        ("pass_pages", str(int(settings.pass_pages))),
    ]
    if any("\n" in value for _, value in said):
        raise ConfigError("a path or a name has a line break in it; pymux run cannot pass it on.")
    before = environ.get("LD_PRELOAD")
    return path, {
        **environ,
        "LD_PRELOAD": f"{library}:{before}" if before else str(library),
        "PYMUX_DRIVER": driver,
        "PYMUX_JOB": job,
        "PYMUX_RUN": "\n".join(f"{key}={value}" for key, value in said),
    }


def _check_program(path: Path) -> None:
    if path.stat().st_mode & 0o6000:
        raise ConfigError(f"{path} changes its user when it runs, and such programs take no preloaded library.")
    with path.open("rb") as f:
        head = f.read(20)
        if not head.startswith(_ELF):
            return  # a script: its interpreter is asked when it loads
        with Path("/proc/self/exe").open("rb") as own:
            ours = own.read(20)
        if head[4:6] + head[18:20] != ours[4:6] + ours[18:20]:
            raise ConfigError(f"{path} is for another kind of processor than pymux's library, which it cannot load.")
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as text:
            static = text.find(_RUNTIME_MARK) >= 0 and text.find(b"libcudart.so") < 0
    if static:
        raise ConfigError(
            f"{path} has the CUDA runtime linked into it (libcudart_static.a), where its cudaMalloc cannot be served. "
            f"Link it with 'nvcc -cudart shared', or CMAKE_CUDA_RUNTIME_LIBRARY=Shared; or share it as a whole, with "
            f"pymux.opaque(pid)."
        )
