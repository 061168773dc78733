"""Objects on their way between processes: by value, in parcels, through shared memory."""
