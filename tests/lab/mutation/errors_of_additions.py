"""Planted errors: in what was added last. Roads of convert, merged branches, measured norms, images of the doctor ..."""

from __future__ import annotations

from planted_error import Planted

BRANCHES, MEASURED = "tests/folding/test_branches.py::", "tests/schemes/test_measured_batchnorm.py::"
DOCTOR = "tests/diagnosis/test_doctor_on_images.py::"
DRIFT = "normswap/diagnosis/drift.py"

ERRORS = (
    Planted("images that can be read once are read by the first step alone", "normswap/surgery/conversion.py",
            "if len(steps) > 1 and isinstance(images, Iterator):", "if len(steps) > 2 and isinstance(images, Iterator):",
            ("tests/calibration/test_norm_estimate.py::test_images_that_can_be_read_once_are_kept_for_each_step",)),
    Planted("a sum has its input once, however often it is a term", "normswap/layers/merged.py",
            "skips * (scale - 1)", "(scale - 1)", (BRANCHES + "test_one_convolution",)),
    Planted("an input's channel in its group is found by division", "normswap/layers/merged.py",
            "channel % weight.shape[1]] += scale", "channel // main.groups] += scale", (BRANCHES + "test_one_convolution",)),
    Planted("branches behind two DropPaths merge", "normswap/folding/branches.py",
            "    arms = [arm for arm in arms if arm.barrier in (None, *barriers[:1])]\n", "", ("tests/folding/test_branches.py",)),
    Planted("--only is forgotten where branches merge", "normswap/surgery/scheme_path.py",
            'schemes.chosen("merged-branches", part)', 'schemes.chosen("merged-branches", {})',
            (BRANCHES + "test_part_of_a_network",)),
    Planted("--only is forgotten where norms are added", "normswap/surgery/scheme_path.py", '{**part, "where"', '{"where"',
            (MEASURED + "test_where_they_are_put",)),
    Planted("the doctor's batches are of one class each", "normswap/diagnosis/image_batches.py",
            "torch.randperm(len(self.images), generator=torch.Generator().manual_seed(0))", "torch.arange(len(self.images))",
            (DOCTOR + "test_modes_agree_more_in_larger_batches",)),
    Planted("the error of one part is taken for that of their mean", DRIFT, "(parts.std(0) / PARTS**0.5)", "parts.std(0)",
            (DOCTOR + "test_the_error_is_that_of_a_mean_over_parts",)),
    Planted("chance is not taken off what means are off", DRIFT, "shifted = self.mean - _CHANCE * self.error > _MEAN",
            "shifted = self.mean > _MEAN", (DOCTOR + "test_chance_is_taken_off_what_a_norm_is_off",)),
    Planted("modes are compared on other images", "normswap/diagnosis/eval_and_train.py", "answers[: len(alone)]",
            "answers[-len(alone) :]", (DOCTOR + "test_modes_are_compared_image_by_image",)),
    Planted("norms that were added are in training", "normswap/schemes/steps/measured_batchnorm.py",
            "norm.train(\n            source.training\n        )", "norm.train(True)", (MEASURED + "test_where_they_are_put",)),
    Planted("a batch weighs at most as much as all before it", "normswap/calibration/channel_moments.py",
            "self.mean += apart * values.shape[1] / count",
            "self.mean += apart * values.shape[1] / max(count, 2 * values.shape[1] * (self.count > 0))",
            (MEASURED + "test_batches_that_grow_weigh_by_their_values",)),
    Planted("a norm behind an identity is overlooked", "normswap/schemes/parts/norm_places.py",
            "        if builder.is_identity(one):\n            ahead += traced.users[one]\n    return False", "    return False",
            (MEASURED + "test_a_norm_behind_an_identity_is_enough",)),
    Planted("an architecture's norms are in training whatever the network is", "normswap/surgery/likeness.py",
            ".train(network.module.training)", ".train()",
            (MEASURED + "test_like_an_architecture_whose_names_are_others",)),
    Planted("biases go to the first channels of the norm", "normswap/surgery/likeness.py",
            "shifts[norm][absorption.channels] += bias", "shifts[norm][: len(bias)] += bias",
            (MEASURED + "test_a_norm_of_two_convolutions_gets_the_bias_of_each_in_its_place",)),
    Planted("LiteRT's ranges are those of the last image", "normswap/exporting/litert_int8.py",
            "before = total.setdefault(name, values)", "before = values",
            ("tests/exporting/test_litert_refusals.py::test_ranges_are_those_of_all_images",)),
    Planted("a loader is read beside the user's default device", "normswap/models/default_device.py",
            "            with around():\n                batch = next(iterator)", "            batch = next(iterator)",
            ("tests/models/test_default_device.py",)),
    Planted("a worker draws for the epoch, not for the image", "normswap/training/training_images.py",
            '_draw_by(self.seed, "image", epoch, index)  #', '_draw_by(self.seed, "image", epoch)  #',
            ("tests/training/test_engine.py::test_augmentation_does_not_depend_on_workers_nor_on_where_a_run_begins",)),
    Planted("vectors are clipped in the order in which they come", "normswap/training/adaptive_clipping.py",
            "ordered = sorted(group, key=lambda parameter: parameter.ndim <= 1)", "ordered = list(group)",
            ("tests/training/test_adaptive_clipping.py",)),
)  # fmt: skip
