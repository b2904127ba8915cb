"""The server: OpenAI's API over one engine, with statistics of speculation in every answer."""
