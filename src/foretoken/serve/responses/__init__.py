"""OpenAI's /v1/responses: its request body, its answers and events, and the store of responses."""
