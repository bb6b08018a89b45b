#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#SBATCH --job-name=scalerl
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

if [ $# -eq 0 ]; then
  echo "usage: sbatch --nodes=N recipes/cluster/slurm.sh COMMAND: one Ray cluster on all nodes, COMMAND on the first" >&2
  exit 2
fi

port=${RAY_PORT:-6379}
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${names%%$'\n'*}
on_head=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head")
address=$("${on_head[@]}" hostname --ip-address | awk '{print $1}')
unset RAY_ADDRESS

"${on_head[@]}" ray start --head --node-ip-address="$address" --port="$port" --block &
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" -gt 0 ]; then
  # They try until the head answers.
  srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" ray start --address="$address:$port" --block &
fi

# A run asks for all of its GPUs at once, so it starts when every node is there.
export RAY_ADDRESS=$address:$port
"${on_head[@]}" python3 -c '
import sys, time
import ray
wanted, deadline = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while True:
    try:
        ray.init(log_to_driver=False)
        found = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
    except ConnectionError:
        found = 0
    if found >= wanted:
        sys.exit()
    if time.monotonic() > deadline:
        sys.exit(f"{found} of {wanted} nodes have joined the Ray cluster: look for the others in the output above")
    time.sleep(2)
' "$SLURM_JOB_NUM_NODES" "${RAY_START_TIMEOUT_S:-600}"

"${on_head[@]}" "$@"
