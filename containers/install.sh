#!/usr/bin/env bash
# The steps of the container images. `python` is the interpreter they use; TORCH chooses a release of torch.
# PIP_EXTRA_INDEX_URL: the index of torch's builds for the CPU (200 MB), which pytorch.org names; without it pip takes the
# build for CUDA (several GB).
#
#   install.sh wheel FOLDER    compiles this clone into FOLDER/ddp_lab-*.whl; needs g++ and Python's headers
#   install.sh install FOLDER  installs that wheel with JupyterLab, and the server that JupyterHub starts
#   install.sh lessons FOLDER  copies the notebooks and lessons into FOLDER/ddp_lab_lessons
set -euo pipefail

TORCH=${TORCH:-2.13.0}
export PIP_ROOT_USER_ACTION=ignore
clone=$(dirname "$(dirname "$(realpath "$0")")")
pip_() { python -m pip --quiet "$@"; }

case "${1:-} ${2:-}" in
  "wheel "?*)
    pip_ install "torch==$TORCH" numpy 'setuptools>=77' wheel 'cmake>=3.25' ninja
    pip_ wheel --no-deps --no-build-isolation --wheel-dir "$2" "$clone"
    ;;
  "install "?*)
    pip_ install "torch==$TORCH" 'jupyterhub==6.*' "$(echo "$2"/ddp_lab-*.whl)[notebooks]"
    ;;
  "lessons "?*)
    python -c 'import sys, pathlib; from ddp_lab import lesson_files; lesson_files.working_copy(pathlib.Path(sys.argv[1]))' "$2"
    ;;
  *)
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
