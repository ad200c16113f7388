"""Small models, settings, batches and params files, for tests and benchmarks. Imports neither of them."""
