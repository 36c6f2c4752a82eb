"""Jobs and brokers killed and stopped at random during handoffs: nobody else loses a byte or hangs.

The long form is bench/chaos.py; this is the short one for every test run.
"""

import pytest

from tests.chaos import Chaos


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_killing_and_stopping_at_random_harms_nobody_else(node_factory, tmp_path, seed):
    (tmp_path / "broker.toml").write_text("unresponsive_after = 1")
    # 20 pages; each job has 11. Of 33 pages 13 are always away.
    node = node_factory(
        "40M",
        PYMUX_HOST_BUDGET="96M",
        PYMUX_SPILL_DIR=str(tmp_path),
        PYMUX_BROKER_CONFIG=str(tmp_path / "broker.toml"),
    )
    chaos = Chaos(node, seed, jobs=3)
    out = chaos.run(seconds=12, every=0.9)
    chaos.close()
    assert out.kills + out.stops + out.brokers >= 5
    assert out.turns > 10
    # Nothing is left behind: one more job can have the whole device.
    node.run('mux = pymux.connect("last")\nr = mux.region("w")\nwith mux.phase("x"): b = r.allocate(20 * PAGE)')
