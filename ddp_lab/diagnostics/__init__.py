"""Why ranks do not come on: what each of them does, and who waits for whom."""
