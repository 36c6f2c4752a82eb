#!/usr/bin/env bash
# Builds the extension under each sanitizer and runs the tests that drive it. Arguments: PYTHON [SANITIZER ...]
# The library lies beside the package while its tests run, and is removed afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1")
shift
tests=(tests/test_driver_contract.py tests/test_sim.py tests/test_mux.py tests/test_pager.py
  tests/test_handoff.py tests/test_groups.py tests/test_faults.py tests/test_allocator.py
  tests/test_share.py tests/test_guest.py tests/test_turns.py tests/test_deadlocks.py tests/test_fork.py
  tests/test_connect.py)
trap 'rm -f pymux/*.so' EXIT
for kind in ${@:-address undefined thread}; do
  build=build/sanitize-$kind
  mkdir -p "$build/site"
  cmake -S . -B "$build" -G Ninja -DPYMUX_SANITIZE="$kind" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DPython_EXECUTABLE="$python" -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" \
    -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/pymux" >"$build/log"
  rm -f pymux/*.so
  cmake --build "$build" >>"$build/log"
  # An editable install would come before this tree, in the tests' own processes too.
  cat >"$build/site/sitecustomize.py" <<'PY'
import sys
sys.meta_path[:] = [m for m in sys.meta_path if "ScikitBuild" not in type(m).__name__]
PY
  case $kind in
    address) preload=$(g++ -print-file-name=libasan.so) ;;
    undefined) preload=$(g++ -print-file-name=libubsan.so) ;;
    thread) preload=$(g++ -print-file-name=libtsan.so) ;;
  esac
  echo "== $kind"
  export PYTHONPATH=$PWD/$build/site:$PWD
  # Leaks are counted by the tests themselves, handle by handle; Python's own would drown them.
  # A fault on purpose is a test, so the sanitizer must leave SIGSEGV alone.
  under=(env "LD_PRELOAD=$preload $(g++ -print-file-name=libstdc++.so)" PYTHONMALLOC=malloc PYMUX_TEST_PATIENCE=5
    ASAN_OPTIONS=detect_leaks=0:handle_segv=0:allow_user_segv_handler=1
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
    "TSAN_OPTIONS=halt_on_error=1:handle_segv=0:report_signal_unsafe=0:suppressions=$PWD/tests/tsan.txt")
  "${under[@]}" "$python" -c "from pymux import _core; assert _core.__file__.startswith('$PWD/pymux/'), _core.__file__"
  "${under[@]}" "$python" -m pytest -q -p no:cacheprovider --capture=sys -o addopts="--import-mode=importlib" -x \
    --timeout 300 "${tests[@]}"
done
