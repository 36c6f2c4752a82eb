"""The README's example runs as it stands there."""

import re

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tests.conftest import ROOT, hear  # noqa: E402

AROUND = """
import torch
Model = lambda: torch.nn.Linear(64, 64)
loader = [torch.randn(4, 64) for _ in range(3)]
generate = lambda model, prompts: model(prompts).detach()
score = lambda samples: samples.mean(1)
loss = lambda model, samples, rewards: (model(samples).mean(1) * rewards).mean()
"""


def test_the_example(node):
    text = (ROOT / "README.md").read_text()
    example, _ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    out = node.run(AROUND + example + "\nsay(mux.stats()['phase'])")
    assert out == "parked\n"


def test_the_example_of_a_group(node):
    text = (ROOT / "README.md").read_text()
    _, example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    worker, front = example.replace("world=8", "world=1").split("\n", 1)
    w = node.start(
        "rank = 0\n" + worker + "\nwith mux.phase('init'):\n"
        "    kept = [mux.region(n).allocate(PAGE) for n in ('weights', 'kv_cache')]\nsay('ready')\nhear()"
    )
    assert hear(w) == "ready"
    assert node.run("class engine: generate = say\nprompts = 'generated'\n" + front) == "generated\n"


def test_a_region_block_inside_itself_is_fine(node):
    node.run(
        """
import torch
mux = pymux.connect("a")
with mux.region("w"):
    with mux.region("w"):
        a = torch.ones(3)
    b = torch.ones(3)
    assert mux.active
assert not mux.active
assert mux.region("w").contains(b.data_ptr())
"""
    )
