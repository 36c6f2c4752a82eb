#!/usr/bin/env bash
# Everything that needs a GPU, in one go: builds without network, asks what the design takes for
# granted, runs `pytest -m gpu` and the benches, prints one table, writes one JSON. No arguments.
# Needs Python with torch, scikit-build-core, pybind11, nvidia-ml-py, click, rich and pytest; CMake;
# cuda.h from a toolkit or a wheel. A part that fails is reported and the rest goes on. Without a GPU
# it runs against the simulated device, and says so. The JSON goes to $OUT, or bench/results/.
set -u
cd "$(dirname "$0")/.."
root=$PWD
out=${OUT:-$root/bench/results}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
failed=()

part() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2
  shift 2
  echo "== $name"
  local begin=$SECONDS
  if timeout "$limit" "$@" 2>&1 | tail -n 60; [ "${PIPESTATUS[0]}" -eq 0 ]; then
    echo "-- $name: done in $((SECONDS - begin)) s"
  else
    echo "-- $name: FAILED after $((SECONDS - begin)) s"
    failed+=("$name")
  fi
}

build() {
  # Python may itself be one of a virtual environment, whose packages a nested one does not see.
  python3 -m venv --system-site-packages "$work/venv" &&
    python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$(echo "$work"/venv/lib/python3*/site-packages)/outer.pth" &&
    "$work/venv/bin/python" -m pip install -q --no-index --no-build-isolation --no-deps -e "$root" \
      -C build-dir="$work/build"
}

export -f build
export root work
part build 240 bash -c build
python=$work/venv/bin/python
[ -x "$python" ] || python=python3

simulated=$("$python" -c 'from pymux import _core; print(int(b"pymux-sim" in _core.Device(0).uuid) if _core.load_driver("") else 0)' 2>/dev/null)
if [ "$simulated" = 1 ]; then
  echo "== no GPU here: the simulated device stands in, and the parts that need a GPU are not run"
  export PYMUX_TEST_DRIVER=sim
else
  export PYMUX_TEST_DRIVER=
fi

part doctor 60 "$python" -m pymux.cli doctor
part facts 120 "$python" bench/bench_driver_facts.py --json "$work/1-facts.json"
part vmm 120 "$python" bench/bench_vmm.py --json "$work/2-vmm.json"
if [ "$simulated" = 1 ]; then
  part swap 180 "$python" bench/bench_swap.py --json "$work/3-swap.json"
  part handoff 180 "$python" bench/bench_handoff.py --json "$work/4-handoff.json"
  part contract 120 "$python" -m pytest -q tests/test_driver_contract.py
else
  part swap 180 "$python" bench/bench_swap.py --mib 8192 --json "$work/3-swap.json"
  part handoff 180 "$python" bench/bench_handoff.py --mib 16384 --json "$work/4-handoff.json"
  part tests 180 "$python" -m pytest -q -m gpu --deselect tests/test_torch.py tests
  part demo 180 "$python" -m pymux.cli demo --steps 4 --output "$work/demo" --json "$work/demo.json"
fi

"$python" - "$out" "$work" "${failed[@]+"${failed[@]}"}" <<'PY'
import json, pathlib, sys, time
out, work, failed = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
parts = [json.loads(p.read_text()) for p in sorted(work.glob("[0-9]-*.json"))]
first = parts[0] if parts else {}
document = {
    "bench": "gpu_check",
    "machine": first.get("machine"),
    "date": time.strftime("%Y-%m-%d"),
    "device": first.get("device"),
    "failed": failed,
    "results": [dict(r, metric=f"{p['bench']}.{r['metric']}") for p in parts for r in p["results"]],
}
if (work / "demo.json").exists():
    document["demo"] = json.loads((work / "demo.json").read_text())
print(f"\n{document['device']}, {document['date']}")
for r in document["results"]:
    mark = "" if r["target"] is None else "holds" if r["holds"] else "MISSED"
    print(f"{r['metric']:44} {r['value']:12.4g} {r['unit']:8} {mark}")
print("failed:", ", ".join(failed) or "nothing")
name = (document["device"] or "none").lower().replace(" ", "-")
path = out / f"gpu_check-{name}.json"
path.write_text(json.dumps(document, indent=2) + "\n")
print("wrote", path)
PY
[ ${#failed[@]} -eq 0 ]
