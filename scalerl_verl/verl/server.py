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
        why="The policy's vLLM servers are of our class in runs with our names; reward models and teachers get verl's.",
        sources=("25b47c8795c668ea249d40841efe75f37601ba958ae34eb1e0af86623387a656",),
        removal=_REMOVAL,
        late_ok=True,
    ),
    override(
        "server.replica_init",
        _SERVER,
        "vLLMReplica.__init__",
        "003ee2531fcf2a7d480aed7c251cc572d16caa0a0993b5394632d0e8c7801812",
        "It names the class of the server that a replica launches.",
        _REMOVAL,
    ),
    override(
        "server.post_init",
        _SERVER,
        "vLLMHttpServer._post_init",
        "f2b44f41fc9f82058f6ab7d2a1f34ce57109579c7fff620fc67d12a801c9ba0e",
        "The end of the server's constructor, where ours begins.",
        _REMOVAL,
    ),
    override(
        "server.run",
        _SERVER,
        "vLLMHttpServer.run_server",
        "613b6ecbf0b57f5a23cdb3e098c4eb0c5de0b2b0c2efed91f141b7ace58973c7",
        "vLLM's engine processes are no Ray actors: their server has to fetch what they measured for the driver.",
        _REMOVAL,
    ),
    override(
        "server.extension",
        _SERVER,
        "vLLMHttpServer._get_worker_extension_cls",
        "9930d3b46be73f1e5f62a3e3baab3a0d7ef7625dc9331717b45d93f9346b10bb",
        "verl's extension of vLLM's worker is a class that a server names.",
        _REMOVAL,
    ),
    override(
        "server.generate",
        _SERVER,
        "vLLMHttpServer.generate",
        "9c9bd3b936eb3a768c604f615827bd88e6782bdd70ccbf0694d492442b7f9def",
        "The fast front end adds parameters to a request, and counts on what is read of its outputs.",
        _REMOVAL,
    ),
    override(
        "server.admission",
        _SERVER,
        "vLLMHttpServer.abort_all_requests",
        "d7bc504314c80115eecd9e72ffc6fa5ca637e4e96914f2b69dc09c690224238f",
        "It waits for requests on their way into the engine; a pipeline run calls it by mistake only.",
        _REMOVAL,
    ),
    override(
        "server.abort",
        _SERVER,
        "vLLMHttpServer.abort_request",
        "c4068e6de436d16649cca1495eb95b61039d5d88cc7b8f62c429db45e6d077cf",
        "A pipeline run aborts by its own ids, which vLLM's engine does not know.",
        _REMOVAL,
    ),
    override(
        "server.global_steps",
        _SERVER,
        "vLLMHttpServer.set_global_steps",
        "670afc66e06418b9f91ec7188f4ead706de4dbdb5033b9fbf7f5ed5e9521a719",
        "A pipeline run sets the version together with everything that depends on it.",
        _REMOVAL,
    ),
    override(
        "server.kv_cache",
        _SERVER,
        "vLLMHttpServer.clear_kv_cache",
        "756f14e6a5ff2fd03f61398f7dc9cdfc4b0215731fc4b8439c2cd2af84fb72d1",
        "A pipeline run keeps the KV of requests over a weight update.",
        _REMOVAL,
    ),
    override(
        "server.concurrency",
        _REPLICA,
        "RolloutReplica.max_concurrency",
        "04d56f3da873ee045b24de799195f260cd979926ddf0165162df315bebb5cc60",
        "Control calls of a pipeline run must not wait behind requests.",
        _REMOVAL,
    ),
    override(
        "server.worker_class",
        _REPLICA,
        "RolloutReplica.get_ray_class_with_init_args",
        "74bd961d5572886eb4cc7e80eaf3c33e37ecec4e7f06ac550dcf9a8dad4e09c0",
        "Workers of a pipeline run stage weights before they load them.",
        _REMOVAL,
    ),
    override(
        "server.load",
        "verl.workers.rollout.vllm_rollout.utils",
        "vLLMColocateWorkerExtension.update_weights_from_ipc",
        "5d2e492bbd1110bbab3487c37b1c329e89ac4970712a2926688ce0f22fcf6149",
        "A pipeline run has the weights in the generator's memory before it pauses; verl's worker can load only what "
        "comes over its socket during the pause.",
        _REMOVAL,
    ),
    override(
        "server.manager",
        "verl.workers.rollout.llm_server",
        "LLMServerManager.__init__",
        "01dc40bb20715717ee952d5d7fef198413bb4f10811231a32f853fc82a7c5c73",
        "It takes the class of replicas from an attribute, by which a pipeline run names its own.",
        _REMOVAL,
    ),
)
