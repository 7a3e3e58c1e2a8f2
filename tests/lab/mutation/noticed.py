"""Errors of `drawn.py` on lines that hundreds of tests reach: which of them to run first."""

from __future__ import annotations

from typing import NamedTuple


class Noticed(NamedTuple):
    """One of them.

    Args:
        file: where, within the package.
        change: a part of the line as it becomes, which no other error of the file has.
        test: what notices it.
    """

    file: str
    change: str
    test: str


NOTICED = (
    Noticed("training/engine.py", "+ if not engine.sync_gradients and",
            "tests/training/test_recipe_keys.py::test_another_value_is_another_run[optim.clip.value]"),
    Noticed("training/filter_means.py", "not layers and any(",
            "tests/training/test_engine.py::test_means_that_are_not_zero_stay"),
    Noticed("surgery/comparison.py", "isfinite(b).all()) and not",
            "tests/surgery/test_distances.py::test_errors[the result is not finite]"),
    Noticed("surgery/carrying_out.py", "+ if not exact:",
            "tests/models/test_opening.py::test_a_conversion_holds_little_more_than_the_float64_result"),
    Noticed("surgery/applying.py", "for path, value in []",
            "tests/schemes/test_branch_scale.py::test_regularized_adds_dropout_and_biases[resnet18]"),
    Noticed("storage/model_card.py", "if not options else",
            "tests/storage/test_checkpoint.py::test_the_card_says_what_was_asked_for"),
    Noticed("storage/model_card.py", "if not report.exact else",
            "tests/storage/test_checkpoint.py::test_the_card_says_what_was_asked_for"),
    Noticed("schemes/layernorm.py", "exact=True",
            "tests/schemes/test_every_scheme.py::test_exact_or_measurably_different[resnet18-layernorm]"),
    Noticed("schemes/instancenorm.py", "exact=True",
            "tests/schemes/test_every_scheme.py::test_exact_or_measurably_different[ecaresnet50t-instancenorm]"),
    Noticed("schemes/parts/branch_scale.py", '{"bias": False}',
            "tests/schemes/test_branch_scale.py::test_scalars_that_are_there_get_a_bias"),
    Noticed("graph/tracing.py", "if len(sources) == 2 or is_mul",
            "tests/graph/test_inspection.py::test_what_carries_the_signal"),
    Noticed("graph/recorder.py", "version(tensor) or memory(tensor)",
            "tests/graph/test_recorder.py::test_of_what_forward_makes_by_itself_only_what_is_read_is_recorded"),
    Noticed("graph/selection.py", "for pattern in []:", "tests/graph/test_selection.py::test_patterns_that_cannot_be"),
    Noticed("graph/recording.py", "if not node.op in", "tests/graph/test_recorder.py::test_fold_is_exact_or_refused"),
    Noticed("graph/inspection.py", "if len(parts) > 2 and",
            "tests/graph/test_inspection.py::test_stages_by_the_paths_of_blocks"),
    Noticed("schemes/parts/steady_signs.py", "gains).sum() - linear @ signs",
            "tests/calibration/test_least_squares.py::test_many_descents_find_the_quietest_signs"),
    Noticed("schemes/groupnorm.py", "isinstance(groups, bool) and",
            "tests/calibration/test_least_squares.py::test_options_are_checked"),
    Noticed("schemes/parts/per_sample_norms.py", "len(traced.users[node]) > 1 and len(",
            "tests/calibration/test_least_squares.py::test_who_can_absorbs_the_rescaling_and_the_function_stays"),
    Noticed("schemes/parts/per_sample_rescaling.py", '"GroupNorm" or (e.path in holders',
            "tests/models/test_calling.py::test_a_fit_is_that_of_plain_tensors"),
    Noticed("graph/widening.py", "copy=False",
            "tests/graph/test_recorder.py::test_what_is_cast_to_less_is_neither_rounded_nor_shared"),
    Noticed("folding/channel_factors.py", 'meta["shape"] <= shape',
            "tests/folding/test_channel_factors.py::test_free_channels_and_no_other_can_be_scaled"),
    Noticed("schemes/parts/zero_sum_filters.py", "- continue + break",
            "tests/calibration/test_least_squares.py::test_what_cannot_be_standardized_keeps_nothing_else_from_it"),
    Noticed("folding/channel_factors.py", "- return False + return True",
            "tests/folding/test_channel_factors.py::test_free_channels_and_no_other_can_be_scaled"),
    Noticed("folding/propagation.py", "(module is not None or affine.is_affine",
            "tests/folding/test_canonical_form.py::test_fold_is_exact_or_refused"),
    Noticed("storage/model_card.py", "if not record.sha256", "tests/storage/test_checkpoint.py::test_the_card_of_a_chain"),
    Noticed("storage/model_card.py", "steps[not 1]", "tests/storage/test_checkpoint.py::test_the_card_of_a_chain"),
    Noticed("storage/model_card.py", "kept.agreement is not None else",
            "tests/storage/test_checkpoint.py::test_the_card_of_a_chain"),
    Noticed("schemes/rmsnorm.py", 'not role == "head"',
            "tests/schemes/test_rmsnorm.py::test_features_that_lose_their_mean_are_named"),
    Noticed("surgery/comparison.py", "+ stray = 1.0", "tests/surgery/test_comparison.py::test_the_right_result_passes"),
    Noticed("surgery/carrying_out.py", "if not result is None",
            "tests/models/test_opening.py::test_layers_of_two_dtypes_keep_theirs"),
    Noticed("surgery/fitting.py", "scheme.fit is not None or", "tests/calibration/test_least_squares.py::test_options_are_checked"),
    Noticed("surgery/kept_accuracy.py", "exact=True",
            "tests/surgery/test_wrong_results.py::test_who_keeps_another_number_of_boxes_is_as_far_off_as_one_who_gives_nothing"),
    Noticed("layers/channel_norm.py", "nn.RMSNorm.forward: - 2",
            "tests/folding/test_norm_affine.py::test_the_dimension_is_that_along_which_it_normalizes"),
    Noticed("storage/checkpoint.py", "file.chmod( 439",
            "tests/storage/test_checkpoint.py::test_files_are_open_to_whom_the_user_lets_in"),
    Noticed("calibration/lockstep.py", "+ except CosmicRayTestingException as error",
            "tests/calibration/test_least_squares.py::test_images_of_other_channels_do_not_fit"),
    Noticed("calibration/least_squares.py", "errors[-2] != errors[-3]",
            "tests/calibration/test_least_squares.py::test_the_ridge_is_sought_until_the_error_has_risen_twice"),
    Noticed("calibration/checked_batches.py", "example.images.ndim < 3",
            "tests/calibration/test_least_squares.py::test_rows_of_features_are_fitted_to_as_images_are"),
    Noticed("training/run_folder.py", '+ if not (place / "recipe.yaml").is_file()',
            "tests/cli/test_cli.py::test_bad_input_gives_one_line[a run0]"),
    Noticed("training/assembly.py", 'parts["scaler"] is None',
            "tests/training/test_resume.py::test_the_scale_of_gradients_in_half_precision_is_continued"),
    Noticed("training/sweep.py", '>= "WAITING"', "tests/training/test_sweep.py::test_every_point_is_run_once"),
    Noticed("layers/placeholders.py", "- @classmethod",
            "tests/schemes/test_purposes.py::test_layers_get_a_bias_of_zero_where_they_have_none"),
)  # fmt: skip
