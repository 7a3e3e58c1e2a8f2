"""Short trials: who goes on, with equal updates and within the minutes; an image is trained on or
measured on.
"""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from support.command_line import Capture, refused, run_json
from support.small_trainings import CLASSES, network
from torch import nn

from normswap.analysis.advice import Advice
from normswap.cli.app import main
from normswap.cli.commands import advise_command
from normswap.errors import OptionError
from normswap.images.accuracy import Evaluation
from normswap.storage import checkpoint
from normswap.surgery.network import Network
from normswap.training import assembly, recipe_files, trials
from normswap.training.assembly import Share
from normswap.training.trials import TargetTrial, Trials


@pytest.mark.parametrize("parts", [("",), ("train", "test")])
def test_no_image_is_both_trained_on_and_measured_on(
    tmp_path: Path, parts: tuple[str, ...]
) -> None:
    """Each image has a color of its own, which no crop or flip changes."""
    for number, (part, label, index) in enumerate(itertools.product(parts, CLASSES, range(4))):
        (folder := tmp_path / part / label).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (2 * number, 0, 0)).save(folder / f"{index}.png")

    tried = Trials(Network(network()), str(tmp_path), 8, 1, "cpu", lambda *_: None)
    batches = [tried.images.batches(Share(), 0, 30), tried.to_fit, tried.held_out]
    trained, fitted, measured = (
        {f"{x[0, 0, 0]:.3f}" for images, _ in loader for x in images} for loader in batches
    )

    assert fitted <= trained
    assert not trained & measured
    assert (len(trained), len(measured)) == ((40, 40) if len(parts) == 2 else (20, 20))


def test_the_better_half_goes_on_at_its_best_rate_and_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An update takes 0.1 s, an evaluation 0.5 s; `e` is the best at first, and `d` in the end."""
    clock = [0.0]
    tried = Trials.__new__(Trials)
    monkeypatch.setattr(trials.time, "monotonic", lambda: clock[0])
    state: dict[str, Any] = {
        "minutes": 3,
        "begun": 0.0,
        "updating": 0.1,
        "evaluating": 0.5,
        "progress": max,
    }
    tried.__dict__.update(state, trials=[])

    def trial(advice: Advice, lr: float, updates: int) -> TargetTrial:
        clock[0] += 0.1 * updates + 0.5
        loss = (
            9
            - "abcde".index(advice.scheme)
            + 1000 * abs(lr - 8e-4)
            + 2.5 * (advice.scheme == "e" and updates > 50)
        )
        tried.trials.append(TargetTrial(advice, lr, updates, 50, 9, 50, loss, torch.zeros(8)))
        return tried.trials[-1]

    monkeypatch.setattr(tried, "_trial", trial)
    ended = tried.run([Advice(name, name, "", "", True) for name in "abcde"])
    rounds = [
        list(group) for _, group in itertools.groupby(tried.trials, lambda trial: trial.updates)
    ]
    assert [len(group) for group in rounds] == [15, 3, 2]
    assert [group[0].updates for group in rounds] == sorted(group[0].updates for group in rounds)
    assert [trial.advice.scheme for trial in ended] == ["d", "c", "e", "b", "a"]
    assert {trial.lr for trial in ended} == {8e-4}
    assert 120 < clock[0] <= 0.8 * 3 * 60


def ended_within(minutes: float, monkeypatch: pytest.MonkeyPatch) -> list[TargetTrial]:
    """The trials of three targets, of which an update takes 0.1 s, and an evaluation 0.9 s."""
    clock = [0.0]
    monkeypatch.setattr(trials.time, "monotonic", lambda: clock[0])
    tried = Trials.__new__(Trials)
    tried.__dict__.update(minutes=minutes, begun=0.0, updating=0.1, evaluating=0.9, trials=[])
    tried.progress = lambda *_: None

    def trial(advice: Advice, lr: float, updates: int) -> TargetTrial:
        clock[0] += 0.1 * updates + 0.9
        return ended(advice.target, 0.5, updates=updates, lr=lr)

    monkeypatch.setattr(tried, "_trial", trial)
    return tried.run([Advice(name, name, "", "", True) for name in "abc"])


def test_the_minutes_that_an_error_asks_for_are_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a tenth of a minute."""
    with pytest.raises(OptionError, match="too short") as caught:
        ended_within(0.1, monkeypatch)
    asked = re.search(r"Give minutes=(\S+) or more", str(caught.value))
    assert asked is not None
    minutes = float(asked[1])

    assert len(ended_within(minutes, monkeypatch)) == 3

    with pytest.raises(OptionError, match="too short"):
        ended_within(minutes - 0.1, monkeypatch)


def test_only_a_network_with_batchnorm_is_compared_with_batchnorm() -> None:
    references = trials.references(network())

    assert [advice.target for advice in references] == ["batchnorm", "batchnorm in eval mode"]
    assert [advice.scheme for advice in references] == ["batchnorm", "batchnorm"]
    assert trials.references(network("skipinit")) == []


class Reached(Exception):
    """The training has been given all that it needs."""


@pytest.mark.parametrize(
    ("advice", "converts"),
    [
        (Advice("batchnorm", "batchnorm", "", "", True), {"convert": None}),
        (
            Advice("skipinit", "skipinit --alpha 0.5", "", "", True, {"alpha": 0.5}),
            {"convert.to": "skipinit", "convert.calibrate": False, "convert.options.alpha": 0.5},
        ),
        (
            Advice("groupnorm", "groupnorm", "", "", False, {"groups": 2, "relative_eps": 0}),
            {
                "convert.to": "groupnorm",
                "convert.calibrate": True,
                "convert.options.groups": 2,
                "convert.options.relative_eps": 0,
            },
        ),
    ],
    ids=lambda each: each.target if isinstance(each, Advice) else "",
)
def test_a_trial_trains_by_the_recipe_that_finetune_takes(
    advice: Advice, converts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 44 images in batches of 8, 30 updates are six epochs, and a tenth of them is warm-up."""
    given: dict[str, Any] = {}

    def task(*values: Any, **options: Any) -> None:
        given.update(zip(("subject", "images", "recipe", "engine"), values, strict=True), **options)
        raise Reached

    monkeypatch.setattr(assembly, "Task", task)
    source = Network(network())
    converted = Network(network("skipinit"))
    images: Any = SimpleNamespace(images=range(44))
    tried = Trials.__new__(Trials)
    tried.__dict__.update(source=source, batch_size=8, device="cpu", images=images)

    with pytest.raises(Reached):
        tried._updated(advice, converted, 0.003, 30)

    keys = recipe_files.flat(given["recipe"])
    usual = recipe_files.flat(recipe_files.load_recipe("recover_unlabelled"))
    expected = {name: value for name, value in usual.items() if name != "convert.options"}
    if advice.scheme == "batchnorm":
        expected = {name: value for name, value in usual.items() if "convert." not in name}
    expected |= converts
    expected |= {"distill.weight": 0.5, "data.batch_size": 8, "optim.lr": 0.003}
    expected |= {"train.epochs": 6.0, "schedule.warmup": pytest.approx(0.6)}
    assert keys == expected
    # The teacher is a copy of the source, and no network of this process is compared or saved.
    subject = given["subject"]
    assert subject.network is converted
    assert subject.source is not source.module
    torch.testing.assert_close(subject.source.state_dict(), source.module.state_dict())
    assert given["images"] is images
    assert given["engine"].device == torch.device("cpu")
    assert given["validates"] is False


def test_a_trial_tells_what_its_network_reached_before_and_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network is measured once before training, and after each trial."""
    tried = Trials.__new__(Trials)
    tried.__dict__.update(source=Network(network()), to_fit=None, networks={}, trials=[])
    measured = [Evaluation(10.0 + i, 50.0 + i, 3.0 - i, 20, 1.0) for i in range(3)]
    answers = [torch.full((20,), i) for i in range(3)]
    results = iter(zip(measured, answers, strict=True))
    trained: list[tuple[str, float, int]] = []

    def updated(advice: Advice, network: Network, lr: float, updates: int) -> nn.Module:
        trained.append((advice.target, lr, updates))
        return network.module

    monkeypatch.setattr(tried, "_classified", lambda _model: next(results))
    monkeypatch.setattr(tried, "_updated", updated)
    advice = Advice("skipinit", "skipinit", "", "", True)

    trials_done = [tried._trial(advice, lr, updates) for lr, updates in ((0.01, 2), (0.02, 3))]

    assert trained == [("skipinit", 0.01, 2), ("skipinit", 0.02, 3)]
    assert tried.trials == trials_done
    for number, (trial, given) in enumerate(zip(trials_done, trained, strict=True), 1):
        fields = dict(vars(trial))
        assert torch.equal(fields.pop("answers"), answers[number])
        assert fields == {
            "advice": advice,
            "lr": given[1],
            "updates": given[2],
            "at_once": 10.0,
            "loss_at_once": 3.0,
            "after": 10.0 + number,
            "loss": 3.0 - number,
        }


@pytest.mark.parametrize(("right", "level"), [(96, True), (95, True), (94, False)])
def test_a_trial_is_level_if_its_lead_is_within_chance(right: int, level: bool) -> None:
    """16 of 100 answers differ, so the best may lead by four images."""
    answers = torch.zeros(100)
    others = answers.clone()
    others[:16] = 1
    advice = Advice("a", "a", "", "", True)
    best = TargetTrial(advice, 2e-4, 9, 50, 1.0, 99.0, 0.5, answers)
    trial = TargetTrial(advice, 8e-4, 8, 40, 1.5, right, 0.75, others)

    assert trial.record(best) == {
        "target": "a",
        "lr": 8e-4,
        "updates": 8,
        "at_once": 40,
        "after": right,
        "loss": 0.75,
        "level": level,
        "compared": False,
    }
    assert best.record(best)["compared"]


def ended(target: str, loss: float, *, updates: int = 9, lr: float = 2e-4) -> TargetTrial:
    advice = Advice(target, target, "", "", True)
    return TargetTrial(advice, lr, updates, 50, 1.0, 50, loss, torch.zeros(8))


@pytest.mark.parametrize(
    ("trials_ended", "words"),
    [
        ([ended("a", 0.5), ended("batchnorm", 0.6)], []),
        ([ended("a", 1.5), ended("batchnorm", 1.6)], ["do not train"]),
        ([ended("a", 1.5), ended("batchnorm", 0.6)], ["batchnorm ends with a lower loss"]),
        ([ended("a", 0.5, lr=8e-4)], ["edge"]),
        ([ended("a", 0.5), ended("b", 0.4, updates=3)], ["only ways with 9 updates"]),
    ],
)
def test_what_trials_do_not_show_is_said(trials_ended: list[TargetTrial], words: list[str]) -> None:
    warnings = advise_command._warnings(trials_ended, trials_ended[0])

    assert len(warnings) == len(words)
    for word, warning in zip(words, warnings, strict=True):
        assert word in warning


def test_norms_in_eval_mode_keep_their_statistics_while_gammas_learn() -> None:
    model = network()
    hook = model.register_forward_pre_hook(trials._norms_to_eval)
    before = model.bn1.running_mean.clone()

    model.train()(torch.randn(4, 3, 32, 32)).sum().backward()
    hook.remove()

    assert torch.equal(model.bn1.running_mean, before)
    assert model.bn1.weight.grad is not None


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A network beside images of its classes, in the working directory: one color for each."""
    monkeypatch.chdir(tmp_path)
    for number, label in enumerate(CLASSES):
        (tmp_path / "images" / label).mkdir(parents=True)
        for index in range(4):
            color = (25 * number, 5 * index, 250 - 25 * number)
            Image.new("RGB", (32, 32), color).save(tmp_path / "images" / label / f"{index}.png")
    return str(checkpoint.save(network(), tmp_path / "net"))


@pytest.mark.slow
def test_trials_end_in_commands_that_can_be_typed(
    model: str, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock takes a tenth of a second."""
    clock = itertools.count(0, 0.1)
    monkeypatch.setattr(trials, "_RATES", (50,))
    monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    options = "--input-size 3,32,32 --data images --batch-size 8 --minutes 0.8 --device cpu"
    how = ("advise", model, *options.split())
    body = run_json(capfd, *how)
    measured = body["measured"]
    targets = [body["choose"], *body["others"]]

    assert measured["seconds"] <= 1.2 * 48
    assert [target["target"] for target in targets] == [
        trial["target"] for trial in measured["ended"] if trial["target"] not in trials.REFERENCES
    ]
    compared = [trial for trial in measured["ended"] if trial["compared"]]
    assert len({trial["updates"] for trial in compared}) == 1
    assert {*trials.REFERENCES} < {trial["target"] for trial in compared}
    assert {trial["target"] for trial in measured["ended"]} == {
        "skipinit",
        "groupnorm",
        "groupnorm --relative-eps 0",
        "frozen-bn",
        "tune",
        "batchnorm",
        "batchnorm in eval mode",
    }
    assert main(how) == 0

    lines = capfd.readouterr().out.splitlines()
    commands = [
        shlex.split(line)[2:]
        for line in lines
        if line.startswith(("run: normswap ", "next: normswap "))
    ]

    assert [words[0] for words in commands] == ["convert"] * 5 + ["finetune"]

    for number, words in enumerate(commands):
        more = (
            []
            if words[0] == "convert"
            else ["train.epochs=1", "schedule.warmup=0", "--device", "cpu"]
        )
        assert main([*words, *more, "-o", f"out{number}"]) == 0


def test_no_training_is_named_where_every_way_ends_worse(
    model: str, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_gained(_network: Network, possible: list[Advice], *_: object, **__: object) -> Any:
        return None, possible, []

    monkeypatch.setattr(advise_command, "_measure", nothing_gained)

    assert main(["advise", model, "--input-size", "3,32,32", "--data", "images"]) == 0

    assert "finetune" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--minutes 3", "--minutes: nothing is tried without images. Give --data IMAGES"),
        ("--data images --deploy", "--data cannot go with --deploy"),
        ("--data images --minutes 0", "--minutes 0.0: it is a positive number"),
        ("--data images --minutes nan", "--minutes nan: it is a positive number"),
        (
            "--data images",
            (
                "images gives 20 images to train on, and 20 others to measure on: trials need 64"
                " and 20"
            ),
        ),
        ("--data images/class0", "labels are needed"),
        (
            "--data images --batch-size 8 --minutes 0.001",
            "--minutes 0.001 is too short: an update takes",
        ),
    ],
)
def test_what_cannot_be_tried_is_one_line(
    options: str, said: str, model: str, tmp_path: Path, capfd: Capture
) -> None:
    refused(
        ("advise", model, "--input-size", "3,32,32", *options.split()), (said,), tmp_path, capfd
    )
