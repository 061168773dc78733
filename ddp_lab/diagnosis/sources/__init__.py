"""Where `ddp-lab doctor` looks: files of torch's flight recorder, torch's debug server, processes by py-spy."""

__all__ = ["debug_server", "dump_files", "py_spy"]
