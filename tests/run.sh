#!/usr/bin/env bash
# Everything that must hold: lint, types, unit tests, a soak, end-to-end tests on real engines. Installs what is missing.
#
#   bash tests/run.sh           all of it (about 25 minutes on 2 cores, after the installation)
#   bash tests/run.sh --quick   without the soak and the end-to-end tests
set -euo pipefail

quick=false
for argument in "$@"; do
  case "$argument" in
    --quick) quick=true ;;
    -h | --help) sed -n '2,5p' "$0" | cut -c3-; exit 0 ;;
    *) echo "error: $argument: unknown; there is --quick" >&2; exit 2 ;;
  esac
done

source "$(dirname "${BASH_SOURCE[0]}")/../deploy/environment.sh"
make_environment "cpu,demo,dev"
cd "$root"

step "lint"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
step "types"
"$venv/bin/mypy"
step "unit tests"
"$venv/bin/pytest" tests --ignore=tests/e2e --ignore=tests/soak --durations=5 -q -n 2 --dist loadfile
if $quick; then
  exit 0
fi
step "soak: 20,000 mixed requests, a thousand streams at once"
"$venv/bin/pytest" tests/soak -q -s
step "end-to-end tests on real engines"
"$venv/bin/pytest" tests/e2e --durations=5 -v
