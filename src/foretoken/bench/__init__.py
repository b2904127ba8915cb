"""Workloads and measurements that the demo and the benchmarks share."""
