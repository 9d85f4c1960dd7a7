"""What several benches share: clusters of their own, engines without a GPU, baselines, and tables of results."""
