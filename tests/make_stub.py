"""Writes the stub of the extension: ``python tests/make_stub.py PATH``."""

import subprocess
import sys
import tempfile
from pathlib import Path


def make():
    """Return the text of _core.pyi."""
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [sys.executable, "-m", "pybind11_stubgen", "pymux._core", "-o", directory],
            check=True,
            capture_output=True,
        )
        text = (Path(directory) / "pymux" / "_core.pyi").read_text()
    text = text.replace("def stats(self) -> dict:", "def stats(self) -> dict[str, typing.Any]:")
    text = text.replace("(region: Region) -> dict:", "(region: Region) -> dict[str, int]:")
    # pybind11's buffer protocol, which the generator does not see.
    return text.replace(
        '    A live block of a region\'s memory.\n    """\n',
        '    A live block of a region\'s memory.\n    """\n'
        "    def __buffer__(self, flags: int) -> memoryview:\n        ...\n",
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(make())
