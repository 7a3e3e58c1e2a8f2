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
            "tests/test_engine_keys.py::test_another_value_is_another_run[optim.clip.value]"),
    Noticed("training/filter_means.py", "not layers and any(",
            "tests/test_engine.py::test_means_that_are_not_zero_stay"),
    Noticed("surgery/comparison.py", "isfinite(b).all()) and not",
            "tests/test_distances.py::test_errors[the result is not finite]"),
    Noticed("surgery/carrying_out.py", "+ if not exact:",
            "tests/test_opening.py::test_a_conversion_holds_little_more_than_the_float64_result"),
    Noticed("surgery/applying.py", "for path, value in []",
            "tests/test_alpha.py::test_regularized_adds_dropout_and_biases[resnet18]"),
    Noticed("storage/model_card.py", "if not options else",
            "tests/test_checkpoint.py::test_the_card_says_what_was_asked_for"),
    Noticed("storage/model_card.py", "if not report.exact else",
            "tests/test_checkpoint.py::test_the_card_says_what_was_asked_for"),
    Noticed("schemes/layernorm.py", "exact=True",
            "tests/test_laws.py::test_exact_or_measurably_different[resnet18-layernorm]"),
    Noticed("schemes/instancenorm.py", "exact=True",
            "tests/test_laws.py::test_exact_or_measurably_different[ecaresnet50t-instancenorm]"),
    Noticed("schemes/parts/branch_scale.py", '{"bias": False}',
            "tests/test_alpha.py::test_scalars_that_are_there_get_a_bias"),
    Noticed("schemes/parts/declared.py", "len(words) == 2", "tests/test_cli_schemes.py::test_options_have_kinds"),
    Noticed("layers/placeholders.py", "- @classmethod",
            "tests/test_purposes.py::test_layers_get_a_bias_of_zero_where_they_have_none"),
)  # fmt: skip
