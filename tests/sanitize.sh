#!/usr/bin/env bash
# Builds the extension under each sanitizer and runs the tests that drive it. Arguments: PYTHON [SANITIZER ...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1")
shift
tests=(tests/test_driver_contract.py tests/test_sim.py tests/test_mux.py tests/test_handoff.py tests/test_faults.py)
for kind in "${@:-address undefined thread}"; do
  for one in $kind; do
    build=build/sanitize-$one
    lib=$build/lib
    mkdir -p "$lib"
    cmake -S . -B "$build" -G Ninja -DPYMUX_SANITIZE="$one" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
      -DPython_EXECUTABLE="$python" -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" \
      -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/$lib/pymux" >"$build/log"
    cmake --build "$build" --clean-first >>"$build/log"
    tar -C pymux --exclude="*.so" --exclude=__pycache__ -cf - . | tar -C "$lib/pymux" -xf -
    case $one in
      address) preload=$(g++ -print-file-name=libasan.so) ;;
      undefined) preload=$(g++ -print-file-name=libubsan.so) ;;
      thread) preload=$(g++ -print-file-name=libtsan.so) ;;
    esac
    echo "== $one"
    # Leaks are counted by the tests themselves, handle by handle; Python's own would drown them.
    # A fault on purpose is a test, so the sanitizer must leave SIGSEGV alone.
    LD_PRELOAD="$preload $(g++ -print-file-name=libstdc++.so)" PYTHONPATH=$PWD/$lib PYTHONMALLOC=malloc \
      ASAN_OPTIONS=detect_leaks=0:handle_segv=0:allow_user_segv_handler=1 \
      UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
      TSAN_OPTIONS=halt_on_error=1:handle_segv=0:report_signal_unsafe=0:suppressions=$PWD/tests/tsan.txt \
      "$python" -m pytest -q -p no:cacheprovider --capture=sys -o addopts="--import-mode=importlib" -x --timeout 300 "${tests[@]}"
  done
done
