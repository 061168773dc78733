#!/usr/bin/env bash
# The steps of the container images. `python` is the interpreter they use; TORCH chooses a release of torch, for the CPU.
#
#   install.sh wheel FOLDER    compiles this clone into FOLDER/ddp_lab-*.whl; needs g++ and Python's headers
#   install.sh install FOLDER  installs that wheel with JupyterLab, and the server that JupyterHub starts
#   install.sh lessons FOLDER  copies the notebooks and lessons into FOLDER/ddp_lab_lessons
set -euo pipefail

TORCH=${TORCH:-2.13.0}
# PyTorch's own index has the builds without CUDA: 200 MB, not several GB.
export PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL-https://download.pytorch.org/whl/cpu}
export PIP_ROOT_USER_ACTION=ignore
clone=$(dirname "$(dirname "$(realpath "$0")")")
pip_() { python -m pip --quiet "$@"; }

case "${1:-} ${2:-}" in
  "wheel "?*)
    pip_ install "torch==$TORCH+cpu" numpy 'setuptools>=77' wheel 'cmake>=3.25' ninja
    pip_ wheel --no-deps --no-build-isolation --wheel-dir "$2" "$clone"
    ;;
  "install "?*)
    pip_ install "torch==$TORCH+cpu" 'jupyterhub==6.*' "$(echo "$2"/ddp_lab-*.whl)[notebooks]"
    ;;
  "lessons "?*)
    python -c 'import sys, pathlib; from ddp_lab import lesson_files; lesson_files.working_copy(pathlib.Path(sys.argv[1]))' "$2"
    ;;
  *)
    sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
