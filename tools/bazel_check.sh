#!/bin/bash
# Checks BUILD.bazel with Debian's bazel-bootstrap (4.2.3): every label and glob resolves, every source
# file belongs to a target, the host targets build, the C++ tests and the quick CPU tests pass.
#
#   tools/bazel_check.sh [python]     the interpreter that has jax, nanobind's and the tests' packages
#
# This Bazel has neither modules nor a registry, so a copy of the tree gets a WORKSPACE and small local
# stand-ins for the rule sets that MODULE.bazel names. CONTRIBUTING.md says what this does not check.
set -euo pipefail

cd "$(dirname "$0")/.."
python=$(realpath -s "${1:-.venv/bin/python}")
work=$(mktemp -d)
finish() {
  # A server serves all the commands, and ends with them.
  [ ! -e "$work/cache" ] || (cd "$tree" && bazel shutdown) || true
  # Bazel writes its cache without write permission.
  chmod -R u+w "$work" && rm -rf "$work"
}
trap finish EXIT
tree=$work/tree
mkdir -p "$tree" "$work/stubs"
git ls-files --cached --others --exclude-standard -z | xargs -0 ls -d 2>/dev/null | tar -c -T - | tar -x -C "$tree"

# stub NAME: writes standard input to stubs/NAME/defs.bzl and makes the repository around it.
stub() {
  local folder=$work/stubs/$1/$2
  mkdir -p "$folder"
  echo "workspace(name = \"$1\")" >"$work/stubs/$1/WORKSPACE"
  touch "$work/stubs/$1/BUILD" "$folder/BUILD"
  cat >"$folder/${3:-defs.bzl}"
}

stub rules_cc cc <<'STUB'
cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
STUB

stub rules_python python <<'STUB'
py_binary = native.py_binary
py_library = native.py_library
py_runtime = native.py_runtime
py_test = native.py_test
STUB

stub rules_java java <<'STUB'
java_binary = native.java_binary
java_import = native.java_import
java_library = native.java_library
java_runtime = native.java_runtime
java_test = native.java_test
java_toolchain = native.java_toolchain
STUB

stub remote_coverage_tools . BUILD <<'STUB'
filegroup(name = "coverage_report_generator", visibility = ["//visibility:public"])
STUB

# CUDA sources are only collected: no compiler, no headers.
stub rules_cuda cuda <<'STUB'
def cuda_library(name, srcs, hdrs, tags, deps):
    native.cc_library(name = name, hdrs = hdrs, textual_hdrs = srcs, tags = tags, deps = deps)
STUB
cat >"$work/stubs/rules_cuda/cuda/BUILD" <<'STUB'
cc_library(name = "runtime", visibility = ["//visibility:public"])
STUB

# The real nanobind of the environment, so that the module is really built.
stub nanobind_bazel . build_defs.bzl <<'STUB'
def nanobind_extension(name, srcs, copts = [], deps = [], local_defines = []):
    native.cc_binary(
        name = name + ".so",
        srcs = srcs,
        copts = copts + ["-fvisibility=hidden", "-fno-strict-aliasing"],
        local_defines = local_defines,
        linkshared = True,
        deps = deps + ["@nanobind_bazel//:nanobind"],
    )
    native.filegroup(name = name, srcs = [name + ".so"])
STUB
cat >"$work/stubs/nanobind_bazel/BUILD" <<'STUB'
cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**", "python/**"]),
    textual_hdrs = glob(["nanobind/src/**"], exclude = ["nanobind/src/nb_combined.cpp"]) + glob(["nanobind/ext/**"]),
    copts = ["-std=c++20", "-fno-strict-aliasing", "-fvisibility=hidden", "-w"],
    includes = ["nanobind/include", "nanobind/ext/robin_map/include", "python"],
    visibility = ["//visibility:public"],
)
STUB
folder_of() { "$python" -c "$1"; }
cp -r "$(folder_of 'import nanobind, os; print(os.path.dirname(nanobind.__file__))')" "$work/stubs/nanobind_bazel/nanobind"
cp -rL "$(folder_of 'import sysconfig; print(sysconfig.get_path("include"))')" "$work/stubs/nanobind_bazel/python"

# Python packages come from the environment of the interpreter; their labels are empty libraries.
for package in $(sed -n 's/^\([A-Za-z0-9_.-]*\)==.*/\1/p' tools/bazel_requirements.txt | tr 'A-Z.-' 'a-z__'); do
  stub pypi "$package" BUILD <<STUB
py_library(name = "$package", visibility = ["//visibility:public"])
STUB
done
cp -r "$(folder_of 'import jax.ffi; print(jax.ffi.include_dir())')" "$work/stubs/pypi/jaxlib/include"
cp -r "$(folder_of 'import libucx, os; print(os.path.dirname(libucx.__file__))')/include" "$work/stubs/pypi/libucx_cu13/include"
for package in jaxlib libucx_cu13; do
  cat >>"$work/stubs/pypi/$package/BUILD" <<'STUB'
cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
STUB
done

# Not "jax_ep": the folder of that name in the runfiles would hide the package.
echo 'workspace(name = "main")' >"$tree/WORKSPACE"
for repository in "$work"/stubs/*; do
  echo "local_repository(name = \"${repository##*/}\", path = \"$repository\")" >>"$tree/WORKSPACE"
done

# Adds a test: the tests import the package that Bazel built, not the installed one.
cat >"$tree/tests/runtime/bazel_test.py" <<'PYTHON'
import jax_ep
from jax_ep import _ffi

for module in (jax_ep, _ffi):
    assert ".runfiles" in module.__file__, module.__file__
assert jax_ep.build_info()["compiler"] == "Bazel", jax_ep.build_info()
PYTHON

cd "$tree"
bazel() {
  local command=$1 options=""
  shift
  case $command in
    build | test) options="--noshow_progress --spawn_strategy=local" ;;
    query) options=--noshow_progress ;;
  esac
  command bazel --output_user_root="$work/cache" "$command" $options "$@"
}

echo "== bazel query //..."
bazel query //...

echo "== every file belongs to a target"
bazel query 'kind("source file", deps(//...))' --output=label |
  sed -n 's|^//:||p' | sort >"$work/described"
find jax_ep ffi tests examples -type f ! -name '*.pyc' | sort >"$work/present"
comm -13 "$work/described" "$work/present" >"$work/forgotten"
if [ -s "$work/forgotten" ]; then
  echo "BUILD.bazel has no target for:"
  cat "$work/forgotten"
  exit 1
fi
echo "$(wc -l <"$work/present") files"

echo "== bazel build //..."
bazel build //... --show_result=0

echo "== bazel test //..."
bazel test //... --test_tag_filters=-slow --test_output=errors --show_result=0 --local_test_jobs=2 \
  --test_env=PATH="$(dirname "$python"):$PATH" --test_env=HOME="${HOME:-/}"
