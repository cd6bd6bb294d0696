#!/bin/sh
# Build with AddressSanitizer and UndefinedBehaviorSanitizer, and run the tests of the kernel on small shapes.
#     scripts/sanitize.sh [pytest arguments]
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
build=build-sanitize
cmake -S . -B $build -G Ninja -DRINGWEAVE_SANITIZE=ON -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(realpath -s "$python")" \
  -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >/dev/null
cmake --build $build >/dev/null
mkdir -p $build/site/ringweave
cp -r src/ringweave/. $build/site/ringweave/
cp $build/_cpu*.so $build/site/ringweave/
# Python itself leaks by design; libgomp's idle threads hold their stacks. halt_on_error: a finding fails the run.
ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
  LD_PRELOAD="$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libubsan.so)" PYTHONPATH=$build/site:tests \
  "$python" -m pytest -q -p no:cacheprovider tests/test_cpu.py tests/test_checks.py \
  -k "head_dims or tiles or strides or strided or nan or no_tiles or delta or corrupt or transpose or accepts" "$@"
