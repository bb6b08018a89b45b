# SPDX-License-Identifier: Apache-2.0
"""Files of ours that cannot be written in the middle of a run: a warning, said once, and training goes on.

Files and errors are real: a file in place of a folder, and /dev/full, on which every write finds the disk full.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scalerl_verl import bookkeeping
from scalerl_verl.advantage import length_step
from scalerl_verl.curriculum import DroppedPrompt, EpochChange, ResamplingRules
from scalerl_verl.curriculum.drop_list import DropList
from scalerl_verl.json_lines import read_records
from scalerl_verl.ledger import step_log
from scalerl_verl.ledger import verl as compute
from scalerl_verl.scaling.logs.segments import STEPS_FILE
from scalerl_verl.upstream import status
from scalerl_verl.upstream.activation import STATUS_DIR_ENV
from tests.unit.ledger.test_compute import StubTrainer, priced, start  # noqa: F401 - a fixture

FULL = Path("/dev/full")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of files since the last call."""
    found = [record.getMessage() for record in caplog.records if record.name == bookkeeping.logger.name]
    caplog.clear()
    return found


def test_training_goes_on_where_no_file_of_ours_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the folder is gone, or the disk full, and the run ends after the step in the compute log."""
    trainer = start(tmp_path)
    folder = tmp_path / "checkpoints"
    folder.write_text("")
    # verl's own goes elsewhere (async_save, a disk of its own).
    monkeypatch.setattr(StubTrainer, "_save_checkpoint", lambda self: None)
    for step in range(1, 4):
        metrics = trainer.train_step([True, True, False], save=True)
        assert metrics["scalerl/compute/steps"] == step and metrics["scalerl/compute/generated_tokens"] == 15 * step
    said = warnings_of(caplog)
    assert len(said) == len(set(said)), "once per file and cause"
    for name in (compute.STATE_FILE, compute.LOG_FILE, length_step.STATE_FILE, step_log.STEP_FILE, STEPS_FILE):
        (line,) = [line for line in said if line.startswith(f"{name} cannot be written (")]
        assert "training goes on" in line and str(folder) in line
    folder.unlink()
    trainer.train_step([True, True, False])
    (state,) = read_records(folder / compute.LOG_FILE)
    assert state["totals"]["steps"] == 4 and state["totals"]["generated_tokens"] == 60, "nothing is lost of the count"
    assert [row["step"] for row in read_records(folder / STEPS_FILE)] == [1, 2, 3, 4]


def test_full_disk_in_between_leaves_whole_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = start(tmp_path)
    trainer.train_step([True, True, False])
    log = tmp_path / "checkpoints" / compute.LOG_FILE
    kept = log.rename(log.with_name("kept"))
    log.symlink_to(FULL)
    trainer.train_step([True, True, False])
    (line,) = warnings_of(caplog)
    assert f"No space left on device: '{log}'" in line
    log.unlink()
    kept.rename(log)
    trainer.train_step([True, True, False])
    assert [state["totals"]["steps"] for state in read_records(log)] == [1, 3]
    assert start(tmp_path, trainer__resume_mode="auto").train_step([True] * 3)


def test_epoch_begins_where_the_drop_list_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "curriculum.jsonl"
    drops = DropList(path, ResamplingRules(), lambda _: {})
    change = [EpochChange(n, (DroppedPrompt("a", 9, 10, 1),), (), (), 3, 1) for n in range(1, 5)]
    drops.epoch_began(change[0])
    kept = path.rename(tmp_path / "kept")
    path.symlink_to(FULL)
    drops.epoch_began(change[1])
    drops.epoch_began(change[2])
    (line,) = warnings_of(caplog)
    assert line.startswith("curriculum.jsonl cannot be written (") and "No space left on device" in line
    path.unlink()
    drops.resumed(3)
    kept.rename(path)
    drops.epoch_began(change[3])
    assert [row["epoch"] for row in read_records(path) if row["event"] == "epoch"] == [1, 4]


def test_alarm_s_window_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that was cut would refuse to be read when the run resumes."""
    trainer = start(tmp_path)
    length_step.save_alarm(trainer.scalerl.alarm, trainer.config, str(tmp_path))
    before = (tmp_path / length_step.STATE_FILE).read_bytes()
    part = tmp_path / f"{length_step.STATE_FILE}.part"
    part.symlink_to(FULL)
    trainer.scalerl.alarm.observe(1, 2)
    length_step.save_alarm(trainer.scalerl.alarm, trainer.config, str(tmp_path))
    assert (tmp_path / length_step.STATE_FILE).read_bytes() == before


def test_process_whose_status_cannot_be_written_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(STATUS_DIR_ENV, str(tmp_path / "file"))
    status.record()
    status.record()
    (line,) = warnings_of(caplog)
    assert line.startswith(f"SCALERL_VERL_STATUS_DIR={tmp_path}/file cannot be written (")
