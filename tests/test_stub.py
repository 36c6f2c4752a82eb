"""The committed stub is what the extension offers."""

import pytest

pytest.importorskip("pybind11_stubgen", reason="the package pybind11-stubgen is not installed")

from tests.conftest import ROOT
from tests.make_stub import make


def test_the_stub_has_not_drifted():
    assert make() == (ROOT / "pymux" / "_core.pyi").read_text(), "run 'make stub'"
