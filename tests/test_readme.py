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


def examples():
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_example(node):
    example, _, _ = examples()
    out = node.run(AROUND + example + "\nsay(mux.stats()['phase'])")
    assert out == "parked\n"


def test_the_example_of_a_group(node):
    _, example, _ = examples()
    worker, front = example.replace("world=8", "world=1").split("\n", 1)
    w = node.start(
        "rank = 0\n" + worker + "\nwith mux.phase('init'):\n"
        "    kept = [mux.region(n).allocate(PAGE) for n in ('weights', 'kv_cache')]\nsay('ready')\nhear()"
    )
    assert hear(w) == "ready"
    assert node.run("class engine: generate = say\nprompts = 'generated'\n" + front) == "generated\n"


def test_the_example_of_sharing(node):
    *_, example = examples()
    trainer, sampler = example.split("\n\n")
    before = """
import torch
mux = pymux.connect("grpo", name="trainer")
with mux.region("weights") as region:
    model = torch.nn.Linear(8, 8)
def step(model):
    model.bias.data.fill_(3)
"""
    w = node.start(before + trainer + "\nsay(token)\nhear()")
    before = """
mux = pymux.connect("grpo", name="sampler")
mux.region("kv_cache")
token = os.environ["TOKEN"]
def load(tensors):
    say((tensors["bias"].tolist()[0], sorted(tensors), weights.generation))
"""
    assert node.run(before + sampler, TOKEN=hear(w)) == "(3.0, ['bias', 'weight'], 2)\n"


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
