# SPDX-License-Identifier: Apache-2.0
"""The generator's server: our replica in verl's registry, and what our subclasses override."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from scalerl_verl.errors import PatchError
from scalerl_verl.upstream.spec import PatchSpec, override

_REMOVAL = "verl's servers bring the head's facts, load staged weights and ask vLLM for one answer a request"
_REPLICA = "verl.workers.rollout.replica"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"


def _register(original: Any, module: ModuleType) -> Any:
    """Put our replica in the place of verl's.

    Raises:
        PatchError: somebody else has put one there already.
    """
    theirs = original._registry.get("vllm")
    if theirs is not None and theirs.__module__ not in (module.__name__, __name__):
        raise PatchError(
            f"{theirs.__module__}.{theirs.__qualname__} is registered as the replica 'vllm', where a run with our "
            "names has servers of scalerl_verl: register it under a name of its own, or remove our names from the run"
        )

    def load() -> Any:
        from scalerl_verl.generator.server import ScaleRLReplica

        return ScaleRLReplica

    original.register("vllm", load)
    return original


SPECS = (
    PatchSpec(
        name="verl.server.replica",
        module=_REPLICA,
        target="RolloutReplicaRegistry",
        build=_register,
        kind="register",
        why="In runs that use our names the vLLM servers of the policy are of our class; reward models and teachers "
        "keep verl's.",
        sources=("25b47c8795c668ea249d40841efe75f37601ba958ae34eb1e0af86623387a656",),
        removal=_REMOVAL,
        late_ok=True,
    ),
    override(
        "server.replica_init",
        _SERVER,
        "vLLMReplica.__init__",
        "003ee2531fcf2a7d480aed7c251cc572d16caa0a0993b5394632d0e8c7801812",
        "It names the class of the server that a replica launches; our class takes its place.",
        _REMOVAL,
    ),
    override(
        "server.post_init",
        _SERVER,
        "vLLMHttpServer._post_init",
        "f2b44f41fc9f82058f6ab7d2a1f34ce57109579c7fff620fc67d12a801c9ba0e",
        "verl's constructor of the server ends with it; our subclass adds its own attributes there.",
        _REMOVAL,
    ),
    override(
        "server.run",
        _SERVER,
        "vLLMHttpServer.run_server",
        "613b6ecbf0b57f5a23cdb3e098c4eb0c5de0b2b0c2efed91f141b7ace58973c7",
        "vLLM's engine processes are not Ray actors, so their server fetches what they measured at start and keeps it "
        "for the driver.",
        _REMOVAL,
    ),
    override(
        "server.extension",
        _SERVER,
        "vLLMHttpServer._get_worker_extension_cls",
        "9930d3b46be73f1e5f62a3e3baab3a0d7ef7625dc9331717b45d93f9346b10bb",
        "It names verl's extension class of vLLM's worker; our class takes its place.",
        _REMOVAL,
    ),
    override(
        "server.generate",
        _SERVER,
        "vLLMHttpServer.generate",
        "9c9bd3b936eb3a768c604f615827bd88e6782bdd70ccbf0694d492442b7f9def",
        "The fast front end changes parameters of a request, and relies on which fields of the output verl reads.",
        _REMOVAL,
    ),
    override(
        "server.admission",
        _SERVER,
        "vLLMHttpServer.abort_all_requests",
        "d7bc504314c80115eecd9e72ffc6fa5ca637e4e96914f2b69dc09c690224238f",
        "Our version waits for requests that are entering the engine. In pipeline_rl it must never be called, and "
        "raises.",
        _REMOVAL,
    ),
    override(
        "server.abort",
        _SERVER,
        "vLLMHttpServer.abort_request",
        "c4068e6de436d16649cca1495eb95b61039d5d88cc7b8f62c429db45e6d077cf",
        "pipeline_rl aborts requests by its own ids, which vLLM's engine does not know.",
        _REMOVAL,
    ),
    override(
        "server.global_steps",
        _SERVER,
        "vLLMHttpServer.set_global_steps",
        "670afc66e06418b9f91ec7188f4ead706de4dbdb5033b9fbf7f5ed5e9521a719",
        "It does nothing in pipeline_rl, which sets the version together with everything that depends on it.",
        _REMOVAL,
    ),
    override(
        "server.kv_cache",
        _SERVER,
        "vLLMHttpServer.clear_kv_cache",
        "756f14e6a5ff2fd03f61398f7dc9cdfc4b0215731fc4b8439c2cd2af84fb72d1",
        "It does nothing in pipeline_rl, where running requests keep their KV cache across a weight update.",
        _REMOVAL,
    ),
    override(
        "server.concurrency",
        _REPLICA,
        "RolloutReplica.max_concurrency",
        "04d56f3da873ee045b24de799195f260cd979926ddf0165162df315bebb5cc60",
        "Control calls of pipeline_rl must not wait behind requests.",
        _REMOVAL,
    ),
    override(
        "server.worker_class",
        _REPLICA,
        "RolloutReplica.get_ray_class_with_init_args",
        "74bd961d5572886eb4cc7e80eaf3c33e37ecec4e7f06ac550dcf9a8dad4e09c0",
        "In pipeline_rl the rollout workers are of our class: they receive weights before the engine loads them.",
        _REMOVAL,
    ),
    override(
        "server.load",
        "verl.workers.rollout.vllm_rollout.utils",
        "vLLMColocateWorkerExtension.update_weights_from_ipc",
        "5d2e492bbd1110bbab3487c37b1c329e89ac4970712a2926688ce0f22fcf6149",
        "In pipeline_rl the weights are in the generator's memory before the pause. verl's worker can load only "
        "weights that come over its socket during the pause.",
        _REMOVAL,
    ),
    override(
        "server.manager",
        "verl.workers.rollout.llm_server",
        "LLMServerManager.__init__",
        "01dc40bb20715717ee952d5d7fef198413bb4f10811231a32f853fc82a7c5c73",
        "It takes the class of replicas from an attribute, which pipeline_rl sets to its own class.",
        _REMOVAL,
    ),
)
