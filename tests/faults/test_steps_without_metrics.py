# SPDX-License-Identifier: Apache-2.0
"""A run that is killed between a step's checkpoint and its log: the step is trained, and its metrics must not be gone.

verl's own loop and its saving of checkpoints run here; what takes Ray or a model is a stub.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import trainer_base

from scalerl_verl.cli import main
from scalerl_verl.json_lines import append_line, read_records
from scalerl_verl.ledger import step_log
from scalerl_verl.scaling.logs.reading import read_run
from scalerl_verl.scaling.logs.steps import find_missing, name_steps
from tests.steps import in_front_of


class Killed(BaseException):
    """Stands for SIGKILL: nothing that follows is done."""


class StubBuffer:
    """Stands for verl's ReplayBuffer, of which the stub of a validation asks nothing."""

    def sample(self) -> None:
        raise AssertionError


class StubTrainer(trainer_base.PPOTrainer):
    """verl's trainer with stubs for what takes Ray: a batch, its update, its metrics, a validation."""

    def __init__(self, config: Any, killed_at: int, killed_in: str) -> None:
        self.config, self.killed_at, self.killed_in = config, killed_at, killed_in
        self.trainer_mode, self.use_critic, self.val_dataset = "sync", False, None
        self.steps_per_epoch, self.total_training_steps = 100, 9
        self.actor_rollout_wg = SimpleNamespace(save_checkpoint=lambda *a, **k: None, load_checkpoint=lambda **k: None)
        self.train_dataloader = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        self.checkpoint_callback = SimpleNamespace(on_save=lambda **k: None)
        self.replay_buffer = StubBuffer()

    def step(self, metrics: dict, timing_raw: dict) -> Any:
        metrics["critic/score/mean"] = self.global_steps / 10
        return SimpleNamespace(keys=[], partition_id="train", tags=[])

    def _die(self, place: str) -> None:
        if (self.global_steps, place) == (self.killed_at, self.killed_in):
            raise Killed

    def on_sample_end(self) -> None:
        pass

    def on_step_end(self) -> None:
        self._die("after the checkpoint")

    def _consume_sync_metrics(self) -> dict:
        return {}

    def _validate(self) -> dict[str, float]:
        return {"val-core/tests/acc/mean@1": 0.1 * self.global_steps}

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: Any, global_steps: int, epoch: int) -> None:
        metrics["training/global_step"] = global_steps
        self._die("before the log")

    def _val_metrics_update(self, *args: Any) -> dict:
        return {}

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        return batch


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run verl's loop to its end or death; returns the rows of our log."""

    def start(killed_at: int = 0, killed_in: str = "after the checkpoint", **changes: Any) -> list[dict[str, Any]]:
        trainer = {
            "project_name": "p", "experiment_name": "e", "logger": ["file"], "val_before_train": True,
            "total_epochs": 1, "save_freq": 2, "test_freq": 2, "resume_mode": "auto", "nnodes": 1, "n_gpus_per_node": 1,
            "default_local_dir": str(tmp_path / "run"), "default_hdfs_dir": None, "del_local_ckpt_after_load": False,
            **changes,
        }  # fmt: skip
        rollout = {"skip": {"enable": False}}
        config = OmegaConf.create({
            "trainer": trainer, "algorithm": {"adv_estimator": "scalerl"}, "data": {},
            "actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "vanilla"}}, "rollout": rollout},
            "global_profiler": {"steps": None},
        })  # fmt: skip
        stub = in_front_of(Quiet, ledger=True)(config, killed_at, killed_in)
        stub._load_checkpoint()
        try:
            stub.fit(None)
        except Killed:
            stub.logger.logger["file"].finish()
        return read_records(tmp_path / "run" / step_log.STEPS_FILE)

    class Quiet(StubTrainer):
        def _start_profiling(self) -> None:
            pass

        def _stop_profiling(self) -> None:
            pass

        def _shutdown_dump_executor(self) -> None:
            pass

    monkeypatch.setattr(trainer_base.SkipManager, "init", lambda *a: None)
    monkeypatch.setattr(trainer_base.SkipManager, "set_step", lambda *a: None)
    monkeypatch.setattr(trainer_base.tq, "kv_clear", lambda **k: None)
    monkeypatch.setattr("scalerl_verl.advantage.length_step.watches_lengths", lambda config: False)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    return start


def steps(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows]


@pytest.mark.parametrize("killed_in", ["after the checkpoint", "before the log"])
def test_step_of_a_run_that_is_killed_after_its_checkpoint_keeps_its_metrics(
    run: Any, killed_in: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert steps(run(killed_at=4, killed_in=killed_in)) == [0, 1, 2, 3]
    latest = tmp_path / "run" / "latest_checkpointed_iteration.txt"
    assert latest.read_text() == "4", "verl counts the checkpoint as done"
    rows = run()
    assert steps(rows) == list(range(10))
    data = rows[4]["data"]
    assert data["critic/score/mean"] == 0.4 and data["scalerl/compute/steps"] == 4
    # The resumed run validated the weights of step 4 before it went on.
    assert data["val-core/tests/acc/mean@1"] == pytest.approx(0.4)
    assert caplog.text.count("Step 4 was trained and saved, and the run ended before the step was logged.") == 1
    assert "has no metrics of step" not in caplog.text
    # What verl's logger has is what came after.
    assert steps(read_records(tmp_path / "metrics.jsonl")) == list(range(4, 10))


def test_log_of_a_run_that_ends_well_is_that_of_verl(run: Any, tmp_path: Path) -> None:
    rows = run()
    expected = read_records(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(10))
    for row, theirs in zip(rows, expected, strict=True):
        assert row["data"] == pytest.approx(theirs["data"])


def test_steps_that_a_resumed_run_repeats_stand_once(run: Any, tmp_path: Path) -> None:
    first = run(killed_at=7)
    assert steps(first) == list(range(7))
    rows = run()
    assert steps(rows) == list(range(10))
    assert rows[6] == first[6], "a validation of the resumed weights completes a row and changes none"
    assert not (tmp_path / "run" / f"{step_log.STEPS_FILE}.superseded").exists()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("4")
    assert steps(run()) == list(range(10))
    gone = read_records(tmp_path / "run" / f"{step_log.STEPS_FILE}.superseded")
    assert steps(gone) == [5, 6, 7, 8, 9]


def test_new_run_in_an_old_folder_begins_its_log_anew(run: Any) -> None:
    run(killed_at=5)
    assert steps(run(killed_at=3, resume_mode="disable")) == [0, 1, 2]


def test_checkpoint_of_another_folder_brings_its_steps(run: Any, tmp_path: Path) -> None:
    run(killed_at=4)
    source = str(tmp_path / "run" / "global_step_4")
    other = {"resume_mode": "resume_path", "resume_from_path": source, "default_local_dir": str(tmp_path / "other")}
    run(**other)
    assert steps(read_records(tmp_path / "other" / step_log.STEPS_FILE)) == list(range(10))


@pytest.mark.parametrize(
    "chosen",
    [{"resume_mode": "disable"}, {}, {"resume_mode": "resume_path", "resume_from_path": "RUN/global_step_2"}],
    ids=["the model before training", "the latest checkpoint", "an earlier checkpoint"],
)
def test_validation_of_any_weights_in_the_folder_of_a_run_leaves_its_logs_alone(
    run: Any, chosen: dict[str, str], tmp_path: Path
) -> None:
    """Fault: trainer.val_only took the steps after the validated ones out of the log, and deleted the compute log."""
    run(killed_at=7)
    folder = tmp_path / "run"
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    run(val_only=True, **{key: value.replace("RUN", str(folder)) for key, value in chosen.items()})
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert steps(run()) == list(range(10))


def test_checkpoint_of_another_folder_brings_its_steps_where_this_folder_has_some_of_its_own(
    run: Any, tmp_path: Path
) -> None:
    """Fault: a curve of two runs, the steps before the checkpoint from the wrong one."""
    run(killed_at=5)
    theirs = read_records(tmp_path / "run" / step_log.STEPS_FILE)
    other = {"default_local_dir": str(tmp_path / "other")}
    run(killed_at=7, test_freq=1, **other)
    source = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "run" / "global_step_4")}
    for _ in range(2):
        run(killed_at=9, **other, **source)
        rows = read_records(tmp_path / "other" / step_log.STEPS_FILE)
        assert steps(rows) == list(range(9)) and rows[:4] == theirs[:4]
    assert read_records(tmp_path / "run" / step_log.STEPS_FILE) == theirs


def test_line_that_was_cut_is_named_when_the_run_is_resumed(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(killed_at=5)
    path = tmp_path / "run" / step_log.STEPS_FILE
    lines = path.read_bytes().split(b"\n")
    lines[3] = lines[3][:20]
    path.write_bytes(b"\n".join(lines))
    assert steps(run()) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert "has no metrics of step 3, although this checkpoint was trained by them" in caplog.text


def test_checkpoint_of_an_earlier_version_names_the_steps_before_it(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(killed_at=4)
    (tmp_path / "run" / step_log.STEPS_FILE).unlink()
    (tmp_path / "run" / "global_step_4" / step_log.STEP_FILE).unlink()
    assert steps(run()) == [4, 5, 6, 7, 8, 9]
    assert "has no metrics of step 1 to 4, although" in caplog.text


def test_full_disk_ends_no_training_and_its_rows_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = step_log.StepLog(tmp_path)
    log.write(1, {"a": 1})

    def refuse(path: Path, line: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(step_log, "append_line", refuse)
        log.write(2, {"a": float("nan"), "counts": {"x": 1}})
    assert "Its rows wait until it can be" in caplog.text
    log.write(3, {"a": 3})
    rows = read_records(tmp_path / step_log.STEPS_FILE)
    assert rows == [{"step": n, "data": {"a": value}} for n, value in ((1, 1), (2, None), (3, 3))]


def test_line_that_does_not_fit_leaves_no_part_of_it(tmp_path: Path) -> None:
    import resource
    import signal

    path = tmp_path / "log"
    append_line(path, b"whole")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        with pytest.raises(OSError, match="No space left"):
            append_line(path, b"cut in the middle")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_bytes() == b"whole\n"


def test_reader_takes_the_log_of_all_attempts_where_there_is_one(tmp_path: Path) -> None:
    for name, logged in ((step_log.STEPS_FILE, range(5)), ("metrics.jsonl", range(3, 5))):
        lines = [json.dumps({"step": step, "data": {"a": step}}) for step in logged]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    found = read_run([tmp_path])
    assert list(found.steps) == [0, 1, 2, 3, 4] and found.describe_missing() is None


def test_fit_names_the_steps_that_a_log_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {step: 0.3 + 0.4 / (1 + (8 / step) ** 2) for step in range(1, 25) if step not in (7, 9, 10)}
    lines = [json.dumps({"step": step, "data": {"score": score}}) for step, score in scores.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    main(["fit", str(tmp_path), "--x", "steps", "--y", "score"])
    assert "logs steps up to 24 without 7, 9 to 10:" in capsys.readouterr().err
    (tmp_path / step_log.STEPS_FILE).write_text("\n".join(lines[8:]) + "\n")
    main(["fit", str(tmp_path), "--x", "steps", "--y", "score"])
    said = capsys.readouterr().err
    assert "logs steps up to 24 without 1 to 11: scalerl_steps.jsonl has no rows of them" in said
    assert "beside the checkpoints has those" not in said, "it is the file that was read"
    both = [str(tmp_path / name) for name in ("metrics.jsonl", step_log.STEPS_FILE)]
    main(["fit", "--join", *both, "--x", "steps", "--y", "score"])
    assert "logs steps up to 24 without 7, 9 to 10:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("logged", "missing", "named"),
    [
        ([0, 1, 2, 4, 5], [3], "3"),
        ([11, 12, 13, 14], list(range(1, 11)), "1 to 10"),
        ([0, 10, 20, 30], [], ""),  # validations only
        ([5], [], ""),
        ([], [], ""),
        ([1, 2, 5, 6, 7, 9], [3, 4, 8], "3 to 4, 8"),
    ],
)
def test_missing_steps(logged: list[int], missing: list[int], named: str) -> None:
    assert find_missing(logged) == missing and name_steps(missing) == named
