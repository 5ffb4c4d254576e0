"""The HTTP server: OpenAI's API, and llama-server's own routes, over `AsyncLLM`."""
