"""Scripts that measure the engine, by question; README.md says which answers what. Run from the repository root."""
