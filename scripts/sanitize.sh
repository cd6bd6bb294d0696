#!/bin/sh
# Builds the kernel with AddressSanitizer and UndefinedBehaviorSanitizer, apart from the installed one, and runs its
# tests of small shapes on every instruction set of the machine. Any finding ends the run. The build has guards between the
# arrays of the kernel's scratch memory (csrc/memory.h), and both it and malloc fill new memory, so that an element that
# is read before it is written shows. It is not optimized, and must have equal bits all the same.
#     scripts/sanitize.sh --build                only builds it
#     scripts/sanitize.sh [pytest arguments]
# Needs GCC (or a CXX with libasan.so and libubsan.so) and the tools of the test of the build: cmake, ninja, nanobind.
set -eu
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
PATH=$(dirname "$python"):$PATH
CXX=${CXX:-g++}
export CXX
# ninja cannot read what make hands to its jobs
unset MAKEFLAGS
build=build-sanitize
tests="(tiles or grouped or strides or nan or few_rows or windows_of or delta or corrupt or on_every or uneven or over_views or side_by_side or packed_keys or copied_rows or no_query_attends or test_paint or test_step or wide and few_queries) and not 1.0 and not [5-"

cmake -S . -B $build -G Ninja -DRINGWEAVE_SANITIZE=ON -DCMAKE_BUILD_TYPE=None -DPython_EXECUTABLE="$python" \
  -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >/dev/null
cmake --build $build --parallel 2 >/dev/null
[ "${1:-}" != --build ] || exit 0

# Python itself leaks by design. Without preloading, ASan refuses to start inside a program that was built without it.
ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:max_malloc_fill_size=1073741824:malloc_fill_byte=255 \
  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
  LD_PRELOAD="$($CXX -print-file-name=libasan.so):$($CXX -print-file-name=libubsan.so)" OMP_WAIT_POLICY=passive \
  "$python" scripts/pytest_with.py $build -p no:cacheprovider tests/native/test_kernel.py tests/native/test_rows.py \
  tests/native/test_checks.py tests/native/test_terms.py tests/native/test_lanes.py \
  tests/native/test_pages.py tests/native/test_wide_heads.py tests/native/test_chosen.py tests/native/test_dead_keys.py \
  tests/native/test_unattended.py tests/native/test_paint.py tests/native/test_step.py tests/native/test_groups.py -k "$tests" "$@"
