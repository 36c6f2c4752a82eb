#!/usr/bin/env bash
# Runs the tests again and again with every core loaded, and lists what ever failed: bash tests/flaky.sh PYTHON [N] [pytest's arguments].
set -u
python=$1
runs=${2:-20}
shift $(($# > 1 ? 2 : 1))
cd "$(dirname "$0")/.."
log=$(mktemp)
load=()
end() {
  kill "${load[@]}" 2>/dev/null
  rm -f "$log"
}
trap end EXIT
for _ in $(seq "$(nproc)"); do
  "$python" -c 'while True: pass' &
  load+=($!)
done
for run in $(seq "$runs"); do
  begin=$SECONDS
  "$python" -m pytest -q "$@" >"$log.run" 2>&1
  echo "run $run: $(tail -n 1 "$log.run"), $((SECONDS - begin)) s"
  if grep -E '^(FAILED|ERROR) ' "$log.run" >>"$log"; then cp "$log.run" "${TMPDIR:-/tmp}/flaky-$run.log"; fi
done
rm -f "$log.run"
echo "== failed in $runs runs:"
sed 's/ - .*//' "$log" | sort | uniq -c | sort -rn
[ ! -s "$log" ]
