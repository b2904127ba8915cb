"""Formulas of the papers: acceptance of each verification rule, bounds on it, and speedups that follow from it."""
