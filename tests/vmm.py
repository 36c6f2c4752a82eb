"""Shorthand over the driver's virtual-memory calls, for tests."""

import ctypes

from tests.cuda_types import POSIX_FD, access, prop

u64, size_t, byref = ctypes.c_uint64, ctypes.c_size_t, ctypes.byref


class Vmm:
    """Shorthand over the VMM calls; undoes what a test left."""

    def __init__(self, cuda):
        self.cuda = cuda
        g = size_t()
        cuda.ok("cuMemGetAllocationGranularity", byref(g), byref(prop()), 0)
        self.page = g.value
        self.undo = []

    def reserve(self, pages=1):
        ptr = u64()
        self.cuda.ok("cuMemAddressReserve", byref(ptr), size_t(pages * self.page), size_t(0), u64(0), u64(0))
        self.undo.append(("cuMemAddressFree", ptr, size_t(pages * self.page)))
        return ptr.value

    def create(self, pages=1, exportable=True):
        h = u64()
        self.cuda.ok("cuMemCreate", byref(h), size_t(pages * self.page), byref(prop(exportable)), u64(0))
        self.undo.append(("cuMemRelease", h))
        return h.value

    def map(self, ptr, handle, pages=1):
        self.cuda.ok("cuMemMap", u64(ptr), size_t(pages * self.page), size_t(0), u64(handle), u64(0))
        self.undo.append(("cuMemUnmap", u64(ptr), size_t(pages * self.page)))

    def allow(self, ptr, pages=1, **kw):
        self.cuda.ok("cuMemSetAccess", u64(ptr), size_t(pages * self.page), byref(access(**kw)), size_t(1))

    def mapped(self, pages=1):
        ptr = self.reserve(pages)
        self.map(ptr, self.create(pages), pages)
        self.allow(ptr, pages)
        return ptr

    def export(self, handle):
        fd = ctypes.c_int()
        self.cuda.ok("cuMemExportToShareableHandle", byref(fd), u64(handle), POSIX_FD, u64(0))
        return fd.value

    def import_(self, fd):
        h = u64()
        self.cuda.ok("cuMemImportFromShareableHandle", byref(h), ctypes.c_void_p(fd), POSIX_FD)
        self.undo.append(("cuMemRelease", h))
        return h.value

    def write(self, ptr, data):
        self.cuda.ok("cuMemcpyHtoD_v2", u64(ptr), data, size_t(len(data)))

    def read(self, ptr, n):
        out = ctypes.create_string_buffer(n)
        self.cuda.ok("cuMemcpyDtoH_v2", out, u64(ptr), size_t(n))
        return out.raw

    def close(self):
        for call in reversed(self.undo):
            self.cuda(*call)
