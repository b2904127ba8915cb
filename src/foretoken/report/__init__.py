"""What was measured, as pages that open offline: the plan, the audit, the race, a text token by token."""
