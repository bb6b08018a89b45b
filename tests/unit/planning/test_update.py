# SPDX-License-Identifier: Apache-2.0
"""What a plan says of a weight update: its bytes and times, beside what was recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.rows import read_rows
from scalerl_verl.cli import main
from scalerl_verl.planning.update import BUS_BYTES_S, NVLINK_BYTES_S, Update
from tests.unit.planning.test_command import RUN, SYNC, plan

TWO_GPUS = Update(4e9, 1, 1, 1, 1, "device", 40e9)


def recorded(metric: str, hidden: int) -> float:
    """Median over the runs with long responses, one trainer and one generator, of verl's and vLLM's own front ends."""
    rows = [
        row["p50"]
        for row in read_rows("pipeline")
        if row["metric"] == metric
        and row["impl"] == "pipeline_rl keep"
        and row["case"]["hidden"] == hidden
        and row["case"]["regime"] == "generation-bound"
        and row["commit"].startswith("d81f176")
    ]
    assert rows, "the rows that the constants come from are gone"
    return float(sorted(rows)[len(rows) // 2])


@pytest.mark.parametrize("hidden", [1024, 2048])
def test_times_are_those_of_the_runs_that_they_were_fitted_to(hidden: int) -> None:
    """Within a tenth: the difference between two runs of the same size, recorded in the same rows."""
    update = replace(TWO_GPUS, sent_bytes=recorded("sent_gib", hidden) * 2**30)
    assert update.within_host
    assert update.blocked_s == pytest.approx(recorded("update_s", hidden), rel=0.1)
    assert update.pause_s == pytest.approx(recorded("pause_s", hidden), rel=0.1)


def test_slower_of_gathering_and_sending_counts() -> None:
    """Two nodes of 8 that train: each lacks half, which 8 cards bring; one card sends unless others relay."""
    update = Update(16e9, 16, 8, 64, 1, "device", 5e9)
    assert not update.within_host
    assert update.gather_bytes_s == 8 * 5e9 / 0.5 and update.send_bytes_s == 8 * 5e9
    assert replace(update, trainers=2, trainers_per_node=1).send_bytes_s == 5e9
    assert replace(update, network_bytes_s=1e12).send_bytes_s == NVLINK_BYTES_S
    slow = replace(update, trainers_per_node=1)
    assert slow.gather_bytes_s == pytest.approx(5e9 * 16 / 15)
    assert slow.blocked_s - slow.swap_s == pytest.approx(16e9 / 5e9, rel=0.1)


def test_staging_says_who_stands_still_for_what() -> None:
    device, host, none = (replace(TWO_GPUS, staging=name) for name in ("device", "host", "none"))
    assert host.send_bytes_s == BUS_BYTES_S and host.pause_s > device.pause_s
    assert none.pause_s == none.blocked_s > host.pause_s
    assert replace(host, ranks=8).pause_s < host.pause_s, "a rank loads its part only"


def test_plan_prints_the_update(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = plan(capsys, *RUN)
    assert found["update"]["sent_gib"] == 15.26 and 0 < found["update"]["pause_s"] < found["update"]["blocked_s"]
    _, slower = plan(capsys, *RUN, "--network-gbs", "1")
    assert slower["update"]["blocked_s"] > found["update"]["blocked_s"]
    main(["plan", *RUN])
    assert "15.26 GiB to every generator at 40 GB/s a network card" in capsys.readouterr().out
    assert plan(capsys, *SYNC, "trainer.nnodes=2")[1]["update"] is None


def test_network_has_to_be_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *RUN, "--network-gbs", "0"]) == 1
    assert "network_gbs=0" in capsys.readouterr().err
