"""CuPy arrays in a region.

DLPack needs nothing of its own: ``torch.from_dlpack(array)`` and ``cupy.from_dlpack(tensor)`` are views of the
region's memory, wherever it was allocated, and keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy

from pymux import _core
from pymux.region import Region


def allocator(region: Region) -> Callable[[int], Any]:
    """Return an allocator for ``cupy.cuda.set_allocator`` or ``cupy.cuda.using_allocator``.

    Blocks are freed with the last array that uses them, and used again in the order of the stream that was current
    when they were allocated, as by ``cupy.cuda.MemoryPool``. An allocation outside a phase takes a lease, which lasts
    until the next phase begins.

    Args:
        region: where the arrays are, beside torch's tensors if it has some.

    Returns:
        A function of a size in bytes that returns a ``cupy.cuda.MemoryPointer``.

    Raises:
        DeviceOutOfMemory: (the returned function) the device has no room, also after what is cached was given up.
    """

    def allocate(nbytes: int) -> Any:
        block = None
        address = 0
        if nbytes > 0:
            stream = cupy.cuda.get_current_stream().ptr
            block = _core.StreamBlock(region.agent, region.core, nbytes, stream)
            address = block.ptr
        memory = cupy.cuda.UnownedMemory(address, nbytes, block, region.device)
        return cupy.cuda.MemoryPointer(memory, 0)

    return allocate
