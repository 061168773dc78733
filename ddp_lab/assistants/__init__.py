"""Tools for assistants, over the Model Context Protocol: what a cluster does, why it hangs, what its training costs.

[Note: how an assistant reaches a cluster]
An assistant starts `ddp-lab mcp` and talks to it through its standard input and output (`stdio`). The cluster belongs
to a notebook's kernel, which serves tools once the user asks for that (`kernel_server`): on a thread of its own, behind
a Unix socket in a private folder, to holders of a random token. `ddp-lab mcp` finds the socket through an entry in
Jupyter's runtime folder (`rendezvous`) and passes calls on. So nothing listens on a port, another machine is reached
with `ssh host ddp-lab mcp`, and a detached cluster is served by the notebook that is attached to it: attaching here
would take it away from that notebook. A recorded run needs no kernel: `ddp-lab mcp --recording` reads its files.

`timeline_tools` and `cluster_tools` know neither the protocol nor sockets; `protocol` alone uses the `mcp` library.
"""

__all__ = ["kernel_server", "stdio"]
