#!/bin/bash
# Installs peers of races.py where they are missing: bash tools/bench/peers.sh RACE...
# python3 (or $PYTHON) is the Python that has PyTorch, which no peer may replace: none of them brings its dependencies along, but what is named here.
# Needs pip and a network; flashinfer also nvcc at run time; latents git, nvcc 12.9 or newer, and 10 minutes of 16 cores.
set -euo pipefail

python=${PYTHON:-python3}
install() { "$python" -m pip install --no-deps "$@"; }

codes() { # vLLM's forks of FlashAttention-3 and -4: of vLLM's wheel that folder alone, unless vLLM is installed
  "$python" -c 'import vllm' 2> /dev/null && return
  local folder
  folder=$(mktemp -d)
  "$python" -m pip download --no-deps -d "$folder" vllm
  "$python" - "$folder" <<'PYTHON'
import glob, os, sys, sysconfig, zipfile

to = sysconfig.get_path("purelib")
with zipfile.ZipFile(glob.glob(sys.argv[1] + "/*.whl")[0]) as wheel:
    wanted = [name for name in wheel.namelist() if name.startswith("vllm/vllm_flash_attn/")]
    wheel.extractall(to, [name for name in wanted if "_vllm_fa2_C" not in name])
for package in ("vllm", "vllm/vllm_flash_attn"):
    open(os.path.join(to, package, "__init__.py"), "w").close()
PYTHON
  rm -rf "$folder"
}

flashinfer() { # all that `import flashinfer` reads; its kernels are compiled at the first call
  "$python" -m pip install apache-tvm-ffi einops filelock jinja2 ninja numpy nvidia-ml-py packaging requests tabulate tqdm click
  install flashinfer-python
}

programs() { # CuTe DSL 4.8 or newer, for cuDNN's flex attention
  "$python" -m pip install apache-tvm-ffi einops quack-kernels torch-c-dlpack-ext 'nvidia-cutlass-dsl[cu13]>=4.8'
  install flash-attn-4 nvidia-cudnn-frontend
}

tangents() {
  install jvp_flash_attention
}

latents() { # sm_90's kernels alone
  local folder
  folder=$(mktemp -d)
  git clone --depth 1 --recurse-submodules --shallow-submodules https://github.com/deepseek-ai/FlashMLA "$folder"
  FLASH_MLA_DISABLE_SM100=1 install --no-build-isolation "$folder"
  rm -rf "$folder"
}

wide() { # by Triton alone; for CuTe DSL's kernels add nvidia-cutlass-dsl[cu13] and quack-kernels of the versions that ffpa-attn names
  install ffpa-attn
  codes # vLLM's FA4
}

[ $# -gt 0 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
for race in "$@"; do
  case $race in
    codes | flashinfer | latents | programs | tangents | wide) "$race" ;;
    *) echo "peers.sh: no race is called $race: give codes, flashinfer, latents, programs, tangents or wide" >&2; exit 2 ;;
  esac
done
