"""The exceptions of pymux. One tree, so that ``except pymux.PymuxError`` is enough.

Each message says what happened and what to do. The extension raises these classes too.
"""

from __future__ import annotations


class PymuxError(Exception):
    """Base of everything that pymux raises on purpose."""


class ConfigError(PymuxError, ValueError):
    """A setting or an argument is not usable."""


class DriverError(PymuxError):
    """The CUDA driver, or the device, is missing or not usable."""


class CudaError(PymuxError):
    """A driver call failed.

    Attributes:
        code: the CUresult.
        call: the driver function, such as ``"cuMemMap"``.
    """

    code: int = 0
    call: str = ""


class DeviceOutOfMemory(PymuxError, MemoryError):
    """The device has no page for this, after everything that may be taken was taken.

    Attributes:
        need: bytes needed, where known.
        limit: bytes there are, where known.
    """

    need: int = 0
    limit: int = 0


class HostOutOfMemory(PymuxError, MemoryError):
    """The host has no room for evicted pages. They stay on the device; nothing is lost.

    Attributes:
        need: bytes needed.
        limit: bytes available.
    """

    need: int = 0
    limit: int = 0


class SpillError(PymuxError, OSError):
    """The spill file cannot be written or read; pages that were to go there stay on the device."""


class CapacityError(DeviceOutOfMemory):
    """One phase needs more than the whole device has; waiting cannot help."""


class BrokerLost(PymuxError, ConnectionError):
    """No broker answers, and none could be started."""


class ProtocolError(PymuxError):
    """The peer sent something that this side does not understand."""


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol."""


class NotAllowed(PymuxError, PermissionError):
    """The broker belongs to another user."""


class ClientExists(PymuxError):
    """Another process of the same name is connected."""


class LeaseError(PymuxError):
    """A call needs a lease that is not there, or is there already."""


class MemberLost(LeaseError):
    """A process of the group is gone; the group's phases need all of them."""


class LeaseFenced(LeaseError):
    """This process was stopped for so long that others got its device. Leave the phase and enter it again."""


class DeadlockError(LeaseError):
    """Waiting for the device would never end: those who wait have what the others wait for."""


class AcquireTimeout(LeaseError, TimeoutError):
    """The device was not granted in the given time."""


class RegionError(PymuxError):
    """A region is used in a way that it does not allow."""


class UnknownRegion(RegionError, LookupError):
    """There is no region of this name."""


class FrozenRegion(RegionError):
    """Something was about to write a region that was created with ``frozen=True``."""


class RegionNotResident(RegionError):
    """A tensor of a region was touched while its pages may be away."""


class ContentsLost(RegionError):
    """The region was created with ``on_evict="discard"`` and its pages were given away."""
