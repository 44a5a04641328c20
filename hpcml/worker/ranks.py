"""From the place of this node in the job to the variables that every rank finds."""

import os
import socket
from typing import NamedTuple


class Node(NamedTuple):
    """Where this worker stands among the nodes of its task."""

    rank: int
    of: int
    master_address: str


def this_node() -> Node:
    """The node as the batch script described it (``HPCML_NODE_*``); one node without."""
    return Node(
        rank=int(os.environ.get("HPCML_NODE_RANK", "0")),
        of=int(os.environ.get("HPCML_NODE_COUNT", "1")),
        master_address=os.environ.get("HPCML_MASTER_ADDR", "127.0.0.1"),
    )


def free_port() -> int:
    """A TCP port that nobody listens on now, proved by binding it."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def rank_environment(
    node: Node, local_rank: int, processes: int, master_port: int
) -> "dict[str, str]":
    """The variables of one rank, as torch.distributed's ``env://`` expects them.

    Args:
        node: the place of this node.
        local_rank: 0 to ``processes`` - 1 on this node.
        processes: ranks per node.
        master_port: the port of rank 0.
    """
    return {
        "RANK": str(node.rank * processes + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(node.of * processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "NODE_RANK": str(node.rank),
        "MASTER_ADDR": node.master_address,
        "MASTER_PORT": str(master_port),
    }
