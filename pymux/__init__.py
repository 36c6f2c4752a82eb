"""pymux: several reinforcement-learning jobs share a GPU at their phase boundaries."""

from pymux.errors import (
    AcquireTimeout,
    BrokerLost,
    CapacityError,
    ClientExists,
    ConfigError,
    ContentsLost,
    CudaError,
    DeviceOutOfMemory,
    DriverError,
    HostOutOfMemory,
    LeaseError,
    NotAllowed,
    ProtocolError,
    PymuxError,
    RegionError,
    RegionNotResident,
    UnknownRegion,
    VersionMismatch,
)
from pymux.mux import Lease, Mux, Phase, Region, connect

__version__ = "0.1.0"

__all__ = [
    "AcquireTimeout",
    "BrokerLost",
    "CapacityError",
    "ClientExists",
    "ConfigError",
    "ContentsLost",
    "CudaError",
    "DeviceOutOfMemory",
    "DriverError",
    "HostOutOfMemory",
    "Lease",
    "LeaseError",
    "Mux",
    "NotAllowed",
    "Phase",
    "ProtocolError",
    "PymuxError",
    "Region",
    "RegionError",
    "RegionNotResident",
    "UnknownRegion",
    "VersionMismatch",
    "connect",
]
