"""Who is raced: what each can do, where it is installed, and the processes that ask it."""
