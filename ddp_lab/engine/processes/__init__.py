"""The processes of a cluster besides its ranks: controller, fork server, keeper, servers on other hosts."""

__all__ = ["parent_watch"]
