"""Two machines that share no disk: network namespaces with a cable between them, a torchrun and a folder in each."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trained import command, network, recipe, train, weights, write_images

import normswap
from normswap import demo_files, shipped
from normswap.storage import checkpoint

pytestmark = pytest.mark.slow

BUSY: dict[str, Any] = {
    "data": {"augment": {"hflip": 0.5, "padding": 4, "mixup": 0.2, "erase": 0.2}},
    "train": {"epochs": 3, "ema": {"decay": 0.9}, "checkpoint": 2},
    "optim": {"clip": {"mode": "agc", "value": 0.1}},
}


class Machine:
    """A network namespace, named as nothing else is, with an address and a folder."""

    def __init__(self, number: int, folder: Path) -> None:
        self.host, self.address = f"machine{number}", f"10.77.0.{number}"
        self.name, self.folder = f"normswap-{os.getpid()}-{number}", folder / self.host
        self.folder.mkdir()
        self.names = Path("/etc/netns") / self.name  # laid over /etc by `ip netns exec`

    def start(self, images: Path, *words: object, restarts: int = 0, out: Path | None = None) -> subprocess.Popen[str]:
        """Start its torchrun, which begins when both have."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=machine1:29400", f"--max-restarts={restarts}"]
        return self.run([*torchrun, *command(images, out or self.folder / "run", "skipinit", *words)[1:]])

    def run(self, words: list[str]) -> subprocess.Popen[str]:
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.host]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *named, *words], env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def plug_in(self) -> None:
        """Bring its devices up, and let it know itself and the other by name."""
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", self.name, "link", "set", device, "up")
        self.names.mkdir(parents=True)
        (self.names / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 machine1\n10.77.0.2 machine2\n")
        (self.names / "resolv.conf").write_text("")  # or each name that nobody has costs seconds

    def lose_power(self) -> None:
        """Kill all that runs there."""
        for process in ip("netns", "pids", self.name).split():
            os.kill(int(process), signal.SIGKILL)


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    both = [Machine(number, tmp_path) for number in (1, 2)]
    try:
        for machine in both:
            ip("netns", "add", machine.name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network namespaces here")
    try:
        ends = [("name", "eth0", "netns", machine.name) for machine in both]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for machine in both:
            machine.plug_in()
        yield both
    finally:
        for machine in both:
            machine.lose_power()
            ip("netns", "del", machine.name)
            shutil.rmtree(machine.names, ignore_errors=True)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data") / "images", 3)  # three updates per epoch


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes on this machine."""
    return two_processes(images, tmp_path_factory.mktemp("runs") / "whole", BUSY)


def two_processes(images: Path, out: Path, parts: dict[str, Any]) -> Path:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = command(images, out, "skipinit", json.dumps(parts))[1:]
    subprocess.run([*torchrun, *words], check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return out


def ended(*processes: subprocess.Popen[str], well: bool = True) -> str:
    """What they said, when all have ended, all well or none."""
    texts = [process.communicate(timeout=120)[1] for process in processes]
    assert all((process.returncode == 0) == well for process in processes), "\n=====\n".join(texts)
    return "".join(texts)


def losses(run: Path) -> list[list[str]]:
    """metrics.csv without what a clock says."""
    rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    clock = {rows[0].index("images_per_s"), rows[0].index("seconds")}
    return [[cell for at, cell in enumerate(row) if at not in clock] for row in rows]


def assert_same(one: Path, two: Path) -> None:
    assert losses(one) == losses(two)
    for name, tensor in weights(one / "last").items():
        assert torch.equal(tensor, weights(two / "last")[name]), name


def cut_power(machines: list[Machine], images: Path, **options: Any) -> subprocess.Popen[str]:
    """Start a run on both, and end the second machine in the middle of it; returns what is left on the first."""
    left, gone = [machine.start(images, json.dumps(BUSY), "--nap", 0.3, **options) for machine in machines]
    while not (machines[0].folder / "run/best").exists() and left.poll() is None:
        time.sleep(0.02)
    time.sleep(1)
    machines[1].lose_power()
    gone.communicate()
    return left


def test_two_machines_are_as_two_processes_and_as_one(machines: list[Machine], images: Path, tmp_path: Path) -> None:
    """In float64, so that only the order of additions differs."""
    parts = {**BUSY, "double": True}
    ended(*(machine.start(images, json.dumps(parts)) for machine in machines))
    run = machines[0].folder / "run"
    assert not (machines[1].folder / "run").exists()
    two_processes(images, tmp_path / "two", parts)
    train(network("skipinit", double=True), recipe(images, **BUSY), tmp_path / "one")
    assert len(losses(run)) == 5  # a header, and four rows
    assert losses(run) == losses(tmp_path / "two") == losses(tmp_path / "one")  # six digits
    for name, tensor in weights(run / "last").items():
        assert torch.allclose(tensor, weights(tmp_path / "two/last")[name], rtol=1e-12, atol=1e-14), name
        assert torch.allclose(tensor, weights(tmp_path / "one/last")[name], rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("moved", [False, True])
def test_a_machine_that_dies_ends_the_run_which_is_continued(
    machines: list[Machine], images: Path, whole: Path, moved: bool
) -> None:
    """`moved`: the folder with the state is then on the machine that is not the first any more."""
    assert "another process is gone" in ended(cut_power(machines, images), well=False)
    folders = [machine.folder / "run" for machine in machines]
    assert len(losses(folders[0])) < len(losses(whole))
    pairs = zip(machines, folders[:: -1 if moved else 1], strict=True)
    ended(*(machine.start(images, json.dumps(BUSY), "--resume", "auto", out=folder) for machine, folder in pairs))
    assert_same(whole, folders[1 if moved else 0])


def test_a_machine_that_comes_back_joins_the_run(
    machines: list[Machine], images: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # torch 2.14's torchrun does not tell it the address
    left = cut_power(machines, images, restarts=1)
    ended(left, machines[1].start(images, json.dumps(BUSY), restarts=1))
    assert_same(whole, machines[0].folder / "run")


def test_a_process_that_dies_is_started_again(machines: list[Machine], images: Path, whole: Path) -> None:
    """By its own torchrun; the other one starts its process again because it failed, or because it is waited for."""
    ended(*(machine.start(images, json.dumps(BUSY), "--kill", 5, restarts=1) for machine in machines))
    assert_same(whole, machines[0].folder / "run")


SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done  # its own options
export SLURM_STEP_ID=0
for process in 0 1; do SLURM_PROCID=$process SLURM_LOCALID=$process "$@" & ids="$ids $!"; done
for id in $ids; do wait "$id" || exit 1; done
"""
SHORT = """
summary: two epochs of two updates
data: {batch_size: 8, workers: 0, augment: {hflip: 0.0}}
train: {epochs: 2, sync_bn: true}
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with images and a recipe."""
    for part, per_class in (("train", 2), ("val", 1)):
        write_images(tmp_path / "images" / part, per_class)
    (tmp_path / "short.yaml").write_text(SHORT)
    return tmp_path


def test_the_sbatch_file_trains_where_a_shell_has_slurms_variables(work: Path) -> None:
    """With an srun and an scontrol of the test's own."""
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho localhost\necho localhost\n")):
        (work / name).write_text(text)
        (work / name).chmod(0o755)
    path = f"{work}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "2", "PATH": path}
    job = ["bash", str(shipped.recipes() / "finetune.sbatch"), *map(str, words(work)), "-o", str(work / "run")]
    first, again = (subprocess.run(job, env={**os.environ, **slurm}, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("written to") == 1  # by one process
    assert "continuing at update 4 of 4" in again.stdout + again.stderr
    assert_as_one_process(work, work / "run")


def test_accelerate_launch_trains_on_two_machines(machines: list[Machine], work: Path) -> None:
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_machines=2",
        "--num_processes=2",
    ]
    launch += ["--main_process_ip=machine1", "--main_process_port=29500", "--mixed_precision=no", "--dynamo_backend=no"]
    launch += ["--num_cpu_threads_per_process=1"]
    finetune = ["-m", "normswap", "finetune", *map(str, words(work))]
    ended(
        *(machine.run([*launch, f"--machine_rank={rank}", *finetune, f"--output={machine.folder / 'run'}"])
        for rank, machine in enumerate(machines))
    )  # fmt: skip
    assert_as_one_process(work, machines[0].folder / "run")


def words(work: Path) -> list[object]:
    return [
        demo_files.FOLDER,
        f"--recipe={work / 'short.yaml'}",
        f"--data={work / 'images'}",
        "--track=none",
        "--device=cpu",
    ]


def assert_as_one_process(work: Path, run: Path) -> None:
    plan = normswap.load_recipe(work / "short.yaml", [f"data.root={work / 'images'}"])
    one = train(checkpoint.open_model(str(demo_files.FOLDER)), plan, work / "one")
    assert [float(row[3]) for row in losses(run)[2:]] == pytest.approx(
        [row["train_loss"] for row in one.rows[1:]], rel=1e-4
    )
