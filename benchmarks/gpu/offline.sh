#!/usr/bin/env bash
# The run on a machine without a network, in the folder that the archives of `run.py --pack` were unpacked into:
#
#   bash code/benchmarks/gpu/offline.sh prepare                  install, write the base, and measure times meanwhile
#   bash code/benchmarks/gpu/offline.sh start ARGUMENTS          train and ask, in a session of its own
#   bash code/benchmarks/gpu/offline.sh collect SECONDS FOLDER   at so many seconds after `prepare`, or at the end,
#                                                                write what is new into FOLDER, and show how it goes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
HERE=$PWD
export PYTHONPATH=$HERE/code:$HERE/site HF_HUB_OFFLINE=1 CONTEXT_COMPRESSORS_CACHE=$HERE/cache PYTHONUNBUFFERED=1
NAME=HuggingFaceTB/SmolLM2-135M-Instruct
KEPT="config.json generation_config.json recipe.yaml training_summary.json training_documents.json README.md model.safetensors"
passed() { echo $(($(date +%s) - $(cat began))); }

case $1 in
prepare)
  [ -e began ] || date +%s >began
  find . -name '*.00' | while read -r first; do cat "${first%.00}".?? >"${first%.00}" && rm "${first%.00}".??; done
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target site wheels/*.whl
  setsid python3 -P -c "from context_compressors import pretrained_base; print(pretrained_base('$NAME'))" \
    >base.log 2>&1 </dev/null &
  (cd code && exec setsid python3 -P -m benchmarks.gpu.run --data . --output "$HERE/times" --parts kernels times) \
    >times.log 2>&1 </dev/null &
  echo "prepared at $(passed) s"
  ;;
start)
  shift
  setsid bash "$HERE/code/benchmarks/gpu/offline.sh" run "$@" >run.log 2>&1 </dev/null &
  ;;
run)
  shift
  until [ -e "cache/bases/${NAME/\//--}/model.safetensors" ]; do sleep 0.2; done
  # Loading takes some 25 seconds, in which the last times may still be measured.
  until grep -q compression_overhead times.log || [ "$(passed)" -gt 80 ]; do sleep 0.2; done
  echo "started at $(passed) s"
  (cd code && python3 -P -m benchmarks.gpu.run --data "$HERE/data" --output "$HERE/out" "$@") || true
  echo END
  ;;
collect)
  until [ "$(passed)" -ge "$2" ] || grep -q '^END' run.log; do sleep 0.5; done
  mkdir -p sent figures/logs
  for run in out/runs/*; do
    name=$(basename "$run")
    [ -e "$run/training_summary.json" ] && [ ! -e "sent/$name" ] && [ "$(ls "$3" | wc -l)" -lt 6 ] || continue
    # shellcheck disable=SC2086
    (cd "$run" && tar czf "$3/$name.tgz" $(ls $KEPT 2>/dev/null)) && touch "sent/$name"
  done
  cp -r out/answers out/times out/correctness.json out/status.json times/times times/status.json ./*.log figures/ 2>/dev/null || true
  for log in out/logs/*.txt times/logs/*.txt; do tail -c 5000 "$log" >"figures/logs/$(basename "$log")" || true; done
  tar czf "$3/figures.tgz" figures
  echo "at $(passed) s"
  cat times.log run.log
  nvidia-smi --query-gpu=name,memory.used,utilization.gpu --format=csv,noheader || true
  for log in out/logs/training.*.txt; do echo "$log: $(tail -c 600 "$log" | tr '\r' '\n' | tail -n 2 | cut -c 1-300)"; done
  ;;
esac
