"""The events of a training, as the notebook has them: live or recorded, as tables and in words."""
