"""`python -m bench serve`: a load generator for any OpenAI-compatible endpoint, and its report."""
