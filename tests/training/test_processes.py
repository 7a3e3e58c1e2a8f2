"""Several processes: who each is, what torchrun, srun and `accelerate launch` start, and the norms
that they share.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support import needs
from support.small_trainings import network, recipe, train, write_images
from torch import nn

import normswap
from normswap import shipped
from normswap.errors import OptionError
from normswap.layers.site_norm import SiteNorm
from normswap.storage import checkpoint
from normswap.training import assembly
from normswap.training.assembly import read_slurm

STARTS = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID")


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variables of a job; nothing that is set afterwards stays."""
    monkeypatch.setattr(os, "environ", {**os.environ})
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in STARTS.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_task_of_srun_is_one_of_several(slurm: pytest.MonkeyPatch) -> None:
    slurm.setenv("SLURM_STEP_ID", "0")
    slurm.setenv("MASTER_PORT", "29500")
    with pytest.raises(OptionError, match="srun has started 8 processes: no MASTER_ADDR"):
        read_slurm()
    slurm.setenv("MASTER_ADDR", "node1")
    read_slurm()
    assert [os.environ[name] for name in NAMES[:3]] == ["5", "1", "8"]


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, None),  # the batch script itself
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}, None),  # a task by itself
        ({"SLURM_STEP_ID": "0", "RANK": "1"}, "1"),  # what torchrun starts in a task
    ],
)
def test_others_are_no_tasks_of_srun(
    slurm: pytest.MonkeyPatch, variables: dict[str, str], rank: str | None
) -> None:
    for name, value in variables.items():
        slurm.setenv(name, value)
    read_slurm()
    assert os.environ.get("RANK") == rank


def test_norms_that_torch_cannot_synchronize_are_refused() -> None:
    with pytest.raises(OptionError, match="needs GPUs"):
        assembly.synchronized(nn.BatchNorm2d(3), torch.device("cpu"))
    ghost = nn.Sequential(SiteNorm(3, eps=1e-5, momentum=0.1, ghost=4, act=None))
    with pytest.raises(OptionError, match="does not fit the norm 0"):
        assembly.synchronized(ghost, torch.device("cuda"))


def test_a_process_by_itself_has_nothing_to_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "synchronized", lambda *_: pytest.fail("there is one process"))
    images = write_images(tmp_path / "images", 2)
    train(network(), recipe(images, train={"epochs": 0.5, "sync_bn": True}), tmp_path / "out")


SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done  # its own options
export SLURM_STEP_ID=0
for process in 0 1; do
    SLURM_PROCID=$process SLURM_LOCALID=$process "$@" & ids="$ids $!"
    echo $! > "$WORK/process-$process"
done
for id in $ids; do wait "$id" || exit 1; done
"""
SHORT = """
summary: two epochs of two updates
model: {name: MODEL}
convert: {to: skipinit}
data: {batch_size: 8, workers: 0, augment: {hflip: 0.0}}
optim: {lr: 0.001}
train: {epochs: 2}
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with images, in folders by the network's classes, and a recipe."""
    names = checkpoint.open_model(str(shipped.FOLDER)).pretrained_cfg["label_names"]
    for part, per_class in (("train", 2), ("val", 1)):
        write_images(tmp_path / "images" / part, per_class, names)
    (tmp_path / "short.yaml").write_text(
        SHORT.replace("MODEL", str(shipped.FOLDER)), encoding="utf-8"
    )
    return tmp_path


def words(work: Path) -> list[str]:
    return [
        f"--recipe={work / 'short.yaml'}",
        f"--data={work / 'images'}",
        "--track=none",
        "--device=cpu",
    ]


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def assert_as_one_process(work: Path, out: Path) -> None:
    plan = normswap.load_recipe(work / "short.yaml", [f"data.root={work / 'images'}"])
    alone = train(checkpoint.open_model(str(shipped.FOLDER)), plan, work / "one")
    rows = [
        line.split(",")
        for line in (out / "metrics.csv").read_text(encoding="utf-8").splitlines()[2:]
    ]
    assert [float(row[3]) for row in rows] == pytest.approx(
        [row["train_loss"] for row in alone.rows[1:]], rel=1e-4
    )


SCONTROL = """#!/bin/sh
case $1 in
    show) echo localhost; echo localhost;;
    *) echo "$@" >> "$WORK/asked";;
esac
"""
SCANCEL = """#!/bin/sh
echo scancel "$@" >> "$WORK/asked"
for id in $(cat "$WORK"/process-*); do kill -TERM "$id"; done
"""


def slurm_job(work: Path, *more: str) -> tuple[list[str], dict[str, str]]:
    """The command and the variables of a job, with an srun, scontrol and scancel of our own."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}.items():
        (work / name).write_text(text, encoding="utf-8")
        (work / name).chmod(0o755)
    variables = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS": "2",
        "WORK": str(work),
        "PATH": f"{work}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    script = str(shipped.recipes() / "finetune.sbatch")
    return ["bash", script, *words(work), "-o", str(work / "run"), *more], variables


@pytest.mark.slow
def test_the_sbatch_file_trains_where_a_shell_has_slurms_variables(work: Path) -> None:
    job, slurm = slurm_job(work)

    assert run(job, **slurm).count("written to") == 1  # by one process
    assert "continuing at update 4 of 4" in run(job, **slurm)
    assert_as_one_process(work, work / "run")
    assert not (work / "asked").exists(), "a job that is done is not queued again"


@pytest.mark.slow
def test_a_job_that_is_asked_to_stop_saves_and_is_queued_again(work: Path) -> None:
    """SLURM sends SIGTERM to the script alone; nobody but the script tells the processes."""
    job, slurm = slurm_job(work, "train.epochs=500")
    process = subprocess.Popen(
        job, env={**os.environ, **slurm}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    while process.poll() is None and not (work / "run/state/run.pt").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)

    assert process.returncode == 0, said
    job_id = slurm["SLURM_JOB_ID"]
    asked = (work / "asked").read_text(encoding="utf-8").splitlines()
    assert asked == [f"scancel --signal=TERM {job_id}", f"requeue {job_id}"]

    # The next start of the job goes on.
    again = subprocess.Popen(
        job, env={**os.environ, **slurm}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert again.stdout is not None
    assert any(b"continuing at update" in line for line in again.stdout)
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=120)


def test_skypilot_reads_its_task(work: Path) -> None:
    sky = needs.package("sky")
    task = sky.Task.from_yaml(str(shipped.recipes() / "finetune.sky.yaml"))
    assert "--resume auto" in task.run
    assert "/runs" in task.storage_mounts


HF = """#!/bin/sh
# As `hf jobs uv run`, but the job is only shown.
shift 3
exec "$PYTHON" -m huggingface_hub.cli.hf jobs uv run --dry-run "$@"
"""


@pytest.mark.slow
def test_the_hub_reads_the_job_of_the_zoo(tmp_path: Path) -> None:
    (tmp_path / "hf").write_text(HF, encoding="utf-8")
    (tmp_path / "hf").chmod(0o755)
    variables = {
        "PYTHON": sys.executable,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_TOKEN": "hf_x",
    }

    said = run(["bash", str(shipped.recipes() / "zoo_jobs.sh"), "me", "--rows", "r*"], **variables)

    assert "--to me -o /zoo --rows" in said
    assert "hf://buckets/me/zoo:/zoo" in said
    assert "dry run" in said


def test_the_launchers_are_short() -> None:
    for name in ("finetune.sbatch", "finetune.sky.yaml", "zoo_jobs.sh"):
        assert len((shipped.recipes() / name).read_text(encoding="utf-8").splitlines()) <= 30, name


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "accelerate": [
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes=2",
        "--main_process_port=29533",
        "--mixed_precision=no",
        "--dynamo_backend=no",
        "--num_cpu_threads_per_process=1",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_two_processes_train_as_one(name: str, work: Path) -> None:
    finetune = ["-m", "normswap", "finetune", *words(work), f"--output={work / 'run'}"]
    run([sys.executable, "-m", *LAUNCHERS[name], *finetune], OMP_NUM_THREADS="1")
    assert_as_one_process(work, work / "run")


@pytest.mark.slow
def test_processes_that_read_other_images_do_not_begin(work: Path) -> None:
    """A machine's copy may lack files. Its shares would be of another order, or of another length,
    for which the others wait.
    """
    shutil.copytree(work / "images", work / "copy")
    next((work / "copy" / "train").rglob("*.*")).unlink()
    place = "['images', 'copy'][int(os.environ['RANK'])]"
    call = f"main(['finetune', '--recipe=short.yaml', '--data', {place}, '-o', 'run'])"
    program = work / "program.py"
    program.write_text(
        f"import os, sys\nfrom normswap.cli.app import main\nsys.exit({call})\n", encoding="utf-8"
    )

    done = subprocess.run(
        [sys.executable, "-m", *LAUNCHERS["torchrun"], str(program)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert done.returncode
    assert "the processes do not read the same images: those of rank 1 are not" in done.stderr
    assert "exitcode  : 2" in done.stderr
    assert not (work / "run").exists()
