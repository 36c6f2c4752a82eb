#!/usr/bin/env bash
# Everything that needs a GPU, in one go: builds without network, asks what the design takes for
# granted, runs `pytest -m gpu`, compute-sanitizer and the benches, prints one table, writes one JSON. No
# arguments; less than 8 minutes, after which it stops by itself. Needs Python with torch, scikit-build-core,
# pybind11, nvidia-ml-py, click, rich and pytest; CMake; cuda.h from a toolkit or a wheel. CuPy, nvcc, and a wheel of
# torch_memory_saver beside the project are used where they are. A part that fails is reported and the rest goes on;
# without a GPU it runs against the simulated device, and says what was not run. The JSON goes to $OUT, or
# bench/results/.
set -u
cd "$(dirname "$0")/.."
root=$PWD
out=${OUT:-$root/bench/results}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
failed=()
skipped=()
ends=$((SECONDS + 480))

not_run() { # NAME WHY
  echo "== $1: not run ($2)"
  skipped+=("$1")
}

part() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2
  shift 2
  local left=$((ends - SECONDS))
  if [ "$left" -lt 5 ]; then
    not_run "$name" "the time is over"
    return
  fi
  [ "$limit" -le "$left" ] || limit=$left
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
part facts 60 "$python" bench/bench_driver_facts.py --json "$work/1-facts.json"
part copy 40 "$python" bench/bench_copy.py --json "$work/2-copy.json"
part vmm 40 "$python" bench/bench_vmm.py --json "$work/3-vmm.json"
part pin 40 "$python" bench/bench_pin.py --json "$work/4-pin.json"
part latency 60 "$python" bench/bench_latency.py --turns 300 --kills 5 --json "$work/5-latency.json"
part share 40 "$python" bench/bench_share.py --json "$work/6-share.json"
part arena 60 "$python" bench/bench_arena.py --json "$work/7-arena.json"
if [ "$simulated" = 1 ]; then
  part swap 120 "$python" bench/bench_swap.py --json "$work/8-swap.json"
  part handoff 120 "$python" bench/bench_handoff.py --json "$work/9-handoff.json"
  part bytes 60 "$python" bench/bench_bytes.py --json "$work/a-bytes.json"
  part contract 60 "$python" -m pytest -q tests/test_driver_contract.py tests/test_fingerprint.py
  for name in step compute-sanitizer tests demo; do not_run "$name" "needs a GPU"; done
else
  wheel=$(ls "$root"/torch_memory_saver*.whl "$root"/../torch_memory_saver*.whl 2>/dev/null | head -n 1)
  if [ -n "$wheel" ]; then
    part "torch_memory_saver's wheel" 30 "$python" -m pip install -q --no-index --no-deps "$wheel"
  else
    not_run torch_memory_saver "no wheel of it lies beside the project"
  fi
  part swap 90 "$python" bench/bench_swap.py --mib 8192 --repeats 3 --json "$work/8-swap.json"
  part handoff 60 "$python" bench/bench_handoff.py --mib 16384 --json "$work/9-handoff.json"
  part bytes 90 "$python" bench/bench_bytes.py --turns 2 --json "$work/a-bytes.json"
  part step 90 "$python" bench/bench_step.py --rounds 2 --json "$work/b-step.json"
  part tests 120 "$python" -m pytest -q -m gpu --deselect tests/test_torch.py tests
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  if [ -n "$sanitizer" ]; then
    part compute-sanitizer 60 "$sanitizer" --error-exitcode 9 "$python" -m pytest -q -m gpu tests/test_fingerprint.py
  else
    not_run compute-sanitizer "it is not installed"
  fi
  part demo 120 "$python" -m pymux.cli demo --steps 4 --output "$work/demo" --json "$work/demo.json"
fi

"$python" - "$out" "$work" "${failed[@]+"${failed[@]}"}" -- "${skipped[@]+"${skipped[@]}"}" <<'PY'
import json, pathlib, sys, time
out, work = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
failed, skipped = sys.argv[3 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
parts = [json.loads(p.read_text()) for p in sorted(work.glob("[0-9a-z]-*.json"))]
first = parts[0] if parts else {}
document = {
    "bench": "gpu_check",
    "machine": first.get("machine"),
    "date": time.strftime("%Y-%m-%d"),
    "device": first.get("device"),
    "failed": failed,
    "not_run": skipped,
    "results": [dict(r, metric=f"{p['bench']}.{r['metric']}") for p in parts for r in p["results"]],
}
if (work / "demo.json").exists():
    document["demo"] = json.loads((work / "demo.json").read_text())
print(f"\n{document['device']}, {document['date']}")
for r in document["results"]:
    mark = "" if r["target"] is None else "holds" if r["holds"] else "MISSED"
    print(f"{r['metric']:44} {r['value']:12.4g} {r['unit']:8} {mark}")
print("failed:", ", ".join(failed) or "nothing")
print("not run:", ", ".join(skipped) or "nothing")
name = (document["device"] or "none").lower().replace(" ", "-")
path = out / f"gpu_check-{name}.json"
path.write_text(json.dumps(document, indent=2) + "\n")
print("wrote", path)
PY
[ ${#failed[@]} -eq 0 ]
