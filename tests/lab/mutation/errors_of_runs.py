"""Planted errors: training, files, data, and what makes them cheap."""

from __future__ import annotations

from planted_error import Planted

BEST, FILES = ("tests/training/test_best_network.py",), ("tests/storage/test_atomic_write.py",)
HEADERS = ("tests/storage/test_broken_records.py",)
OPENING = ("tests/models/test_opening.py",)
SGD = ("tests/training/test_engine.py::test_training_is_sgd_by_hand",)

ERRORS = (
    Planted("best/ keeps the worst", "normswap/training/engine.py", "points > at.best", "points < at.best", BEST),
    Planted(
        "best/ keeps the latest of the best",
        "normswap/training/engine.py",
        "points > at.best",
        "points >= at.best",
        BEST,
    ),
    Planted(
        "best/ keeps the network for the average",
        "normswap/training/engine.py",
        "            network = task.ema.module\n",
        "            network = task.raw\n",
        BEST,
    ),
    Planted(
        "best/ keeps the average for the network",
        "normswap/training/engine.py",
        "averaged.top1 > plain.top1",
        "averaged.top1 < plain.top1",
        BEST,
    ),
    Planted(
        "best/ is chosen without the average",
        "normswap/training/validating.py",
        "return max(known)",
        "return known[0]",
        BEST,
    ),
    Planted(
        "best/ is chosen by the training loss",
        "normswap/training/validating.py",
        "    if known:\n",
        '    if known and row["train_loss"] is None:\n',
        BEST,
    ),
    Planted(
        "the loss that is reported is a sum of parts",
        "normswap/training/engine.py",
        "self.sum += loss.detach() / self.recipe.train.accumulate",
        "self.sum += loss.detach()",
        BEST,
    ),
    Planted(
        "the loss that is learned from is a sum of parts",
        "normswap/training/engine.py",
        "engine.backward(loss)",
        "engine.backward(loss * self.recipe.train.accumulate)",
        SGD,
    ),
    Planted(
        "the old directory goes before the new one comes",
        "normswap/storage/atomic_write.py",
        "    os.replace(place, old)\n    try:",
        "    os.replace(place, old)\n    shutil.rmtree(old)\n    try:",
        FILES,
    ),
    Planted(
        "the old directory does not come back",
        "normswap/storage/atomic_write.py",
        "        os.replace(old, place)\n        raise",
        "        raise",
        FILES,
    ),
    Planted(
        "the old directory stays",
        "normswap/storage/atomic_write.py",
        "    shutil.rmtree(old, ignore_errors=True)\n",
        "",
        FILES,
    ),
    Planted(
        "a graph comes before its weights",
        "normswap/storage/atomic_write.py",
        "(*beside, file.name)]",
        "(file.name, *beside)]",
        FILES,
    ),
    Planted(
        "new weights come while the old graph is there",
        "normswap/storage/atomic_write.py",
        "for one in reversed(made):",
        "for one in made:",
        FILES,
    ),
    Planted(
        "a file stays as private as its writer made it",
        "normswap/storage/atomic_write.py",
        "one.chmod(0o666 & ~umask())",
        "pass",
        FILES,
    ),
    Planted(
        "a graph names a file that is gone",
        "normswap/storage/atomic_write.py",
        "Path(folder) / file.name",
        'Path(folder) / f"aside{file.suffix}"',
        FILES,
    ),
    Planted(
        "weights are in the graph, too",
        "normswap/exporting/onnx_data_file.py",
        "location=data.name",
        "location=data.name, size_threshold=2**20",
        ("tests/exporting/test_exporter.py",),
    ),
    Planted(
        "weights beside the graph are for one image",
        "normswap/exporting/onnx_data_file.py",
        "onnx_file.graph(contents)",
        "onnx_file.graph(type(contents)(contents.network, contents.example))",
        ("tests/exporting/test_exporter.py",),
    ),
    Planted(
        "--force replaces a folder with one of the two files",
        "normswap/storage/network_folder.py",
        "if not (place / WEIGHTS).is_file() or not (place / CONFIG).is_file():",
        "if not (place / WEIGHTS).is_file() and not (place / CONFIG).is_file():",
        FILES,
    ),
    Planted(
        "label_offset is forgotten",
        "normswap/models/weight_files.py",
        'offset = cfg.get("label_offset") or 0',
        "offset = 0",
        FILES,
    ),
    Planted(
        "label_offset drops the last classes",
        "normswap/models/weight_files.py",
        "state[name][offset:]",
        "state[name][:-offset]",
        FILES,
    ),
    Planted(
        "crop_pct is forgotten",
        "normswap/images/datasets.py",
        '"interpolation", "crop_pct", "crop_mode")',
        '"interpolation", "crop_mode")',
        FILES,
    ),
    Planted(
        "sidecars round where timm takes the floor",
        "normswap/exporting/sidecar.py",
        'math.floor(side / known["crop_pct"])',
        'round(side / known["crop_pct"])',
        FILES,
    ),
    Planted(
        "no forward asks for a size",
        "normswap/graph/recorder.py",
        "self.size_dependent = self.size_dependent or asks_size(func)",
        "pass",
        OPENING,
    ),
    Planted(
        "another way is not followed",
        "normswap/graph/recording.py",
        "            main.add_alternative(second)\n",
        "",
        OPENING,
    ),
    Planted(
        "the result is made in float64 as a whole",
        "normswap/surgery/running.py",
        "    lent: dict[nn.Module, dict[str, Tensor]] = {}\n",
        "    lent: dict[nn.Module, dict[str, Tensor]] = {}\n"
        "    whole = to_double(model)\n    whole.train(whole.training)\n",
        OPENING,
    ),
    Planted(
        "threads spin whatever the user says",
        "normswap/cli/app.py",
        'os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")',
        'os.environ["OMP_WAIT_POLICY"] = "PASSIVE"',
        OPENING,
    ),
    Planted(
        "threads spin",
        "normswap/cli/app.py",
        '    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")\n',
        "",
        OPENING,
    ),
    Planted(
        "fields of a header may be of any type",
        "normswap/storage/header_record.py",
        "    if missing or wrong:",
        "    if missing:",
        HEADERS,
    ),
    Planted(
        "a report may be of any form",
        "normswap/storage/header_record.py",
        "except (KeyError, TypeError, AttributeError) as error:",
        "except AttributeError as error:",
        HEADERS,
    ),
)
