#!/bin/sh
# Prints the path of a Python that can build and run jax_ep; says on stderr what is missing if there is none.
#
#   tools/find_python.sh          any Python >= 3.12
#   tools/find_python.sh 3.13     that version
#
# $PYTHON, when set, is the only candidate. Otherwise: PATH, then pyenv, then uv. A name on PATH is not
# trusted (a pyenv shim exists for versions that are not selected): every candidate is run and asked.
set -u

wanted=${1:-}
rejected=""

# Prints the real path of interpreter $1 if it is usable, else why it is not.
probe() {
  "$1" -I - "$wanted" 2>/dev/null <<'PYTHON'
import sys

wanted = sys.argv[1]
version = "%d.%d" % sys.version_info[:2]


def answer(usable, text):
    print("%s %s" % ("usable" if usable else "rejected", text))
    sys.exit()


if sys.version_info < (3, 12):
    answer(False, "is Python %s, older than 3.12" % version)
if wanted and version != wanted:
    answer(False, "is Python %s, not %s" % (version, wanted))
if sys.implementation.name != "cpython":
    answer(False, "is %s, not CPython" % sys.implementation.name)

import importlib.util
import os
import sysconfig

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    answer(False, "is a free-threaded build, which has no stable ABI")
if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
    answer(False, "has no venv module (Debian, Ubuntu: apt-get install python%s-venv)" % version)
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    answer(False, "has no C headers (Debian, Ubuntu: apt-get install python%s-dev)" % version)
answer(True, sys.executable)
PYTHON
}

# Ends the search when $1 is usable, else remembers the reason.
try() {
  answer=$(probe "$1") || answer=""
  case $answer in
    "usable "*)
      echo "${answer#usable }"
      exit 0 ;;
    "rejected "*) reason=${answer#rejected } ;;
    *) reason="does not run" ;;
  esac
  rejected="$rejected
  $1 $reason"
}

try_path() {
  for name in ${wanted:+python$wanted} python3.12 python3.13 python3.14 python3 python; do
    # Every directory counts, not the first alone: a broken shim may hide a working interpreter.
    old_ifs=$IFS
    IFS=:
    for directory in $PATH; do
      IFS=$old_ifs
      if [ -x "$directory/$name" ] && [ ! -d "$directory/$name" ]; then
        try "$directory/$name"
      fi
    done
    IFS=$old_ifs
  done
}

try_pyenv() {
  for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
    if [ "$root" = "${previous:-}" ]; then
      continue
    fi
    previous=$root
    for python in "$root"/versions/3.1[2-9]*/bin/python "$root"/versions/3.[2-9][0-9]*/bin/python; do
      if [ -x "$python" ]; then
        try "$python"
      fi
    done
  done
}

try_uv() {
  command -v uv >/dev/null 2>&1 || return
  for action in find install find; do
    if [ "$action" = install ]; then
      echo "No Python ${wanted:->= 3.12} here; asking uv for one." >&2
      uv python install "${wanted:-3.12}" >&2 || return
    elif python=$(uv python find --no-project "${wanted:->=3.12}" 2>/dev/null); then
      try "$python"
    fi
  done
}

if [ -n "${PYTHON:-}" ]; then
  try "$PYTHON"
else
  try_path
  try_pyenv
  try_uv
fi

{
  echo "jax_ep needs Python ${wanted:-3.12 or newer}, and none was found."
  if [ -n "$rejected" ]; then
    printf 'Looked at:%s\n' "$rejected"
  fi
  echo "Install one and run the command again, for example by"
  echo "  pyenv install ${wanted:-3.12}             (https://github.com/pyenv/pyenv)"
  echo "  uv python install ${wanted:-3.12}         (https://docs.astral.sh/uv)"
  echo "  apt-get install python3-venv python3-dev     where Debian or Ubuntu has a new enough Python"
  echo "or name one: PYTHON=/path/to/python make ..."
} >&2
exit 1
