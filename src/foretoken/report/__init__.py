"""HTML pages that open offline: plans, audits, races, simulations, and texts token by token."""
