# SPDX-License-Identifier: Apache-2.0
"""A second plugin, on PYTHONPATH of the end-to-end tests only: records weights on both sides and plants faults.

PROBE_DIR: where ``sent-<n>.pt`` (trainer) and ``held-<n>.pt`` (engine, after the n-th update) go.
PROBE_FAIL_LOAD=n: the engine's n-th weight update raises while it loads.
PROBE_TOGGLES=file: {name: {config key: value}}; once step 1 is trained, its batch is trained again from the weights
    that left, under each change of the config and under the run's own: ``replay.json`` (name -> metrics) and
    ``gradient of <name>.pt``.
PROBE_PROMPTS=1: ``prompts.jsonl`` lists the prompts handed to the generators and those trained, by uid.
PROBE_GATE_STEP=n: what is handed out in step n is not graded before the checkpoint of that step is written (with
    ``gated_score`` of the tests' reward): ``gate.json`` lists its rows meanwhile.
PROBE_DIE_IN_TRANSFER=n: what receives weights for a generator is killed in the middle of its n-th transfer.
PROBE_SLOW_CHECKPOINT=s: a checkpoint takes s seconds longer while there is a file ``slow_checkpoint`` in the folder.
PROBE_SEED=1: a run can be repeated: a response samples by a seed of its group and its number in it, ids of groups are
    counted, and rows are trained in the order of their ids.
PROBE_ROUTING=1: ``routing-<step>.pt`` holds the rows that a step trains, with the experts that the engine chose.
PROBE_HOLD_STEP=n: the run touches ``held`` and waits for ever before step n.
"""
