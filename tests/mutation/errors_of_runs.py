"""Planted errors: training, files, data, and what makes them cheap."""

from __future__ import annotations

from planted_error import Planted

BEST, FILES = ("tests/test_best_network.py",), ("tests/test_whole_files.py",)
HEADERS = ("tests/test_broken_records.py",)
OPENING = ("tests/test_opening.py",)
SGD = ("tests/test_engine.py::test_training_is_sgd_by_hand",)

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
        "averaged.top1 > own.top1",
        "averaged.top1 < own.top1",
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
        "--force replaces a folder with one of the two files",
        "normswap/storage/checkpoint.py",
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
        "self.sized = self.sized or asks_size(func)",
        "pass",
        OPENING,
    ),
    Planted(
        "another way is not followed",
        "normswap/graph/recording.py",
        "            main.adopt(second)\n",
        "",
        OPENING,
    ),
    Planted(
        "what is not drawn is left as memory was",
        "normswap/models/undrawn.py",
        "tensor.data.zero_()",
        "pass",
        OPENING,
    ),
    Planted(
        "buffers are not drawn either",
        "normswap/models/undrawn.py",
        "if isinstance(tensor, nn.Parameter):",
        "if isinstance(tensor, Tensor):",
        OPENING,
    ),
    Planted(
        "random buffers are made after what was not drawn",
        "normswap/models/undrawn.py",
        "return build() if _holds_more(network(built), watch.drew) else built",
        "return built",
        OPENING,
    ),
    Planted(
        "random whole numbers are overlooked",
        "normswap/models/undrawn.py",
        "(drew or tensor.is_floating_point())",
        "tensor.is_floating_point()",
        OPENING,
    ),
    Planted(
        "random attributes are overlooked",
        "normswap/models/undrawn.py",
        "(*left_out, *plain)",
        "left_out",
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
