"""pymux: several reinforcement-learning jobs share a GPU at their phase boundaries."""

from pymux.errors import (
    AcquireTimeout,
    BrokerLost,
    CapacityError,
    ClientExists,
    ConfigError,
    ContentsLost,
    CudaError,
    DeadlockError,
    DeviceOutOfMemory,
    DriverError,
    FrozenRegion,
    HostOutOfMemory,
    LeaseError,
    LeaseFenced,
    MemberLost,
    NotAllowed,
    ProtocolError,
    PymuxError,
    RegionError,
    RegionNotResident,
    SpillError,
    UnknownRegion,
    VersionMismatch,
)
from pymux.guest import Opaque, opaque
from pymux.mux import Mux, connect, current
from pymux.phase import AsyncLease, Lease, Phase
from pymux.region import Region
from pymux.shared import SharedRegion

__version__ = "0.1.0"

__all__ = [
    "AcquireTimeout",
    "AsyncLease",
    "BrokerLost",
    "CapacityError",
    "ClientExists",
    "ConfigError",
    "ContentsLost",
    "CudaError",
    "DeadlockError",
    "DeviceOutOfMemory",
    "DriverError",
    "FrozenRegion",
    "HostOutOfMemory",
    "Lease",
    "LeaseError",
    "LeaseFenced",
    "MemberLost",
    "Mux",
    "NotAllowed",
    "Opaque",
    "Phase",
    "ProtocolError",
    "PymuxError",
    "Region",
    "RegionError",
    "RegionNotResident",
    "SharedRegion",
    "SpillError",
    "UnknownRegion",
    "VersionMismatch",
    "connect",
    "current",
    "opaque",
]
