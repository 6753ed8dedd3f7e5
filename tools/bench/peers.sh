#!/bin/bash
# Installs peers of races.py where they are missing: bash tools/bench/peers.sh RACE...
# python3 (or $PYTHON) is the Python that has PyTorch, which no peer may replace: none of them brings its dependencies along, but what is named here.
# Needs pip and a network; flashinfer also nvcc at run time; latents git, nvcc 12.9 or newer, and 2.5 minutes of 8 cores. Where a GPU machine
# cannot have CuTe DSL, fa4_ahead.py compiles FlashAttention-4 elsewhere.
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

weights() {
  flashinfer
}

programs() { # CuTe DSL 4.8 or newer, for cuDNN's flex attention
  "$python" -m pip install apache-tvm-ffi einops quack-kernels torch-c-dlpack-ext 'nvidia-cutlass-dsl[cu13]>=4.8'
  install flash-attn-4 nvidia-cudnn-frontend
}

tangents() {
  install jvp_flash_attention
}

latents() { # FlashMLA: of sm_90's kernels those that the race calls, one nvcc each, all at once
  local folder to torch python_headers file
  folder=$(mktemp -d)
  git clone --depth 1 --recurse-submodules --shallow-submodules https://github.com/deepseek-ai/FlashMLA "$folder"
  torch=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))')
  to=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/flash_mla
  python_headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  local -a flags=(-O3 -std=c++20 -DNDEBUG -D_USE_MATH_DEFINES -DFLASH_MLA_DISABLE_FP16 -DTORCH_EXTENSION_NAME=cuda -Xcompiler -fPIC
    -U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ -U__CUDA_NO_HALF2_OPERATORS__ -U__CUDA_NO_BFLOAT16_CONVERSIONS__
    --expt-relaxed-constexpr --expt-extended-lambda --use_fast_math --ptxas-options=--register-usage-level=10
    -gencode arch=compute_90a,code=sm_90a -I"$torch/include" -I"$torch/include/torch/csrc/api/include" -I"$python_headers")
  cd "$folder"
  for file in csrc csrc/kerutils/include csrc/sm90 csrc/cutlass/include csrc/cutlass/tools/util/include; do flags+=(-I"$file"); done
  local -a compiling=()
  for file in csrc/api/api.cpp csrc/smxx/decode/*/*.cu csrc/sm90/decode/dense/instantiations/bf16.cu csrc/sm90/prefill/sparse/fwd.cu \
    csrc/sm90/prefill/sparse/instantiations/phase1_k576.cu csrc/sm90/decode/sparse_fp8/instantiations/v32_persistent_h{64,128}.cu; do
    nvcc "${flags[@]}" -c "$file" -o "$(basename "${file%.*}").o" &
    compiling+=($!)
  done
  for file in "${compiling[@]}"; do wait "$file"; done
  mkdir -p "$to"
  cp flash_mla/*.py "$to"
  # Kernels that were not built are looked for when they are called, but for two whose addresses are taken.
  nm -u api.o | awk '/FMHACutlassSM100/ { print "void " $2 "(void) { __builtin_trap(); }" }' >absent.c
  gcc -c -fPIC absent.c -o absent.o
  g++ -shared -o "$to/cuda.so" ./*.o -L"$torch/lib" -lc10 -lc10_cuda -ltorch_cpu -ltorch_cuda -ltorch_python -L"$(dirname "$(command -v nvcc)")/../lib64" -lcudart -Wl,-z,lazy -Wl,--unresolved-symbols=ignore-all -s
  sed -i '1i import os, sys\n\nsys.setdlopenflags(os.RTLD_LAZY)' "$to/__init__.py"
  cd - >/dev/null
  rm -rf "$folder"
}

wide() { # by Triton alone; for CuTe DSL's kernels add nvidia-cutlass-dsl[cu13] and quack-kernels of the versions that ffpa-attn names
  install ffpa-attn
  codes # vLLM's FA4
}

[ $# -gt 0 ] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
for race in "$@"; do
  case $race in
    codes | flashinfer | latents | programs | tangents | weights | wide) "$race" ;;
    *) echo "peers.sh: no race is called $race: give codes, flashinfer, latents, programs, tangents, weights or wide" >&2; exit 2 ;;
  esac
done
