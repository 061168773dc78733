"""The processes of a cluster besides its ranks: controller, fork server, keeper, servers on other hosts."""

__all__ = ["fork_server", "parent_watch"]
