"""Time and peak memory of `normswap convert` beside those of creating, loading and saving alone.

    python tests/lab/benchmarks/convert.py
        [--arch resnet50 resnet18] [--to skipinit groupnorm] [-o convert.md]

Each run is a process of its own (peak memory is per process), A B A B ...; imports are not counted.
Prints the ratio of the times pair by pair, and by how many times the checkpoint's size the peak
exceeds the baseline's. The last column is what a user waits for: the CPU time of the command as it
is typed, over that of the baseline's whole process.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def baseline(arch: str, file: Path, out: Path, _to: str) -> None:
    import timm
    from safetensors.torch import load_file, save_file

    model = timm.create_model(arch).eval()
    model.load_state_dict(load_file(file))
    save_file(dict(model.state_dict()), out / "model.safetensors")


def ours(arch: str, file: Path, out: Path, to: str) -> None:
    from normswap.storage import checkpoint
    from normswap.surgery.conversion import convert

    source = checkpoint.open_model(str(file), arch=arch)
    checkpoint.save(convert(source, to), out / "converted")


def child(which: str, arch: str, file: Path, to: str) -> None:
    import timm  # noqa: F401 - both sides have imported everything before the clock starts
    import torch  # noqa: F401

    if which == "ours":
        import normswap.storage.checkpoint
        import normswap.surgery.conversion  # noqa: F401
        from normswap import schemes

        schemes.names()  # finds those of other packages
        schemes.get(to)

    with tempfile.TemporaryDirectory(dir=file.parent) as out:
        start = time.perf_counter()
        cpu = time.process_time()
        (ours if which == "ours" else baseline)(arch, file, Path(out), to)
        seconds = time.perf_counter() - start
        cpu = time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", default=["resnet50"])
    parser.add_argument("--to", nargs="+", default=["skipinit"])
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("convert.md"), help="the table's file"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--child", nargs=2, metavar=("WHICH", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], args.arch[0], Path(args.child[1]), args.to[0])
        return

    from kept import markdown_head, write_table

    asked = f"--arch {' '.join(args.arch)} --to {' '.join(args.to)} --runs {args.runs}"
    columns = (
        "network",
        "to",
        "create + load + save",
        "convert",
        "time",
        "CPU time",
        "peak",
        "CPU time with imports",
    )
    lines = [
        (
            "`normswap convert` against creating, loading and saving the network, the least that"
            " any tool must do; pairs"
        ),
        (
            "of processes in turns, medians (smallest to largest). Peak memory: above the"
            " baseline's, in checkpoints."
        ),
        (
            "Times are without imports, but for the last column: the command as it is typed, over"
            " the baseline's process."
        ),
        "",
        markdown_head(*columns),
        *(row(arch, to, args.runs) for arch, to in itertools.product(args.arch, args.to)),
    ]
    write_table(args.output, "What a conversion costs", f"benchmarks/convert.py {asked}", lines)


def run(command: list[str]) -> tuple[str, float]:
    """What a process prints, and its CPU time in seconds."""
    before = os.times()
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    after = os.times()
    spent = (
        after.children_user - before.children_user + after.children_system - before.children_system
    )
    return printed, spent


def row(arch: str, to: str, runs: int) -> str:
    import timm
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.safetensors"
        save_file(dict(timm.create_model(arch).state_dict()), file)
        size = file.stat().st_size
        pairs = []
        wholes = []
        for _ in range(runs):
            pair = {}
            whole = {}
            for which in ("baseline", "ours"):
                command = [
                    sys.executable,
                    __file__,
                    "--arch",
                    arch,
                    "--to",
                    to,
                    "--child",
                    which,
                    str(file),
                ]
                printed, whole[which] = run(command)
                pair[which] = json.loads(printed)
            typed = [
                sys.executable,
                "-m",
                "normswap",
                "convert",
                str(file),
                "--arch",
                arch,
                "--to",
                to,
            ]
            _, whole["typed"] = run([*typed, "-o", f"{folder}/out", "--force"])
            pairs.append(pair)
            wholes.append(whole["typed"] / whole["baseline"])
    times = [pair["ours"]["seconds"] / pair["baseline"]["seconds"] for pair in pairs]
    cpus = [pair["ours"]["cpu"] / pair["baseline"]["cpu"] for pair in pairs]
    extra = [(pair["ours"]["peak"] - pair["baseline"]["peak"]) / size for pair in pairs]
    seconds = {
        which: statistics.median(pair[which]["seconds"] for pair in pairs)
        for which in ("baseline", "ours")
    }
    shown = (
        f"{statistics.median(v):.2f} ({min(v):.2f} to {max(v):.2f})"
        for v in (times, cpus, extra, wholes)
    )
    return (
        f"| {arch} | {to} | {seconds['baseline']:.2f} s | {seconds['ours']:.2f} s |"
        f" {' | '.join(shown)} |"
    )


if __name__ == "__main__":
    main()
