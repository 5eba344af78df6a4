"""The parts of l2_bench.py: the tiers below two servers, the servers, the checks and the figures."""
