"""A report on a model's prepared data: a page with plots, and the figures behind it."""
