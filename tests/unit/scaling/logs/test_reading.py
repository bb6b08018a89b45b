# SPDX-License-Identifier: Apache-2.0
"""Every format gives the same curve; attempts at one run are joined; what cannot be read says so."""

from __future__ import annotations

import sys
import time

import pytest

from scalerl_verl.scaling.logs.reading import read_run
from scalerl_verl.scaling.logs.segments import ReadError, Segment, join
from scalerl_verl.scaling.logs.selection import choose_curve
from scalerl_verl.scaling.logs.wandb_runs import read_leveldb_log
from tests.unit.scaling.logs.conftest import make_metrics, write_jsonl


def write_tensorboard(folder, metrics):
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(folder))
    for step, data in metrics.items():
        for name, value in data.items():
            writer.add_scalar(name, value, step)
    writer.close()


def write_wandb_export(path, metrics):
    names = sorted({name for data in metrics.values() for name in data})
    header = ["Step", *[f"tiny - {name}{end}" for name in names for end in ("", "__MIN", "__MAX")]]
    lines = [",".join(f'"{name}"' for name in header)]
    for step, data in metrics.items():
        cells = [f'"{data[name]}"' if name in data else '""' for name in names for _ in range(3)]
        lines.append(",".join([f'"{step}"', *cells]))
    path.write_text("\n".join(lines))


def write_parquet(path, metrics):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame([{"step": step, **data} for step, data in metrics.items()]).to_parquet(path)


@pytest.mark.parametrize("kind", ["jsonl", "tensorboard", "wandb export", "parquet"])
@pytest.mark.parametrize("x", ["gpu_hours", "tokens", "steps"])
def test_formats_give_the_same_curve(kind, x, tmp_path):
    metrics = make_metrics()
    if kind == "jsonl":
        write_jsonl(tmp_path / "metrics.jsonl", metrics)
    elif kind == "tensorboard":
        write_tensorboard(tmp_path / "tensorboard", metrics)
    elif kind == "wandb export":
        write_wandb_export(tmp_path / "export.csv", metrics)
    else:
        write_parquet(tmp_path / "run.parquet", metrics)
    curve = choose_curve(read_run([tmp_path]), x=x)
    steps = range(2, 41, 2)
    assert curve.steps == tuple(steps) and curve.start == pytest.approx(0.3)
    values = {"gpu_hours": [0.5 + s for s in steps], "tokens": [1000.0 * s for s in steps], "steps": list(steps)}
    assert curve.compute == pytest.approx(values[x])
    assert curve.score == pytest.approx([metrics[s]["scalerl/validation/pass_rate"] for s in steps], abs=1e-6)
    assert curve.stderr == pytest.approx([0.01] * 20)


def resumed(tmp_path):
    """Attempt 1 reaches step 25 and dies; attempt 2 resumes step 20, with other scores."""
    first = make_metrics(25)
    second = {step: data for step, data in make_metrics(40, A=0.7).items() if step >= 21}
    return first, second, {**{s: d for s, d in first.items() if s <= 21}, **second}


@pytest.mark.parametrize("way", ["two files", "one file", "a folder"])
def test_attempts_at_one_run_are_joined(way, tmp_path):
    first, second, expected = resumed(tmp_path)
    if way == "one file":
        text = "".join(write_jsonl(tmp_path / n, m).read_text() for n, m in (("1.jsonl", first), ("2.jsonl", second)))
        (tmp_path / "both.jsonl").write_text(text)
        paths = [tmp_path / "both.jsonl"]
    else:
        paths = [write_jsonl(tmp_path / "run" / f"{n}.jsonl", m) for n, m in (("b", first), ("a", second))]
        paths = [tmp_path / "run"] if way == "a folder" else paths
    run = read_run(paths)
    assert run.series("scalerl/validation/pass_rate") == {
        step: data["scalerl/validation/pass_rate"]
        for step, data in expected.items()
        if "scalerl/validation/pass_rate" in data
    }
    assert choose_curve(run, "tokens").compute == tuple(1000.0 * step for step in range(2, 41, 2))


def test_tensorboard_attempts_are_ordered_by_time(tmp_path):
    first, second, _ = resumed(tmp_path)
    write_tensorboard(tmp_path, first)
    time.sleep(1.1)  # event files are named by the second
    write_tensorboard(tmp_path, second)
    curve = choose_curve(read_run([tmp_path]), "steps")
    assert curve.score[-1] == pytest.approx(second[40]["scalerl/validation/pass_rate"], abs=1e-6)
    assert curve.steps[-1] == 40


def test_steps_after_the_resumed_checkpoint_are_dropped():
    joined = join([Segment({1: {"a": 1}, 2: {"a": 2}, 3: {"a": 3}, 4: {"a": 4}}), Segment({3: {"a": 30}})])
    assert joined == {1: {"a": 1}, 2: {"a": 2}, 3: {"a": 30}}


def test_validation_of_the_resumed_checkpoint_joins_its_step():
    joined = join([Segment({1: {"a": 1}, 2: {"a": 2, "b": 5}}), Segment({2: {"val": 0.5}, 3: {"a": 3}})])
    assert joined == {1: {"a": 1}, 2: {"a": 2, "b": 5, "val": 0.5}, 3: {"a": 3}}


def test_compute_is_summed_where_there_is_no_ledger(tmp_path):
    metrics = {0: {"val-core/task/acc/mean@4": 0.3}}
    for step in range(1, 5):
        metrics[step] = {"scalerl/data/generated_tokens_sum": 10.0 * step, "perf/total_num_tokens": 7200.0}
        metrics[step] |= {"perf/throughput": 2.0, "val-core/task/acc/mean@4": 0.3 + step / 100}
    run = read_run([write_jsonl(tmp_path / "m.jsonl", metrics)])
    assert choose_curve(run, "tokens").compute == (10.0, 30.0, 60.0, 100.0)
    assert choose_curve(run).x_name == "gpu_hours" and choose_curve(run).compute == (1.0, 2.0, 3.0, 4.0)
    del metrics[2]
    gap = read_run([write_jsonl(tmp_path / "gap.jsonl", metrics)])
    with pytest.raises(ReadError, match="logs no generated tokens"):
        choose_curve(gap, "tokens")
    assert choose_curve(gap).x_name == "steps"


def test_prompt_scores_come_from_validation_dumps(tmp_path):
    metrics = make_metrics(4)
    for step in (0, 2, 4):
        metrics[step]["scalerl/validation/pass_rate"] = 0.75
    write_jsonl(tmp_path / "metrics.jsonl", metrics)
    for step in (0, 2, 4):
        rows = [f'{{"input": "{p}", "score": {s}, "acc": {a}}}' for p, s, a in (("x", 1, 1), ("x", -1, 0), ("y", 1, 1))]
        (tmp_path / "validation").mkdir(exist_ok=True)
        (tmp_path / "validation" / f"{step}.jsonl").write_text("\n".join(rows))
    curve = choose_curve(read_run([tmp_path]))
    assert curve.prompt_scores.tolist() == [[0.5, 0.5], [1.0, 1.0]]
    assert curve.points().prompt_scores.tolist() == [[0.5, 0.5, 0.5], [1.0, 1.0, 1.0]]
    (tmp_path / "validation" / "0.jsonl").unlink()
    without = choose_curve(read_run([tmp_path])).points().prompt_scores
    assert without.tolist() == [[0.75, 0.5, 0.5], [0.75, 1.0, 1.0]]
    (tmp_path / "validation" / "4.jsonl").write_text('{"input": "z", "score": 1, "acc": 1}')
    assert choose_curve(read_run([tmp_path])).prompt_scores is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"step": 1, "data": {}}\nnonsense\n{"step": 2, "data": {}}', "line 2"),
        ("a.jsonl", '{"epoch": 1}\n{"epoch": 2}', "line 1 is not a row of a log, it has epoch"),
        ("a.csv", "", "header"),
        ("a.csv", "compute,score\n1,2,3\n", "line 2 has 3 cells"),
        ("a.csv", "compute,score\n", "no rows"),
        ("a.csv", "hours,score\n1,0.5\n", "no column compute"),
        ("a.txt", "hello", "unknown kind"),
        ("a.wandb", "hello", "no W&B run file"),
        ("a.csv", 'Step,"one - acc","two - acc"\n1,2,3\n', "several runs"),
    ],
)
def test_what_cannot_be_read_says_why(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ReadError, match=message):
        choose_curve(read_run([tmp_path / name]))


def test_missing_and_empty_folders_say_what_is_expected(tmp_path):
    with pytest.raises(ReadError, match="does not exist"):
        read_run([tmp_path / "nothing"])
    with pytest.raises(ReadError, match="holds no log"):
        read_run([tmp_path])
    with pytest.raises(ReadError, match="no files"):
        read_run([])


def test_torn_last_line_is_left_out(tmp_path):
    path = write_jsonl(tmp_path / "m.jsonl", make_metrics(6))
    path.write_text(path.read_text()[:-20])
    assert max(read_run([path]).steps) == 5


@pytest.mark.parametrize(
    ("missing", "name"),
    [
        ("tensorboard.backend.event_processing.event_file_loader", "tensorboard"),
        ("wandb.proto.wandb_internal_pb2", "wandb"),
    ],
)
def test_missing_package_is_named(missing, name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    path = tmp_path / ("events.out.tfevents.1" if name == "tensorboard" else "run-1.wandb")
    path.write_bytes(b":W&B123")
    with pytest.raises(ReadError, match=f"pip install {name}"):
        read_run([path])


def test_leveldb_log_puts_split_records_together(tmp_path):
    def chunk(data, kind):
        return b"\0\0\0\0" + len(data).to_bytes(2, "little") + bytes([kind]) + data

    block = 32768
    head = b":W&B\0\0\0" + chunk(b"whole", 1)
    filler = block - len(head) - 7 - 7 - 3
    body = head + chunk(b"a" * filler, 1) + chunk(b"fir", 2)
    assert len(body) == block
    path = tmp_path / "x.wandb"
    path.write_bytes(body + chunk(b"st and last", 4) + chunk(b"cut off", 1)[:-3])
    assert list(read_leveldb_log(path)) == [b"whole", b"a" * filler, b"first and last"]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ("flops", None, "logs no model FLOPs"),
        ("scalerl/compute", None, "fits 2 metrics"),
        ("gpu_hurs", None, "did you mean"),
        (None, "no such thing", "has no metric no such thing; It has"),
    ],
)
def test_wrong_names_say_what_there_is(x, y, message, run_dir):
    with pytest.raises(ReadError, match=message):
        choose_curve(read_run([run_dir]), x, y)


def test_score_by_part_of_its_name_and_several_scores(tmp_path):
    metrics = {step: {"val-core/a/acc/mean@4": 0.4, "val-core/b/acc/mean@4": 0.5} for step in range(3)}
    run = read_run([write_jsonl(tmp_path / "m.jsonl", metrics)])
    with pytest.raises(ReadError, match=r"several validation scores.*val-core/a"):
        choose_curve(run)
    assert choose_curve(run, y="core/b").y_name == "val-core/b/acc/mean@4"
