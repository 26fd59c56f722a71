"""Whether a run uses a replica's engine: see `core.contract` for what is asked of it.

A replica that waiting cannot help is told so, with what to change, and is to leave. Any other that
is not used stays registered, and the fleet's view says why. It is looked at again when a trainer
comes, whose run may need more slots than the last one's, or fewer, or allow what the last did not.
"""

from __future__ import annotations

import trio

from asyncgrpo_agent.core import replicas
from asyncgrpo_agent.core.contract import Fault, Terms, engine_fault
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.proxy_run import ProxyRun, ReplicaLink
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)


def offer(run_: ProxyRun, here: ReplicaLink, facts: m.EngineFacts) -> m.Refused | None:
    """The replica's engine is up. The refusal, if there is one, ends its registration."""
    here.offered = facts
    fault = _fault(run_, here.replica.name, facts)
    if fault is not None:
        return _refuse(run_, here, fault)
    here.engine = facts
    here.replica.seed_tokens_per_s = facts.tokens_per_s
    run_.note(replicas.engine_up(here.replica, trio.current_time()))
    return None


def withdraw(run_: ProxyRun, here: ReplicaLink, reason: str) -> None:
    """The replica's engine is down."""
    here.engine = here.offered = None
    run_.note(replicas.engine_down(here.replica, reason, trio.current_time()))


def require(run_: ProxyRun, terms: Terms) -> list[tuple[ReplicaLink, m.Refused]]:
    """A trainer has come. Gives the replicas that are to leave, and what to tell them."""
    run_.terms = terms
    leaving = []
    # Those in use first: what they are decides about the others.
    for here in sorted(run_.links.values(), key=lambda link: link.engine is None):
        facts = here.offered
        if facts is None:
            continue
        fault = _fault(run_, here.replica.name, facts)
        if (fault is None) != (here.engine is not None) or (fault and fault.is_final):
            refused = offer(run_, here, facts)
            if refused is not None:
                leaving.append((here, refused))
    return leaving


def _fault(run_: ProxyRun, name: str, facts: m.EngineFacts) -> Fault | None:
    """With the first fault that any engine of its class, which is in use, finds."""
    alike = [
        link.engine
        for other, link in run_.links.items()
        if other != name
        and link.engine is not None
        and link.engine.quantization == facts.quantization
    ]
    faults = (engine_fault(facts, run_.terms, first) for first in (None, *alike))
    return next((fault for fault in faults if fault is not None), None)


def _refuse(run_: ProxyRun, here: ReplicaLink, fault: Fault) -> m.Refused | None:
    replica = here.replica
    log.error("replica.mismatch", run=run_.name, replica=replica.name, reason=fault.text)
    here.engine, loaded = None, replica.loaded
    run_.note(replicas.engine_down(replica, f"refused: {fault.text}", trio.current_time()))
    replica.loaded = loaded  # its vLLM still holds them, should it be taken later
    return m.Refused("permanent", fault.reason, fix=fault.fix) if fault.is_final else None
