"""Which deaths a run survives as it is set up, in one line. Pure."""

from __future__ import annotations

from paceline.settings import Settings
from paceline.strategies import find, split_codec
from paceline.tensors.codecs import TABLE, read


def words(settings: Settings, machine: str) -> str:
    """`machine` is the name of the one on which the run was started.

    >>> words(Settings(checkpoint_every=100), "node-1")
    'any process of this run may die; if the machine does, `paceline resume` goes on from a checkpoint'
    >>> print(words(Settings(servers=1, checkpoint_every=100), "node-1"))
    any process of this run may die; after a server's death it goes back to its newest checkpoint (--servers 2 spares it that); if the machine does, `paceline resume` goes on from a checkpoint
    >>> print(words(Settings(listen="10.0.0.1", strategy="allreduce+int8", checkpoint_every=100, store="etcd://e"), "node-1"))
    any process and any machine of this run may die; after a worker's death it goes back to its newest checkpoint, which each machine has in memory: nobody else has what allreduce+int8 keeps for its slots (+bf16 spares it that); if all do, `paceline resume` goes on from a checkpoint
    >>> print(words(Settings(listen="10.0.0.1", servers=2, strategy="ssp:3+int8", store="etcd://e"), "node-1"))
    any process and any machine of this run may die; what ssp:3+int8 has kept for a worker is lost with it; if all do, it is lost: give --checkpoint-every N
    >>> print(words(Settings(listen="10.0.0.1", strategy="local:20", on_death="drop"), "node-1"))
    any process of this run may die, and any machine but node-1; the run ends if node-1 dies (give --store etcd://…); then it is lost: give --checkpoint-every N
    >>> print(words(Settings(listen="10.0.0.1", strategy="local:20", store="etcd://e"), "node-1"))
    any process and any machine of this run may die; a lost machine's replicas go on on another one from their copies, unless a second one is lost before these are made again; if all do, it is lost: give --checkpoint-every N
    >>> print(words(Settings(listen="10.0.0.1", strategy="local:20", store="etcd://e", state_copies=False), "node-1"))
    any process of this run may die; the run ends if a machine does, which has the states of its replicas (leave --no-state-copies out); then it is lost: give --checkpoint-every N
    >>> print(words(Settings(servers=2, replicas=1), "node-1"))
    any process of this run may die; after a server's death it begins again from the start (--replicas 2 spares it that); if the machine does, it is lost: give --checkpoint-every N
    >>> print(words(Settings(servers=2, strategy="federated:sample=8,quorum=6", checkpoint_every=5), "node-1"))
    any process of this run may die; if the machine does, `paceline resume` goes on from a checkpoint; time decides who is among the 6 or more of a round, so other bits may come out each time
    """
    from paceline.strategies.federation import quorum_of  # with numpy, which agents that say other things do without

    back = "goes back to its newest checkpoint" if settings.checkpoint_every else "begins again from the start"
    more = more_copies(settings)
    cost = f"; after a server's death it {back} ({more} spares it that)" if more else ""
    entry = find(settings.strategy)
    if settings.listen and keeps(settings) and entry.free:
        cost += f"; what {settings.strategy} has kept for a worker is lost with it"
    elif settings.listen and keeps(settings) and not entry.apart:
        cost += (
            f"; after a worker's death it {back}{', which each machine has in memory' * bool(settings.checkpoint_every)}: nobody "
            f"else has what {settings.strategy} keeps for its slots (+bf16 spares it that)"
        )
    replays = bool(settings.listen) and entry.apart and settings.on_death == "replay"
    if replays and settings.state_copies:
        cost += (
            "; a lost machine's replicas go on on another one from their copies, unless a second one is lost before these are made "
            "again"
        )
    if replays and not settings.state_copies:
        first = (
            "any process of this run may die; the run ends if a machine does, which has the states of its replicas (leave "
            "--no-state-copies out); then"
        )
    elif settings.store:
        first = f"any process and any machine of this run may die{cost}; if all do,"
    elif settings.listen:
        first = (
            f"any process of this run may die, and any machine but {machine}{cost}; the run ends if {machine} dies "
            "(give --store etcd://…); then"
        )
    else:
        first = f"any process of this run may die{cost}; if the machine does,"
    quorum = quorum_of(settings.strategy)
    last = (
        f"; time decides who is among the {quorum} or more of a round, so other bits may come out each time"
        if quorum
        else ""
    )
    if settings.checkpoint_every:
        return f"{first} `paceline resume` goes on from a checkpoint{last}"
    return f"{first} it is lost: give --checkpoint-every N{last}"


def keeps(settings: Settings) -> bool:
    """Whether workers keep what their codec leaves out.

    >>> keeps(Settings(strategy="allreduce+int8")), keeps(Settings(strategy="allreduce+bf16")), keeps(Settings())
    (True, False, False)
    """
    codec = split_codec(settings.strategy)[1]
    return bool(codec) and TABLE[read(codec)[0]].keeps


def after_the_last_copy(settings: Settings, run: str, checkpointed: bool) -> str:
    """What to do after a server's death that took the last copy of something, and from which the run does not go back.

    >>> after_the_last_copy(Settings(servers=1), "mine", checkpointed=True)
    '`paceline resume mine` goes on from the newest checkpoint; with --servers 2 there would have been a second copy'
    >>> after_the_last_copy(Settings(servers=3), "mine", checkpointed=False)
    'it is lost, as no checkpoint was written: give --checkpoint-every N'
    """
    more = more_copies(settings)
    if checkpointed:
        second = f"; with {more} there would have been a second copy" if more else ""
        return f"`paceline resume {run}` goes on from the newest checkpoint{second}"
    return f"it is lost, as no checkpoint was written: give {f'{more} or ' if more else ''}--checkpoint-every N"


def more_copies(settings: Settings) -> str:
    """The flags without which a server's death takes the only copy of what it held; or nothing.

    >>> more_copies(Settings(servers=3, replicas=1)), more_copies(Settings(servers=2)), more_copies(Settings())
    ('--replicas 2', '', '')
    >>> more_copies(Settings(servers=1, strategy="central"))
    '--strategy ps --servers 2'
    """
    if not settings.servers:
        return ""
    short = [f"--{name} 2" for name in ("servers", "replicas") if getattr(settings, name) < 2]
    return " ".join(["--strategy ps", *short] if find(settings.strategy).one else short)
