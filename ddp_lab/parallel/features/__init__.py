"""What a model does when it is asked to: join, mixed precision, delayed parameters, optimizer in backward, compile."""
