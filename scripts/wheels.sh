#!/usr/bin/env bash
# Builds the parts of a release into dist/, as far as this machine can: a source archive, a wheel, one without the kernel, and
# on Linux, where a cross compiler is, one for aarch64; then the wheels of the audit, the backends of GPUs and the
# laboratory. Each wheel that can run here is tried in a fresh environment: attention with gradients, doctor's verdict;
# the one with the kernel also with a model of transformers and with the other distributions; then it is uninstalled.
# Manylinux and macOS wheels: cibuildwheel.
#     scripts/wheels.sh [torch==2.11.0 ...]      what those environments get instead of what constraints.txt says
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
pip="$python -m pip --quiet --disable-pip-version-check"
wanted=("${@:---constraint=$PWD/constraints.txt}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf dist

version=$($python -c "import sys; print(f'{sys.version_info.major}{sys.version_info.minor}')")
$pip wheel --no-deps --wheel-dir dist .
SKBUILD_WHEEL_CMAKE=false $pip wheel --no-deps --wheel-dir dist .
$python -m build --sdist --outdir dist . > /dev/null
cross=aarch64-linux-gnu-g++
if [[ $(uname -sm) == "Linux x86_64" ]] && command -v $cross > /dev/null; then
  # With this platform pip would install ninja for aarch64 into an environment of its own, and a build that fails gives a
  # wheel without the kernel. So the build uses this environment's tools, and the wheel must be there.
  _PYTHON_HOST_PLATFORM=linux-aarch64 SETUPTOOLS_EXT_SUFFIX=.cpython-$version-aarch64-linux-gnu.so \
    CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$cross" \
    PATH="$($python -c 'import sys; print(sys.prefix)')/bin:$PATH" $pip wheel --no-deps --no-build-isolation --wheel-dir dist .
  ls dist/ringweave-*aarch64.whl
fi
$pip wheel --no-deps --wheel-dir dist ./audit ./gpu ./lab

for wheel in dist/ringweave-*-py3-none-any.whl dist/ringweave-*"_$(uname -m).whl"; do
  $python -m venv "$work/env"
  inside="$work/env/bin/python -m pip --quiet --disable-pip-version-check"
  $inside install "${wanted[@]}" torch numpy
  started=$SECONDS
  $inside install "${wanted[@]}" "$wheel[cli]"
  echo "$wheel: installed in $((SECONDS - started)) s, after torch"
  # from elsewhere: not the sources that lie here
  (cd "$work" && env/bin/python - "$wheel") << 'TRY'
import sys
import torch
import ringweave as rw
from ringweave.backends import cpu

assert ("none-any" in sys.argv[1]) == (cpu.module() is None), "the kernel"
torch.manual_seed(0)
q, k, v = (torch.randn(1, 4, 500, 64, requires_grad=True) for _ in range(3))
pattern = (rw.SlidingWindow(100) | rw.Sinks(4)) & rw.Causal()
out, exact = (rw.attention(q, k, v, pattern, backend=name) for name in ("auto", "reference"))
torch.testing.assert_close(out, exact)
for one, two in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, exact))):
    torch.testing.assert_close(one, two, atol=5e-5, rtol=1e-5)
print(f"{sys.argv[1]}: torch {torch.__version__}, {cpu.variant() if cpu.module() else 'no kernel'}: right")
TRY
  (cd "$work" && env/bin/ringweave doctor) | tail -n 1
  if [[ $wheel != *none-any* ]]; then
    $inside install "${wanted[@]}" --find-links dist 'ringweave[hf]' ringweave-audit ringweave-gpu ringweave-lab
    (cd "$work" && env/bin/python -) << 'TRY'
import torch
import transformers
import ringweave.integrations.transformers

sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
config = transformers.MistralConfig(vocab_size=256, sliding_window=64, **sizes)
ours, theirs = (
    transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name) for name in ("ringweave", "sdpa")
)
theirs.load_state_dict(ours.state_dict())
tokens = torch.randint(256, (1, 300))
torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=1e-4)
print(f"transformers {transformers.__version__}: right")
TRY
    for command in audit bench demo explore tune; do (cd "$work" && env/bin/ringweave $command --help > /dev/null); done
    echo "commands of the other distributions: found"
  fi
  $inside uninstall --yes ringweave ringweave-audit ringweave-gpu ringweave-lab 2> /dev/null
  left=$(find "$work/env" -iname '*ringweave*')
  [[ -z $left ]] || { echo "left behind: $left" >&2; exit 1; }
  echo "$wheel: uninstalled, nothing is left"
  rm -rf "$work/env"
done
ls -l dist
