# shellcheck shell=bash
# Sourced by the scripts that run on a GPU machine: unpacks target/cuda/bundle if the archive of build.sh
# is newer, and finds libraries of a toolkit or of PyTorch that are not in the system's library path.
python=${PYTHON:-python3}
! [ target/cuda/bundle.tar.xz -nt target/cuda/bundle/built_in ] || tar -xJmf target/cuda/bundle.tar.xz target/cuda/bundle
pip_library() { "$python" -c "import nvidia.$1 as m, os; print(os.path.join(list(m.__path__)[0], 'lib'))" 2>/dev/null || true; }
for folder in /usr/local/cuda/lib64 /usr/local/cuda/targets/x86_64-linux/lib "$(pip_library cu13)" "$(pip_library nccl)"; do
  if [ -d "$folder" ] && [[ :${LD_LIBRARY_PATH:-}: != *:$folder:* ]]; then export LD_LIBRARY_PATH=$folder:${LD_LIBRARY_PATH:-}; fi
done
# Exit code of a script, or of a part of it, that had too little time; nothing has failed.
# shellcheck disable=SC2034
unfinished=75
