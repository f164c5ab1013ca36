"""A recipe in, a table of results out: stages in order, records of every position, evaluation, results."""

from spalm.runs.evaluation import Evaluation, EvaluationSettings, Unit, evaluate_model, in_all_units
from spalm.runs.finished_run import RECIPE, FinishedRun
from spalm.runs.mixtures import load_mixture, mix_adaptively, mix_knn, mixture_file
from spalm.runs.passage import SplitPassage, passage_of, print_passage, retrieved_tokens, where_memory_helped
from spalm.runs.recipe import PaperRow, Recipe, read_recipe, recipe_folder
from spalm.runs.records import Records, keep_records, records_stage
from spalm.runs.results import (
    RESULTS,
    ResultRow,
    attended_at_test,
    key_network_note,
    print_results,
    result_row,
    without_memory,
    write_results,
)
from spalm.runs.rows import (
    HELD_OUT,
    KEY_NETWORK,
    NETWORKS,
    REFERENCE_ROW,
    ROWS,
    HeldOut,
    NetworkName,
    Row,
    RowName,
)
from spalm.runs.run import Run
from spalm.runs.significance import wilcoxon

__all__ = [
    "Evaluation",
    "EvaluationSettings",
    "FinishedRun",
    "HELD_OUT",
    "HeldOut",
    "KEY_NETWORK",
    "NETWORKS",
    "NetworkName",
    "PaperRow",
    "SplitPassage",
    "RECIPE",
    "REFERENCE_ROW",
    "RESULTS",
    "ROWS",
    "Recipe",
    "Records",
    "ResultRow",
    "Row",
    "RowName",
    "Run",
    "Unit",
    "attended_at_test",
    "evaluate_model",
    "in_all_units",
    "keep_records",
    "key_network_note",
    "load_mixture",
    "mix_adaptively",
    "mix_knn",
    "mixture_file",
    "passage_of",
    "print_passage",
    "print_results",
    "read_recipe",
    "recipe_folder",
    "records_stage",
    "result_row",
    "retrieved_tokens",
    "where_memory_helped",
    "wilcoxon",
    "without_memory",
    "write_results",
]
