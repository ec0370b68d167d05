#!/usr/bin/env bash
# Writes latentpool/v1/*_pb2*.py(i) from protos/. `--check` writes elsewhere and compares.
set -euo pipefail
cd "$(dirname "$0")/.."
bin="${VENV:-.venv}/bin"
out=.
if [ "${1:-}" = "--check" ]; then out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; fi
PATH="$bin:$PATH" "$bin/python" -m grpc_tools.protoc -I protos \
  --python_out="$out" --grpc_python_out="$out" \
  --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
  protos/latentpool/v1/*.proto
if [ "$out" != . ]; then
  for file in "$out"/latentpool/v1/*; do
    cmp -s "$file" "latentpool/v1/$(basename "$file")" || {
      echo "stubs are stale: $(basename "$file") differs; run tools/generate_stubs.sh" >&2; exit 1; }
  done
  echo "stubs match protos/"
fi
