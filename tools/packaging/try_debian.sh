#!/bin/sh
# In a new Debian, as tools/release.sh lays it out in /try: installs the Debian package, then the wheels, and times the first minute.
set -eu
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LC_ALL=C

dpkg -i /try/*.deb >/dev/null
flashjit inspect --spec fwd:bf16:d128:causal --arch sm_90a
flashjit doctor || [ $? = 3 ] # no GPU
dpkg -r flashjit >/dev/null

begin=$(date +%s)
python3 -m venv /try/venv
/try/venv/bin/pip install -q --no-index --disable-pip-version-check /try/*.whl
packs=$(/try/venv/bin/python -m flashjit doctor | grep -c '  pack  ') || true
PATH=/try/venv/bin PYTHONPATH=/try/host-packages /try/venv/bin/python /try/release.py try /try/README.md
echo "$(($(date +%s) - begin)) seconds from nothing to this output, with $packs packs of kernels"
