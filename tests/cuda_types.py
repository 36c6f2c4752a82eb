"""The driver's structures for ctypes, as cuda.h lays them out."""

import ctypes


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", Location),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", ctypes.c_ubyte * 8),
    ]


class AccessDesc(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


PINNED, DEVICE, POSIX_FD, READ, READWRITE = 1, 1, 1, 1, 3

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 0, 1, 2, 3
INVALID_DEVICE, INVALID_CONTEXT, INVALID_HANDLE, NOT_READY = 101, 201, 400, 600
ALREADY_REGISTERED, NOT_REGISTERED, UNKNOWN = 712, 713, 999


def prop(exportable=True, device=0):
    return AllocationProp(
        type=PINNED, requestedHandleTypes=POSIX_FD if exportable else 0, location=Location(DEVICE, device)
    )


def access(flags=READWRITE, device=0):
    return AccessDesc(Location(DEVICE, device), flags)
