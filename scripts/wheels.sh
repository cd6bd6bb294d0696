#!/usr/bin/env bash
# Builds into dist/ what a release has, as far as this machine can: a source archive, a wheel, one without the kernel, and
# on Linux, where a cross compiler is, one for aarch64. Each that can run here is tried in a fresh environment without
# extras. Then the wheels of the audit, the backends of GPUs and the laboratory. Manylinux and macOS wheels: cibuildwheel.
#     scripts/wheels.sh [torch==2.11.0 ...]      what those environments get instead of what constraints.txt says
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
pip="$python -m pip --quiet --disable-pip-version-check"
wanted=("${@:---constraint=constraints.txt}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf dist

version=$($python -c "import sys; print(f'{sys.version_info.major}{sys.version_info.minor}')")
$pip wheel --no-deps --wheel-dir dist .
SKBUILD_WHEEL_CMAKE=false $pip wheel --no-deps --wheel-dir dist .
$python -m build --sdist --outdir dist . > /dev/null
cross=aarch64-linux-gnu-g++
if [[ $(uname -sm) == "Linux x86_64" ]] && command -v $cross > /dev/null; then
  _PYTHON_HOST_PLATFORM=linux-aarch64 SETUPTOOLS_EXT_SUFFIX=.cpython-$version-aarch64-linux-gnu.so \
    CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$cross" \
    $pip wheel --no-deps --wheel-dir dist .
fi

for wheel in dist/*-py3-none-any.whl dist/*"_$(uname -m).whl"; do
  $python -m venv "$work/env"
  "$work/env/bin/python" -m pip --quiet --disable-pip-version-check install "${wanted[@]}" "$wheel"
  # from elsewhere: not the sources that lie here
  (cd "$work" && env/bin/python - "$wheel") << 'TRY'
import sys
import torch
import ringweave as rw
from ringweave.backends import cpu

assert ("none-any" in sys.argv[1]) == (cpu.module() is None), "the kernel"
q, k, v = (torch.randn(1, 4, 500, 64, requires_grad=True) for _ in range(3))
pattern = (rw.SlidingWindow(100) | rw.Sinks(4)) & rw.Causal()
out, exact = (rw.attention(q, k, v, pattern, backend=name) for name in ("auto", "reference"))
torch.testing.assert_close(out, exact)
for one, two in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, exact))):
    torch.testing.assert_close(one, two)
print(f"{sys.argv[1]}: torch {torch.__version__}, {cpu.variant() if cpu.module() else 'no kernel'}: right")
TRY
  rm -rf "$work/env"
done
$pip wheel --no-deps --wheel-dir dist ./audit ./gpu ./lab
ls -l dist
