#!/bin/sh
# Every measurement on GPUs, one after another, each with a budget of seconds.
#
#   bench/run_all.sh FOLDER [NCCL_TESTS [NAME...]]
#
# FOLDER gets a JSON file from each. NCCL_TESTS is all_reduce_perf, "" for none. NAMEs choose some of
# allreduce step modes launch start means copies explain. What fails or outruns its budget is said at the end,
# and the others run all the same. DEVICE=host tries it out without a GPU, and QUICK=1 makes it
# short; the figures mean nothing then.
set -u
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
tests=${2:-}
if [ $# -ge 2 ]; then shift 2; else shift 1; fi
names=${*:-allreduce step modes launch start means copies explain}
device=${DEVICE:-cuda}
python=${PYTHON:-python3}
beside=${BESIDE:---beside watch=false}
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$folder"
failed=""

measure() { # budget name script options...
  budget=$1 name=$2 script=$3
  shift 3
  echo "== $name"
  begun=$(date +%s)
  timeout -k 5 "$budget" "$python" "$here/$script" --device "$device" \
    --json "$folder/$name.json" "$@" 2>&1 || failed="$failed $name"
  echo "== $name took $(($(date +%s) - begun)) s"
}

for name in $names; do
  case $name in
    allreduce) measure 200 allreduce allreduce.py --part sizes ${tests:+--nccl-tests "$tests"} $beside ${QUICK:+--rounds 1 --most 65536} ;;
    explain) measure 130 explain allreduce.py --part explain ${tests:+--nccl-tests "$tests"} ${QUICK:+--rounds 1} ;;
    step) measure 110 step step.py ${QUICK:+--steps 200} ;;
    modes) measure 110 modes modes.py ${QUICK:+--rounds 1 --round-steps 5} ;;
    launch) measure 130 launch launch.py ${QUICK:+--rounds 1 --steps 100} ;;
    means) measure 110 means means.py ${QUICK:+--rounds 1 --most 65536} ;;
    copies) measure 60 copies copies.py ${QUICK:+--rounds 1 --most 65536} ;;
    start) measure 60 start start.py ${QUICK:+--runs 2} ;;
    *) failed="$failed $name(unknown)" ;;
  esac
done
[ -z "$failed" ] || { echo "FAILED:$failed"; exit 1; }
