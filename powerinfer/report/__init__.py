"""What has been found out about a model, for people: a page with plots, and the figures behind it."""
