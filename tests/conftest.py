"""Fixtures for every test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.server import PRELOADED, TASK_LIBRARIES, server
from tests.workers import Pool

LONG = (
    "tests/cli/test_bad_input.py::TestFolderOfAnotherConfiguration",
    "tests/cli/test_bad_input.py::test_a_damaged_file_is_one_line_whoever_meets_it",
    "tests/cli/test_bad_input.py::test_a_key_that_is_newer_than_the_folder",
    "tests/cli/test_bad_input.py::test_refused_as_a_person_sees_it",
    "tests/cli/test_bad_input.py::test_a_value_beyond_what_is_declared",
    "tests/cli/test_bad_input.py::test_unknown_key_of_every_node",
    "tests/cli/test_bad_surroundings.py::test_no_room_for_the_model",
    "tests/cli/test_compose.py::test_it_is_what_hydra_composes",
    "tests/cli/test_disturbed.py",
    "tests/cli/test_elastic.py",
    "tests/cli/test_every_task.py::test_composes",
    "tests/cli/test_every_task.py::test_goes_on_exactly",
    "tests/cli/test_every_task.py::test_loading_ahead_changes_nothing",
    "tests/cli/test_compose.py::test_it_trains",
    "tests/cli/test_folder.py",
    "tests/cli/test_export.py",
    "tests/cli/test_finished.py::test_a_replica_of_several_workers",
    "tests/cli/test_finished.py::test_it_is_not_read_again",
    "tests/cli/test_finished.py::test_the_command_line",
    "tests/cli/test_finished.py::test_the_encoder_is_the_run_s",
    "tests/cli/test_finished.py::test_without_a_sound_checkpoint",
    "tests/cli/test_mesh.py::test_all_workers_agree_on_tau",
    "tests/cli/test_mesh.py::test_compiled_blocks",
    "tests/cli/test_mesh.py::test_experts_shared_by_two_workers",
    "tests/cli/test_mesh.py::test_experts_go_on_exactly",
    "tests/cli/test_mesh.py::test_refused",
    "tests/cli/test_mesh.py::test_trains_as_replicas_of_one_worker",
    "tests/cli/test_training.py::test_a_replica_shares_its_state",
    "tests/cli/test_training.py::test_learns",
    "tests/cli/test_optuna.py::test_search",
    "tests/cli/test_start.py::test_workers_that_cannot_share_train_on_the_cpu_at_smoke_scale_only",
    "tests/cli/test_training.py::test_same_curve",
    "tests/cli/test_plan.py",
    "tests/cli/test_quorum.py",
    "tests/cli/test_resume.py::test_a_loss_that_is_not_finite_on_all_replicas",
    "tests/cli/test_resume.py::test_a_loss_that_is_not_finite_on_another_replica",
    "tests/cli/test_stop.py::test_a_worker_that_does_not_answer",
    "tests/cli/test_stop.py::test_one_worker_is_killed",
    "tests/cli/test_stop.py::test_put_aside_for_a_moment",
    "tests/cli/test_stop.py::test_told_to_stop",
    "tests/cli/test_runs.py::TestFolder",  # of a run that starts interpreters of its own
    "tests/cli/test_runs.py::TestLearningRate::test_is_what_trains",
    "tests/cli/test_runs.py::TestWhoStartsTheWorkers",
    "tests/cli/test_runs.py::test_a_failed_job_of_a_sweep_loses_no_other",
    "tests/cli/test_runs.py::test_a_sweep_of_tau",
    "tests/cli/test_runs.py::test_a_sweep_over_methods_and_workers",
    "tests/cli/test_runs.py::test_evaluation_changes_nothing",
    "tests/cli/test_runs.py::test_every_method_brings_what_others_learn",
    "tests/cli/test_runs.py::test_few_bits_learn_what_all_do",
    "tests/cli/test_runs.py::test_finished_means_finished",
    "tests/cli/test_runs.py::test_other_worlds_learn",
    "tests/cli/test_runs.py::test_sharding_is_no_other_training",
    "tests/cli/test_finished.py::test_the_same_seed_prints_the_same_text",
    "tests/cli/test_finished.py::test_the_likeliest_token_each_time",
    "tests/cli/test_finished.py::test_the_context_is_respected",
    "tests/cli/test_saving.py::test_training_goes_on_while_the_disk_is_slow",
    "tests/cli/test_several_machines.py",
    "tests/cli/test_sinks.py",
    "tests/docs/test_commands.py",
    "tests/docs/test_site.py",
    "tests/docs/test_commands.py::test_a_timeline_of_two_runs",
    "tests/docs/test_commands.py::test_a_wrong_command_is_found",
    "tests/docs/test_commands.py::test_every_command_is_taken",
    "tests/docs/test_commands.py::test_ones_own_text",
    "tests/engine/test_example.py",
    "tests/engine/test_goodput.py::test_closed_forms_against_drawn_failures",
    "tests/engine/test_joining.py",
    "tests/engine/test_lab.py",
    "tests/engine/test_members.py",
    "tests/engine/test_memory.py::test_copies_held_are_those_of_the_ledger",
    "tests/engine/test_shapes.py",
    "tests/engine/test_store.py",
    "tests/engine/test_tau.py::test_all_replicas_choose_alike",
    "tests/engine/test_tau.py::test_auto_is_the_method_with_that_tau",
    "tests/engine/test_tau.py::test_in_a_run",
    "tests/engine/test_tau.py::test_resume_is_exact",
    "tests/engine/test_timeline.py::test_a_real_run",
    "tests/engine/test_timeline.py::test_nothing_is_under_way_as_a_trace_ends",
    "tests/engine/test_wire.py::test_bytes_are_what_the_network_device_counts",
    "tests/methods/test_cards.py::test_the_numbers_are_the_codes_own",
    "tests/methods/test_co2.py::test_a_peer_that_is_gone_ends_the_others",
    "tests/methods/test_co2.py::test_every_layout",
    "tests/methods/test_co2.py::test_the_thread_does_not_outlive_the_interpreter",
    "tests/methods/test_collectives.py::test_no_group_has_two_roles",
    "tests/methods/test_contract.py::test_a_key_that_may_change",
    "tests/methods/test_contract.py::test_a_longer_round_ends_at_the_next_step",
    "tests/methods/test_contract.py::test_alone_it_needs_no_process_group_and_sends_nothing",
    "tests/methods/test_contract.py::test_consensus",
    "tests/methods/test_contract.py::test_equals_reference",
    "tests/methods/test_contract.py::test_every_choice_shows",
    "tests/methods/test_refusals.py::test_over_bf16_the_trajectory_stays_close",
    "tests/methods/test_contract.py::test_replicas_start_rounds_bit_for_bit_alike",
    "tests/methods/test_contract.py::test_resume_at_every_step",
    "tests/methods/test_contract.py::test_the_first_mean_arrives_when_the_method_says",
    "tests/methods/test_contract.py::test_the_reference_tells_a_method_from_no_exchange",
    "tests/methods/test_contract.py::test_what_was_trained_is_not_what_replicas_go_on_from",
    "tests/methods/test_identities.py::test_the_same",
    "tests/methods/test_moments.py::test_v_stays_positive_and_three_times_the_bytes_are_sent",
    "tests/methods/test_packed_means.py::test_compression_loses_nothing",
    "tests/methods/test_packed_means.py::test_equals_two_stages_in_one_place",
    "tests/methods/test_packed_means.py::test_equals_what_is_written_in_one_place",
    "tests/methods/test_replicas_of_several_workers.py",
    "tests/methods/test_streaming_diloco.py::test_a_quantized_exchange_may_take_its_time",
    "tests/methods/test_streaming_diloco.py::test_quantized_exchange_loses_nothing_for_good",
    "tests/methods/test_timing.py::test_a_round_has_one_collective",
    "tests/methods/test_timing.py::test_ranks_issue_the_same_collectives",
    "tests/methods/test_timing.py::test_the_network_may_take_a_whole_round",
    "tests/methods/test_wire.py::test_buckets_change_nothing",
    "tests/methods/test_wire.py::test_consensus_over_the_wire",
    "tests/methods/test_wire.py::test_copies_may_be_late_or_early",
    "tests/methods/test_wire.py::test_own_part_is_taken_back_as_it_was_added",
    "tests/methods/test_workers.py::test_a_deadlock_is_a_failure",
    "tests/peers/test_training.py::test_torch_post_local_sgd_is_local_sgd",
    "tests/peers/test_lab.py",
    "tests/peers/test_training.py::test_goes_on_exactly",
    "tests/peers/test_training.py::test_trains",
    "tests/recipes/test_again.py::test_a_training_comes_out_again",
    "tests/recipes/test_cells.py",
    "tests/recipes/test_golden.py::test_a_method",
    "tests/recipes/test_golden.py::test_a_task",
    "tests/recipes/test_laboratory.py::test_trials_named_beside_their_recipe_are_collected_once",
    "tests/recipes/test_studies.py::test_what_won_composes",
    "tests/recipes/test_tables.py::test_every_cell_of_every_recipe_composes",
    "tests/recipes/test_tune.py::test_a_search_that_was_stopped_goes_on",
    "tests/recipes/test_tune.py::test_a_whole_search_trains",
    "tests/recipes/test_tune.py::test_averaged_moments_are_tuned_apart",
    "tests/recipes/test_tune.py::test_every_method_has_a_space_and_every_value_is_legal",
    "tests/recipes/test_tune.py::test_every_method_has_the_same_budget",
    "tests/tasks/test_ade20k.py::test_dropout_takes_whole_channels_before_the_classes_in_training_alone",
    "tests/tasks/test_ade20k.py::test_weights_of_the_backbone",
    "tests/tasks/test_ade20k.py::test_weights_that_do_not_fit",
    "tests/tasks/test_contract.py::test_an_evaluation_is_the_same_for_any_number_of_workers",
    "tests/tasks/test_contract.py::test_it_learns_a_batch_by_heart",
    "tests/tasks/test_contract.py::test_loading_in_processes_changes_nothing",
    "tests/tasks/test_gpt2.py::test_importing_tasks_is_cheap",
    "tests/tasks/test_gpt2.py::test_traced",
    "tests/tasks/test_graph_stores.py::test_the_same_batches",
    "tests/tasks/test_moe.py::test_divided_over_workers",
    "tests/tasks/test_moe.py::test_it_learns",
    "tests/tasks/test_prepare_contract.py::test_disturbed_it_is_gone_on_with",
)
"""What takes more than a second of processor time, alone or with all its cases: `make test-fast`
leaves it out."""


SLOW = (
    "tests/cli/test_installed.py",  # builds the wheel, and makes environments
    "tests/cli/test_mesh.py::test_every_task_in_parts",  # real models, four workers
    "tests/cli/test_mesh.py::test_killed",
    # The plan of a large model is traced: 40 s each.
    "tests/cli/test_plan.py::TestBeforeItIsQueued::test_what_torch_compile_may_make_fit_is_a_warning",
    "tests/cli/test_plan.py::test_what_does_not_fit_is_refused_with_what_does[words2",
    "tests/cli/test_stop.py::test_told_before_there_are_workers",  # new interpreters
    "tests/cli/test_runs.py::test_compile",  # a C++ compiler's work
    "tests/cli/test_runs.py::test_signs_learn_what_adam_does",
    "tests/cli/test_several_machines.py::test_a_machine_is_lost_and_comes_back[replica]",
    "tests/engine/test_lab.py::test_a_table",  # links of its own, as root
    "tests/methods/test_replicas_of_several_workers.py::test_two_replicas_of_two_workers",
    "tests/methods/test_replicas_of_several_workers.py::test_with_what_the_loop_has",
    "tests/recipes/test_rehearse.py::test_a_small_one",  # trains several tasks
    "tests/tasks/test_ade20k.py::test_evaluation_does_not_compile",  # torch.compile
    "tests/tasks/test_fused_experts.py",  # Triton's interpreter
    "tests/tasks/test_text.py::test_two_processes_at_once",  # new interpreters
)
"""What `make test` leaves to `make test-slow`, as it does the tests marked where they stand."""


def pytest_configure(config: pytest.Config) -> None:
    """Where several processes test, they have one server, which imports while they collect."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        PRELOADED.extend(TASK_LIBRARIES)
        server().share()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The controller's own clocks take minutes, in which others can run.
    items.sort(key=lambda item: not item.nodeid.startswith("tests/slurm"))
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if item.nodeid.startswith(LONG):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models run fastest on one thread, and each worker of the pool has one thread too."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `data.root` that all tests share, so that each corpus is tokenized once in a session."""
    base = tmp_path_factory.getbasetemp()
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    return (base.parent if parallel else base) / "data"


@pytest.fixture(scope="session")
def workers() -> Iterator[Pool]:
    """Four gloo workers: `workers.run(fn, world, *args)` calls `fn(rank, world, *args)`."""
    pool = Pool(4)
    yield pool
    pool.close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where tests train real models in the pool's workers, import their libraries once for all.

    Such a test takes both `workers` and `root`, the folder of the corpora.
    """
    names = [set(getattr(item, "fixturenames", ())) for item in session.items]
    if any({"workers", "root"} <= taken for taken in names):
        PRELOADED.extend(TASK_LIBRARIES)
