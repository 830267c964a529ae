#!/usr/bin/env bash
# A run on Slurm: a Ray cluster over the nodes of the job, and the run on its first node. From the root of the repository, with .venv:
#   evenkeel deploy RECIPE --slurm --gpus H200x8 | sbatch --time=24:00:00      # says how many nodes, and what each gives
#   sbatch --nodes=4 --gpus-per-node=8 deploy/slurm.sh recipes/qwen3_30b_a3b_4nodes.yaml [KEY=VALUE]...
#   sbatch --nodes=4 --gpus-per-node=8 deploy/slurm.sh --resume RUN_DIR
# All nodes see this folder, the run folder and the user's home under the same paths. When the job's time is nearly up, the run ends with
# a checkpoint, and the same command with --resume goes on.
#SBATCH --job-name=evenkeel
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:TERM@300
set -euo pipefail

bin=${EVENKEEL_BIN:-$PWD/.venv/bin}
port=${RAY_PORT:-6379}
count=${SLURM_JOB_NUM_NODES:?start it with sbatch}
per_node=${EVENKEEL_WORKERS_PER_NODE:-${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}}
per_node=${per_node##*:}                      # Slurm may say h100:8
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}'):$port

# The cluster's token, of this job alone, where all nodes read it: not on a command line, which others on the node could see.
RAY_AUTH_TOKEN_PATH=$HOME/.evenkeel-token-$SLURM_JOB_ID
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH
(umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")

started=()
run=
finish() {
    trap - EXIT TERM
    kill "${started[@]}" 2>/dev/null || true
    wait || true
    rm -f "$RAY_AUTH_TOKEN_PATH"
}
trap finish EXIT
trap '[[ -n $run ]] && kill -TERM "$run" 2>/dev/null || exit 143' TERM

ulimit -n 65536 2>/dev/null || echo "this job may open $(ulimit -n) files a process; Ray likes 65536" >&2
export RAY_health_check_period_ms=1000 RAY_health_check_failure_threshold=3   # a node that is gone is known after 3 s, not Ray's 15
offer=(--resources="{\"${EVENKEEL_RESOURCE:-rollout}\": $per_node}")   # a rollout worker asks for one unit; the learner's ranks are placed first
[[ -z ${EVENKEEL_STORE_BYTES:-} ]] || offer+=(--object-store-memory="$EVENKEEL_STORE_BYTES")
echo "starting Ray on $count nodes, head $head ($address)"
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
    "$bin/ray" start --head --block --node-ip-address="${address%:*}" --port="$port" "${offer[@]}" \
    --dashboard-host=127.0.0.1 --disable-usage-stats &
started+=($!)
if ((count > 1)); then
    srun --nodes=$((count - 1)) --ntasks=$((count - 1)) --exclude="$head" --overlap \
        "$bin/ray" start --block --address="$address" "${offer[@]}" --disable-usage-stats &
    started+=($!)
fi
joined=0
for _ in $(seq 100); do
    joined=$("$bin/ray" status --address="$address" 2>/dev/null | grep -c '^ [0-9]* node_' || true)
    ((joined < count)) || break
    for step in "${started[@]}"; do
        kill -0 "$step" 2>/dev/null || { echo "Ray did not start on all nodes; its own words are above" >&2; exit 1; }
    done
    sleep "${EVENKEEL_POLL_S:-3}"
done
((joined >= count)) || { echo "only $joined of $count nodes are in the Ray cluster at $address" >&2; exit 1; }

# Waited for in the background: bash runs no trap while it waits for a command in the foreground.
"$bin/evenkeel" train "$@" ray.address="$address" &
run=$!
code=0
wait "$run" || code=$?
while kill -0 "$run" 2>/dev/null; do          # a signal has ended the wait; the run is still writing its checkpoint
    code=0
    wait "$run" || code=$?
done
exit "$code"
