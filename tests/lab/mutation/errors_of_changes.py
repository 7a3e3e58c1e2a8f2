"""Planted errors: such as are made while the code of the last days is changed. One option beside another, and alone."""

from __future__ import annotations

from planted_error import Planted

BRANCHES, MERGES = "normswap/folding/branches.py", ("tests/folding/test_branches.py",)
RESTORES = ("tests/calibration/test_restoring.py",)
RECALIBRATION = "normswap/surgery/recalibration.py"
SQUARES, ROWS = "normswap/calibration/least_squares.py", "normswap/calibration/row_block.py"
SQUARED = "tests/calibration/test_least_squares.py::"
DRIFT, NUMBERS = "normswap/diagnosis/drift.py", "normswap/diagnosis/stored_numbers.py"
ON_IMAGES = "tests/diagnosis/test_doctor_on_images.py::"
PT2, SCRIPT = "normswap/exporting/pt2.py", "normswap/exporting/torchscript.py"
EXPORTS = "tests/exporting/test_exporter.py::"
COPIES = (EXPORTS + "test_products_with_one_go_unless_they_are_copies",
          EXPORTS + "test_sums_with_nothing_go_unless_they_are_copies")  # fmt: skip

ERRORS = (
    Planted("a pooling is numbered among the poolings", "normswap/schemes/steps/merged_branches.py",
            "str(merge.others.index(path)): cast", "str([*merge.pools].index(path)): cast", MERGES),
    Planted("a pooling with a divisor of its own merges", BRANCHES,
            " or module.ceil_mode or module.divisor_override is not None:", " or module.ceil_mode:", MERGES),
    Planted("a pooling that is read elsewhere merges", BRANCHES,
            "if _is_average(traced.module(above)) and len(traced.users[above]) == 1 and",
            "if _is_average(traced.module(above)) and", MERGES),
    Planted("a weight that is made of others is refused where no reference has it", "normswap/calibration/restoring.py",
            "        if len(nodes) != len(references):", "        if len(nodes) != len(references) and _is_plain(layer):",
            RESTORES),
    Planted("a reference's branches are merged, the network's are not", RECALIBRATION,
            ', input_size=like.size, branches="keep")', ", input_size=like.size)", RESTORES),
    Planted("a reference is folded at another size than is asked for", RECALIBRATION,
            ", input_size=like.size, branches", ", branches", RESTORES),
    Planted("errors on images that were fitted to are made smaller, too", "normswap/surgery/expected_accuracy.py",
            ".clamp_min(1e-30)).sqrt().clamp_min(1)", ".clamp_min(1e-30)).sqrt()",
            ("tests/surgery/test_expected_accuracy.py::test_errors_that_go_with_images_are_told",)),
    Planted("factors are chosen on top of those that there are", "normswap/schemes/parts/tails.py",
            "factors(x / old[:, None].float(), alpha)", "factors(x, alpha)",
            ("tests/schemes/test_dyt.py::test_images_repair_it",)),
    Planted("a block that grows forgets its rows", ROWS,
            "larger[:, : self.count] = room[:, : self.count]", "larger.zero_()",
            (SQUARED + "test_streamed_regression_is_numpys_least_squares_on_the_unrolled_layer",)),
    Planted("rows of a half precision are summed up in it", ROWS,
            "precision = x.dtype if x.dtype == torch.float64 else torch.float32", "precision = x.dtype",
            (SQUARED + "test_rows_of_half_precision_are_summed_up_in_float32",)),
    Planted("what waits is lost where inputs come again", SQUARES,
            "        self.flush()\n        y, xy, yy = (torch.zeros_like", "        y, xy, yy = (torch.zeros_like",
            (SQUARED + "test_rows_that_wait_are_among_the_inputs_that_come_again",)),
    Planted("what waits in the other fold is lost in the sum", SQUARES,
            "        self.flush()\n        other.flush()\n", "        self.flush()\n",
            (SQUARED + "test_blocks_in_float32_are_as_good_as_float64",)),
    Planted("a fit's time is told where every step of a plan fits", "normswap/cli/commands/convert_command.py",
            "return any(name in schemes.names() and", "return all(name in schemes.names() and",
            ("tests/calibration/test_duration.py::test_a_plan_is_fitted_where_one_of_its_steps_is",)),
    Planted("a sweep's validation images have to be named", "normswap/training/training_images.py",
            "    if places(data)[1] is None:", "    if data.validation is None:",
            ("tests/training/test_training_images.py::test_what_is_decided_by_top1_takes_validation_images_that_are_named_or_lie_beside",)),
    Planted("norms that were never updated are said to be so in part, too", NUMBERS,
            "for site in case.sites if not site.starts_at_init}", "for site in case.sites}",
            ("tests/diagnosis/test_doctor.py::test_what_was_never_updated_is_told_apart",)),
    Planted("images that fit the first norm's means are never the cause", DRIFT,
            "images = hit[0] is drifts[0] or drifts[0].has_other_details", "images = hit[0] is drifts[0]",
            (ON_IMAGES + "test_images_are_the_cause_where_the_first_norm_sees_other_variances_at_the_same_means",)),
    Planted("betas of 0 in most of the trained norms are the cause", DRIFT,
            "if 2 * len(unset) > len(case.sites):", "if 2 * len(unset) > len(trained):",
            (ON_IMAGES + "test_betas_of_0_are_the_cause_where_most_norms_have_none",)),
    Planted("planes of a dilated kernel are next to each other", "normswap/exporting/planes.py",
            "_across(conv.dilation), conv.groups", "1, conv.groups", ("tests/exporting/test_planes.py",)),
    Planted("what makes a float of an integer is left out", PT2,
            'if same.meta["val"].dtype != node.meta["val"].dtype:', "if False:", COPIES),
    Planted("who overwrites what is read is not asked", PT2,
            "for user in (*node.users, *same.users))", "for user in node.users)", COPIES),
    Planted("who overwrites what TorchScript reads is not asked", SCRIPT,
            "for use in (*result.uses(), *one.uses()))", "for use in result.uses())", COPIES),
    Planted("what makes a float of an integer is left out of TorchScript", SCRIPT, "if same_dtype and (node", "if (node",
            COPIES),
    Planted("the network within another loses its softmax", "normswap/exporting/exported_module.py",
            "normalization=self.normalization, softmax=self.softmax)", "normalization=self.normalization)",
            ("tests/exporting/test_export_folding.py::test_another_network_gets_what_goes_before_and_after",)),
    Planted("the first process has the newest state", "normswap/training/processes.py",
            "source = updates.index(max(updates))", "source = 0",
            ("tests/training/test_launching.py::test_all_take_the_newest_state_whoever_has_it",)),
    Planted("one task of srun is several processes", "normswap/training/launching.py",
            'os.environ.get("SLURM_NTASKS", "1")) > 1', 'os.environ.get("SLURM_NTASKS", "1")) > 0',
            ("tests/training/test_launching.py::test_a_task_by_itself_is_one_process",)),
    Planted("a page in capitals is none", "normswap/reporting/page_file.py",
            "file.suffix.lower() not in", "file.suffix not in", ("tests/reporting/test_report.py::test_a_page_has_the_ending_of_one",)),
    Planted("pictures in capitals are passed over without a word", "normswap/images/places.py",
            "os.path.splitext(name)[1].lower()) in unread", "os.path.splitext(name)[1]) in unread",
            ("tests/images/test_datasets.py::test_pictures_that_the_reader_of_folders_does_not_know_are_counted",)),
    Planted("leaves are as large as a network's images are by default", "normswap/schemes/parts/channels_seen.py",
            "made_for if recorded in network_input.small(made_for) else recorded", "made_for",
            ("tests/schemes/test_channels_seen.py::test_leaves_are_as_large_as_the_images_that_are_given",)),
    Planted("labels that are mixed are smoothed twice", "normswap/training/objective.py",
            "smoothing = 0.0 if self.mixup is not None else self.smoothing", "smoothing = self.smoothing",
            ("tests/training/test_engine.py::test_mixup_mixes_mirror_images_and_their_labels",)),
)  # fmt: skip
