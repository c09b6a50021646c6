#!/usr/bin/env bash
# Fashion-MNIST on two hosts with four GPUs each: sbatch examples/slurm.sh [more words of `flatout train`]
# One Slurm task is one rank. batch_size stays the global batch.
#SBATCH --job-name=flatout
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
set -euo pipefail

# Where the ranks meet: the first host, on a port that two jobs are unlikely to share.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

# The network interface that the hosts share, as `ip route` names it; it is the same on all hosts of most clusters.
INTERFACE=$(ip route get "$(getent ahostsv4 "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n 1)" |
    awk 'NR == 1 { print $1 }')" | sed -n 's/.* dev \([^ ]*\).*/\1/p')
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$INTERFACE} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$INTERFACE}

# Decoded images are cached on each host's own disk. The run folder is on the shared file system.
export FLATOUT_CACHE=${FLATOUT_CACHE:-${TMPDIR:-/tmp}/flatout-$USER}

# --gpus-per-node lets each task see all GPUs of its host; flatout uses the one with the task's local number.
# --kill-on-bad-exit ends every host's tasks when one task fails.
srun --kill-on-bad-exit=1 \
    flatout train fashion-mnist --devices 4xcuda --out "runs/slurm-$SLURM_JOB_ID" "$@"
