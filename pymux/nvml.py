"""What the broker reads about devices, without a CUDA context: NVML through nvidia-ml-py."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass

import pynvml

from pymux.errors import DriverError

log = logging.getLogger("pymux.nvml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of a device."""

    total: int
    used: int


class Nvml:
    """NVML of the given driver library, or the machine's where that has none.

    Args:
        driver_path: the loaded CUDA driver library. One that brings NVML's functions itself is
            asked; otherwise nvidia-ml-py finds the machine's.

    Raises:
        DriverError: NVML cannot be loaded.
    """

    def __init__(self, driver_path: str) -> None:
        try:
            library = ctypes.CDLL(driver_path)
            if hasattr(library, "nvmlInit_v2"):
                pynvml.nvmlLib = library
            pynvml.nvmlInit()
        except (OSError, pynvml.NVMLError) as e:
            raise DriverError(f"NVML cannot be used: {e}. It comes with the NVIDIA driver; run nvidia-smi.") from e

    def memory(self, device: str) -> Memory:
        """Return the device's total and used memory, by everybody.

        Args:
            device: its UUID as NVML prints it.

        Raises:
            DriverError: there is no such device on this node.
        """
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(device)
            info = pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError as e:
            raise DriverError(
                f"the broker does not know the device {device} ({e}). It must run with the same driver and the same "
                f"visible devices as its clients; stop it with 'pymux broker --stop' and connect again."
            ) from e
        return Memory(total=info.total, used=info.used)
