"""The notebook's reach into ranks while they train: wire, settings, turns."""
