"""Views of a timeline in the notebook; nothing below this package knows that it exists."""
