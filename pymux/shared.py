"""A region of another process, mapped here too: nothing is copied between them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pymux.config import clip
from pymux.errors import ConfigError, RegionNotResident
from pymux.region import SHARED_PREFIX, Region

if TYPE_CHECKING:
    from pymux import _core
    from pymux.mux import Mux

_TOKEN = re.compile(SHARED_PREFIX + "([0-9a-f]{32})")


def segment_of(token: str) -> str:
    """Return the segment's id of a token.

    Raises:
        ConfigError: it is none.
    """
    match = _TOKEN.fullmatch(token) if isinstance(token, str) else None
    if match is None:
        raise ConfigError(f"{clip(token)} is no token of a shared region: pass what region.share() returned.")
    return match[1]


class SharedRegion(Region):
    """A region of another process of this node; see `Mux.open_shared`.

    Phases name it in ``uses`` as they do their own. It has what the process that shared it wrote; who writes it
    says so with `Region.publish`.
    """

    def __init__(self, mux: Mux, core: _core.Region, at: int, *, frozen: bool) -> None:
        super().__init__(mux, core, at, frozen=frozen)
        self._described: str | None = None
        self._tensors: dict[str, Any] = {}

    @property
    def tensors(self) -> dict[str, Any]:
        """The torch tensors of the latest generation by name, over the shared memory.

        They are the same objects as long as generations keep the tensors where they are. Make them in a phase
        that uses the region; keep them as long as the Mux.

        Raises:
            RegionNotResident: they are to be made, and no phase that uses the region is open.
        """
        _, meta = self.core.published()
        text = meta.decode()
        if text != self._described:
            if reason := self.mux.why_absent(self.name):
                raise RegionNotResident(f"the tensors of shared region {self.name!r} are looked up {reason}")
            self._tensors = self.mux._torch_integration().rebuild(self, text)  # noqa: SLF001 - two halves of one thing
            self._described = text
        return dict(self._tensors)

    def wait_published(self, stream: int | None = None) -> int:
        """Order a stream after the work of the latest `Region.publish`, without waiting on the host.

        Leases order phases already; this is for phases that run beside each other (``overlap=True``).

        Args:
            stream: a ``CUstream`` as an integer, such as ``torch.cuda.Stream.cuda_stream``; default torch's current
                one.

        Returns:
            That generation, counted from 1; 0: nothing is published yet.
        """
        generation = self.generation
        self.agent.wait_published(self.core, self._stream(stream))
        return generation
