"""Kinds of fault that other suites shipped, and what keeps each out of this one: tests by name, or a check by hand.

The numbers are of a list of 88 findings in public bug reports of FL suites; the words say what each is about.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from test_cli import protofl, runs

from protofl import cli

HERE = Path(__file__).parent

FAULTS: dict[str, str] = {
    "OP-01 a split that never ends": "data/test_partition.py::test_refused_in_seconds_when_the_minimum_is_out_of_reach",
    "OP-02 a client without samples": "test_verify.py::test_methods_keep_the_contract",
    "OP-03 a class with one sample": "test_fuzz.py::test_random_protocols_run_or_are_refused",
    "OP-04 beta 0, negative, text": "test_protocol.py::test_refused",
    "OP-05 which way beta goes": "data/test_partition.py::test_skew_falls_with_beta",
    "OP-06 a large beta is not even": "data/test_partition.py::test_large_beta_gives_equal_shares",
    "OP-07 a sample at two clients": "data/test_partition.py::test_every_row_goes_to_one_client",
    "OP-08 iid cuts blocks": "data/test_partition.py::test_iid_gives_every_client_every_class",
    "OP-09 local test sets of another mix": "test_evaluate.py::test_examples_of_5_2",
    "OP-10 test rows in training": "test_faults.py::test_no_image_is_in_both_parts",
    "OP-11 classes without an owner": "data/test_partition.py::test_all_classes_are_handed_out_however_many",
    "OP-12 a split of other settings is reused": "test_protocol.py::test_every_field_that_can_change_a_number_changes_the_digest",
    "OP-13 the number of classes is a constant": "test_fuzz.py::test_random_protocols_run_or_are_refused",
    "OP-14 one client": "test_run.py::test_one_client_is_local_training",
    "OP-15 Tiny-ImageNet's flat validation folder": "data/test_sources.py::test_tiny_imagenet",
    "OP-16 labels that are not 0..K-1": "data/test_sources.py::test_labels_of_any_kind",
    "OP-17 images that do not fit the network": "nets/test_net_build.py::test_refusals_are_one_line",
    "OP-18 pixels scaled twice": "data/test_sources.py::test_the_same_pictures_in_any_units",
    "OP-19 augmented test images": "test_run.py::test_evaluation_changes_nothing_else",
    "OP-20 the first run needs the network": "data/test_sources.py::test_fetching_without_a_network",
    "OP-21 files are read again in every round": "data/test_sources.py::test_decoded_once",
    "OP-22 one sample in BatchNorm": "nets/test_net_norm.py::test_one_sample_trains_a_whole_net",
    "OP-23 dropped batches leave a client untrained": "methods/test_fedavg.py::test_short_client",
    "OP-24 sizes that round to 0": "test_fuzz.py::test_random_protocols_run_or_are_refused",
    "OP-25 running statistics are not averaged": "methods/test_fedavg.py::test_buffers",
    "OP-26 integer buffers averaged as floats": "methods/test_fedavg.py::test_buffers_of_a_normalised_net",
    "OP-27 negative running variances": "methods/test_fedavg.py::test_server_lr_damps",
    "OP-28 weights over all clients": "methods/test_fedavg.py::test_weights_follow_the_client_not_its_position",
    "OP-29 aliased uploads": "methods/test_fedavg.py::test_nothing_aliases",
    "OP-30 weights by batches": "methods/test_fedavg.py::test_quadratic",
    "OP-31 errors of clients are swallowed": "test_cli.py::test_a_failing_method_does_not_take_the_others_along",
    "OP-32 an anchor that moves along": "methods/test_fedprox.py::test_the_anchor_is_the_received_model_all_round_long",
    "OP-33 a penalty without its square": "methods/test_fedprox.py::test_quadratic",
    "OP-34 a method that is FedAvg by its settings": "report/test_oddities.py::test_equal_curves",
    "OP-35 no previous model": "methods/test_moon.py::test_first_prev",
    "OP-36 control variates that grow": "methods/test_scaffold.py::test_momentum",
    "OP-37 control variates of the wrong sum": "methods/test_scaffold.py::test_c_is_the_mean_of_all",
    "OP-38 state carried from client to client": "test_run.py::test_the_same_twice_whatever_ran_before",
    "OP-39 rates that decay per client": "test_protocol.py::test_learning_rate_is_a_function_of_the_round",
    "OP-40 an auxiliary loss that is 0": "report/test_oddities.py::test_terms_that_are_never_there",
    "OP-41 clients that were never drawn": "test_federation.py::test_all_clients_are_evaluated_where_they_keep_their_model",
    "OP-42 schedules with a fixed number of rounds": "methods/test_fedproc.py::test_remaining_options_move_the_result",
    "OP-43 a class that a client lacks": "test_verify.py::test_methods_keep_the_contract",
    "OP-44 prototypes averaged with other weights": "methods/test_prototypes.py::test_merge",
    "OP-45 a metric that is not defined is 0": "test_evaluate.py::test_undefined_figures_are_missing_not_zero",
    "OP-46 no positive pair": "methods/test_fedcspc.py::test_contrast_without_a_positive",
    "OP-47 constant images, huge rates": "test_fuzz.py::test_random_protocols_run_or_are_refused",
    "OP-48 empty clusters": "methods/test_fedcspc.py::test_duplicates_make_no_empty_cluster",
    "OP-49 best and last are not told apart": "test_cli.py::test_bench_prints_stores_and_reports",
    "OP-50 global and personal in one column": "report/test_tables.py::test_undefined_is_not_unmeasured",
    "OP-51 a number of another model": "test_run.py::test_a_stored_run_evaluates_to_the_same_digits",
    "OP-52 a stored model gives other numbers": "test_run.py::test_a_stored_run_evaluates_to_the_same_digits",
    "OP-53 PM over other clients": "report/test_comparison.py::test_pm_over_other_clients_is_not_compared",
    "OP-54 clients that cannot be evaluated": "test_evaluate.py::test_clients_with_nothing_to_evaluate_are_left_out_and_counted",
    "OP-55 a diverged run goes on": "test_faults.py::test_a_diverged_method_is_told_and_others_go_on",
    "OP-57 accuracy averaged over batches": "test_evaluate.py::test_score_counts_every_test_image_once",
    "OP-58 evaluation in training mode": "test_run.py::test_evaluation_changes_nothing_else",
    "OP-59 methods with other networks or budgets": "report/test_summary.py::test_what_is_not_the_same_for_all_methods",
    "OP-60 what ± is over": "report/test_tables.py::test_one_seed_has_no_spread",
    "OP-61 same seed, other numbers": "test_cli.py::test_the_numbers_do_not_hang_on_the_machine",
    "OP-62 numbers hang on workers": "test_pool.py::test_more_processes_change_no_bit",
    "OP-63 streams that share a seed": "test_rng.py::test_private_streams",
    "OP-64 versions are not recorded": "test_records.py::test_environment_names_versions",
    "OP-65 memory grows with rounds": "test_soak.py::test_memory_and_open_files_do_not_grow",
    "OP-66 memory grows with clients": "test_memory.py::test_peak_memory_with_500_clients",
    "OP-67 a dead worker hangs the run": "test_pool.py::test_a_process_that_dies_ends_the_run_which_can_be_resumed",
    "OP-68 workers that never start": "test_run.py::test_method_files_that_cannot_be_set_up_are_refused",
    "OP-69 too many open files": "test_soak.py::test_memory_and_open_files_do_not_grow",
    "OP-71 killed, everything is gone": "test_cli.py::test_killed_from_outside_and_run_again",
    "OP-72 results that overwrite each other": "test_protocol.py::test_every_field_that_can_change_a_number_changes_the_digest",
    "OP-73 resumed is another run": "test_run.py::test_killed_and_resumed_equals_straight_through",
    "OP-74 resumed without state of clients": "test_soak.py::test_killed_again_and_again",
    "OP-75 a damaged state": "test_records.py::test_a_damaged_state_is_passed_over",
    "OP-76 results of other code are reused": "test_run.py::test_a_methods_source_is_part_of_the_digest",
    "OP-77 settings that are ignored": "test_sweep.py::test_the_command_line_wins_over_the_suite",
    "OP-78 misspelt names are accepted": "test_cli.py::test_bad_input_ends_quickly",
    "OP-80 a GPU that is not there": "test_cli.py::test_bad_input",
    "OP-81 more clients than samples": "test_cli.py::test_bad_input",
    "OP-82 no display": "report/test_report.py::test_without_a_display",
    "OP-83 too few points for a picture": "report/test_report.py::test_tsne_with_few_points",
    "OP-84 a damaged run takes the report along": "report/test_geometry.py::test_report_of_a_mixed_folder",
    "OP-85 figures that are never closed": "report/test_geometry.py::test_report_of_a_mixed_folder",
    "OP-86 how processes start": "test_faults.py::test_workers_start_from_a_script_without_a_guard",
    "OP-87 states that newer versions refuse": "test_records.py::test_a_tree_comes_back",
}

BY_HAND = {
    "OP-56 AUC and F1": "not offered",
    "OP-70 more workers are slower": "python benchmarks/speed/run.py engines: two workers beside one",
    "OP-79 without matplotlib or scikit-learn": "both are dependencies; what is optional (captum) is named where it is missing",
    "OP-88 oldest and newest versions": "pip install -c tests/constraints-oldest.txt -e '.[test]' && pytest -n 2",
}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, sketched: None) -> None:
    monkeypatch.setattr(cli, "out", Console(width=200))


def test_every_kind_has_a_test_that_is_there() -> None:
    numbers = [int(name[3:5]) for name in (*FAULTS, *BY_HAND)]
    assert sorted(numbers) == list(range(1, 89))
    for kind, test in FAULTS.items():
        file, _, name = test.partition("::")
        tree = ast.parse((HERE / file).read_text("utf-8"))
        assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, (kind, test)


def test_no_image_is_in_both_parts() -> None:
    """Of the embedded set: as many distinct images in both parts together as in each, but for scans that are alike."""
    from sklearn.datasets import load_digits

    from protofl.data import load

    data = load("digits")
    train, test = ([x.tobytes() for x in part] for part in (data.x_train, data.x_test))
    assert len(train) + len(test) == 1797
    assert sorted(train + test) == sorted(x.astype("uint8").tobytes() for x in load_digits().images)


def test_a_diverged_method_is_told_and_others_go_on(tmp_path: Path) -> None:
    """FedNH clips, so a rate of 1e30 is survived by none; SOLO's own rate stays."""
    words = ("bench", "--methods", "moon,fedavg", "--rounds", 3, "--local-epochs", 1, "--seeds", 0, "--workers", 1)
    said = protofl(*words, "--lr", 1e30, cwd=tmp_path, code=1)
    assert (
        said.count("diverged: loss of client ") == said.count(" is not finite in round 0") == 2
        and "Traceback" not in said
    )
    assert "diverged" in next((tmp_path / "reports").glob("*/README.md")).read_text()
    protofl(*words, cwd=tmp_path)
    assert len(runs(tmp_path / "results")) == 4


@pytest.mark.parametrize("how", ["file", pytest.param("stdin", marks=pytest.mark.slow)])
def test_workers_start_from_a_script_without_a_guard(how: str, tmp_path: Path) -> None:
    """Workers are made by a server that imports the package, never the user's script: no storm of processes."""
    script = (
        "import sys\nfrom protofl import cli\nprint('begun')\n"
        "sys.argv = ['protofl', 'bench', '--methods', 'fedavg,moon', '--seeds', '0', '--rounds', '1', '--local-epochs', '1', "
        "'--workers', '2', '--no-report']\ncli.main()\n"
    )
    (tmp_path / "mine.py").write_text(script)
    words = [sys.executable, "mine.py"] if how == "file" else [sys.executable, "-"]
    told = subprocess.run(
        words, input=script if how == "stdin" else None, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("begun") == 1 and len(runs(tmp_path / "results")) == 2
