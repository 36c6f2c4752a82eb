"""What a device's link does, measured once per device and kept in the runtime directory."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from pymux import _core, wire
from pymux.errors import CudaError, DeviceOutOfMemory


def link(ordinal: int, runtime_dir: Path) -> dict[str, Any]:
    """Return the device's copy rates, measuring them (well under a second) when nobody has yet.

    Args:
        ordinal: of the CUDA device.
        runtime_dir: where the figures are kept, by device UUID.

    Returns:
        ``out``, ``in``, ``both``: bytes per second to the host, to the device, and in sum when both run at
        once; ``duplex``: whether both at once is worth it. Only the last, when the device had no room to
        measure in.
    """
    path = runtime_dir / f"link-{wire.device_name(_core.Device(ordinal).uuid)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = json.loads(path.read_text())
        if isinstance(known["duplex"], bool):
            return dict(known)
    try:
        out, back, both, gains = _core.measure_link(ordinal)
    except (DeviceOutOfMemory, CudaError):
        return {"duplex": True}
    rates = {"out": out, "in": back, "both": both, "duplex": gains}
    with contextlib.suppress(OSError):  # then it is measured again
        runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(rates))
        temporary.replace(path)
    return rates
