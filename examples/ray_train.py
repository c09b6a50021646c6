"""Train a job on a Ray cluster: each Ray Train worker is one rank.

    pip install flatout "ray[train]"
    python examples/ray_train.py digits --workers 2 --epochs 5 --out runs/ray

Ray places the workers and brings them together in a group of torch.distributed; flatout finds the group and uses it.
On several machines `--out` and `--data` must name folders that all of them see.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import flatout


def train_on_worker(arguments: dict[str, Any]) -> None:
    """Run in every worker, which Ray has given its rank."""
    flatout.fit(**arguments)


def main() -> None:
    """Read the command line, have Ray run the workers, and say what came out."""
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
        # Plain objects travel between ranks as well as gradients: NCCL alone cannot carry them. Ray gives a group
        # half an hour by default, which the first decoding of much data may exceed.
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if args.gpu else "gloo", timeout_s=12 * 3600),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(storage_path=str(out.parent / "ray")),
    )
    trainer.fit()
    summary = flatout.load(out).summary
    print(f"{out}: {summary['test_correct']} of {summary['test_count']} right on {summary['world_size']} ranks")


if __name__ == "__main__":
    main()
