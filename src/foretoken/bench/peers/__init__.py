"""The systems of the race: what each supports, where it is installed, and the processes that run it."""
