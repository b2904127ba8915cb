"""Any OpenAI-compatible server seen from outside: requests, answers, and what each kind of server calls things."""
