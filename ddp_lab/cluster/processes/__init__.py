"""Where ranks run and how they are started, here and on other hosts."""

__all__ = [
    "devices",
    "host_commands",
    "host_processes",
    "hosts",
    "keeper",
    "launchers",
    "process_watch",
    "remote_launchers",
    "startup",
    "zygote",
]
