"""Train a job on a Ray cluster: each Ray Train worker is one rank.

    pip install flatout "ray[train]"
    python examples/ray_train.py digits --workers 2 --epochs 5 --out runs/ray

Ray starts the workers and initialises torch.distributed's process group, which flatout uses.
On several machines `--out` and `--data` must be on a shared file system.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import flatout


def train_on_worker(arguments: dict[str, Any]) -> None:
    """Run on every worker."""
    flatout.fit(**arguments)


def main() -> None:
    """Read the command line, let Ray run the workers, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    # Workers run in folders of Ray's own, so paths must be absolute.
    out = args.out.absolute()
    arguments: dict[str, Any] = {"job": args.job, "out": out, "devices": "cuda" if args.gpu else "cpu"}
    if args.data is not None:
        arguments["data"] = args.data.absolute()
    if args.epochs is not None:
        arguments["epochs"] = args.epochs
    ray.init(include_dashboard=False)
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config=arguments,
        # Ranks exchange Python objects as well as gradients, which NCCL cannot transport. Ray's default time-out of
        # half an hour may be too short for the first decoding of a large data set.
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if args.gpu else "gloo", timeout_s=12 * 3600),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(storage_path=str(out.with_name(f"{out.name}-logs"))),
    )
    trainer.fit()
    summary = flatout.load(out).summary
    print(f"{out}: {summary['test_correct']} of {summary['test_count']} right on {summary['world_size']} ranks")


if __name__ == "__main__":
    main()
