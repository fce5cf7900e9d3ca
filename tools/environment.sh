#!/bin/sh
# Makes .venv complete and current: the wheel built from this checkout, installed with what the tests
# and the examples need. Does nothing when that is already so.
#
# The package is installed as a wheel, not editable: what is tested is what ships, and a file that is
# missing from the wheel is missing here. Sources newer than the wheel make a new wheel (incremental).
#
#   PYTHON=...           the interpreter to use instead of looking for one
#   EXTRAS=...           the wheel's extras (default: flax,examples,docs,dev and, with a GPU, cuda13 or cuda12)
#   JAX_EP_CUDA=ON|OFF   insist on CUDA kernels, or leave them out (default: ON with a GPU; without one
#                        `make wheel` compiles them if there is a compiler, and .venv does without)
#   JAX_EP_PROFILE=ON    build kernels that can record what they do, for jax_ep.profile
#   PIP_CONSTRAINT=...   pip's own: versions to use
set -eu
# A folder that bytecode is written into would look like a changed source.
export PYTHONDONTWRITEBYTECODE=1

cd "$(dirname "$0")/.."
environment=.venv
builder=build/environment
stamp=$environment/.complete # written last: an interrupted installation has none

say() { echo "[jax_ep] $*"; }

# Prints the version of the NVIDIA driver, or nothing where no GPU can be used.
driver_version() {
  nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | grep -m 1 '^[0-9]' || true
}

# Runs a command with its output in log file $1; shows the end of that, and ends, when it fails.
logged() {
  log=$1
  shift
  if ! "$@" >"$log" 2>&1; then
    tail -n 60 "$log" >&2
    say "that failed: $* (all it said is in $log)" >&2
    exit 1
  fi
}

# Makes an empty virtual environment at $1 unless a complete one is there.
create() {
  if [ -f "$1/.created" ] && "$1/bin/python" -c 'import pip' 2>/dev/null; then
    return
  fi
  python=$(tools/find_python.sh)
  say "making $1 with $python"
  rm -rf "$1"
  "$python" -m venv "$1"
  touch "$1/.created"
}

wheel() { ls dist/jax_ep-*.whl 2>/dev/null | head -n 1; }

# True when source files are newer than $1, or it was built in a mode that does not serve.
sources_changed() {
  built=$(cat build/mode 2>/dev/null)
  [ -z "$built" ] || { [ "$built" != "$mode" ] && [ "$any_mode_serves" = no ]; } ||
    [ -n "$(find pyproject.toml CMakeLists.txt build_tools cmake jax_ep ffi -name __pycache__ -prune -o -newer "$1" -print)" ]
}

build_wheel() {
  if [ -n "$(wheel)" ] && ! sources_changed "$(wheel)"; then
    return
  fi
  mkdir -p build
  create $builder
  say "building the wheel"
  rm -f dist/jax_ep-*.whl
  touch build/started
  logged build/wheel.log $builder/bin/python tools/build_wheel.py
  touch -r build/started "$(wheel)" # so that what was edited meanwhile is newer
  echo "$mode" >build/mode
  say "built $(wheel)"
}

install_wheel() {
  wanted="$(wheel) $extras ${PIP_CONSTRAINT:-}"
  if [ -f $stamp ] && [ "$(cat $stamp)" = "$wanted" ] && [ ! "$(wheel)" -nt $stamp ] &&
    $environment/bin/python -c '' 2>/dev/null; then
    return
  fi
  if [ ! -f $stamp ]; then
    rm -f $environment/.created
  fi
  create $environment
  rm -f $stamp
  say "installing $(wheel) with [$extras] (a few minutes the first time)"
  logged build/install.log $environment/bin/pip uninstall --yes jax_ep
  logged build/install.log $environment/bin/pip install --disable-pip-version-check "$(wheel)[$extras]"
  echo "$wanted" >$stamp
  say "$environment is ready"
}

driver=$(driver_version)
any_mode_serves=no
if [ -z "${JAX_EP_CUDA:-}" ]; then
  # CUDA 13 needs driver 580; for an older one, kernels are built if there is a CUDA 12 compiler.
  if [ "${driver%%.*}0" -ge 5800 ]; then
    export JAX_EP_CUDA=ON
  elif [ -z "$driver" ] && [ "${1:-}" != wheel ]; then
    # Kernels take ten minutes of processor time, and nothing here could run them.
    export JAX_EP_CUDA=OFF
    any_mode_serves=yes
  fi
fi
mode=${JAX_EP_CUDA:-AUTO}
if [ "${JAX_EP_PROFILE:-OFF}" != OFF ]; then
  mode=$mode-profile
fi
build_wheel
if [ "${1:-}" = wheel ]; then
  exit
fi

extras=${EXTRAS:-}
if [ -z "$extras" ]; then
  extras=flax,examples,docs,dev
  if [ -n "$driver" ]; then
    case $(wheel) in
      *+cu12-*) extras=$extras,cuda12 ;;
      *+cu13-*) extras=$extras,cuda13 ;;
      *) [ "${driver%%.*}" -ge 580 ] && extras=$extras,cuda13 || extras=$extras,cuda12 ;;
    esac
  fi
fi
install_wheel
