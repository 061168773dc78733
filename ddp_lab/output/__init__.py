"""What ranks print and display, as the notebook shows it."""
