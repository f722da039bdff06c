#!/usr/bin/env bash
# From nothing to an answer: install, launch 2 prefill and 4 decode engines on this machine's CPU, ask, stop.
#
#   bash deploy/quickstart.sh                 all of it; nothing is left running
#   bash deploy/quickstart.sh --keep          leave the cluster running
#   bash deploy/quickstart.sh --setup-only    install and stop
#
# QUICKSTART_PORT chooses the endpoint's port (8000). Safe to run again.
set -euo pipefail

keep=false setup_only=false
for argument in "$@"; do
  case "$argument" in
    --keep) keep=true ;;
    --setup-only) setup_only=true ;;
    -h | --help) sed -n '2,8p' "$0" | cut -c3-; exit 0 ;;
    *) echo "error: $argument: unknown; there are --keep and --setup-only" >&2; exit 2 ;;
  esac
done

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment "cpu,demo,dev"
if $setup_only; then
  step "installed; start with: $venv/bin/pdcluster launch --prefill 2 --decode 4"
  exit 0
fi

pdcluster="$venv/bin/pdcluster"
port="${QUICKSTART_PORT:-8000}"
name=quickstart
stop() { "$pdcluster" down --name "$name" || true; }

step "launch 2 prefill and 4 decode engines (3 to 6 minutes on 2 cores)"
trap stop EXIT
trap 'exit 130' INT TERM
"$pdcluster" launch --prefill 2 --decode 4 --port "$port" --name "$name" --fit-memory --detach

step "ask it"
"$venv/bin/python" "$root/deploy/ask.py" "http://127.0.0.1:$port" "What is the capital of France?"

if $keep; then
  trap - EXIT INT TERM
  step "left running at http://127.0.0.1:$port/v1; stop it with: $pdcluster down --name $name"
  exit 0
fi
step "stop"
