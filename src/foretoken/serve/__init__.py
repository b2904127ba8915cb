"""The server: OpenAI's API over one engine, with what speculation did in every answer."""
