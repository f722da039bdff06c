# Sourced by quickstart.sh and tests/run.sh: make .venv beside the project and install into it. Safe to run again.
#
#   PYTHON               interpreter to make the environment with (default: the first of python3.11 to 3.13 that runs)
#   PIP_EXTRA_INDEX_URL  pip's own variable: where vLLM's CPU build finds PyTorch's CPU wheels

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"

step() { printf '\n== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.11 to 3.13 with venv was found; install one, or name it: PYTHON=/path/to/python3 bash $0"
}

# What is installed is remembered as a checksum of what was asked for, so that a second run takes no time.
install_project() { # extras
  local wanted stamp="$venv/.pdcluster-installed"
  wanted="$(printf '%s' "$1 editable" | cat - "$root/pyproject.toml" | sha256sum)"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    echo "already installed in $venv"
    return
  fi
  echo "installing pdcluster[$1]: about 4 GB and 3 to 5 minutes where nothing is cached"
  "$venv/bin/python" -m pip install --progress-bar off -e "$root[$1]" | progress ||
    die "pip could not install pdcluster[$1]. If it found no torch==2.13.0+cpu: PyTorch keeps CPU wheels on an index of
  its own; see https://pytorch.org/get-started/locally (Linux, Pip, CPU) and pass the address that it shows:
  PIP_EXTRA_INDEX_URL=ADDRESS bash $0"
  mend_torchvision
  printf '%s' "$wanted" >"$stamp"
}

# Of pip's many lines, those that show where it is.
progress() { grep --line-buffered -E '^ *(Downloading|Building wheel|Installing collected|Successfully installed)' | cut -c1-100; }

# PyPI's torchvision is a CUDA build: beside a CPU build of torch its import fails, and with it every engine's.
mend_torchvision() {
  if "$venv/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torchvision") is None)' &&
    ! "$venv/bin/python" -W ignore -c 'import torchvision' 2>/dev/null; then
    echo "torchvision doesn't fit this torch and would stop every engine: removing it (text models don't need it)"
    "$venv/bin/python" -m pip uninstall --quiet -y torchvision torchaudio torchcodec
  fi
}

make_environment() { # extras
  step "Python environment in $venv"
  if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    rm -rf "$venv"
    "$(find_python)" -m venv "$venv" || die "could not make $venv"
  fi
  install_project "$1"
}
