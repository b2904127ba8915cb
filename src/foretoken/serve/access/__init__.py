"""Who may use the server: API keys, what each key may do, and how much of it."""
