"""What speculation would gain, before it is deployed: theory, measured costs, and a planner that joins them."""
