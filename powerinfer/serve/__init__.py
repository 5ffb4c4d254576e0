"""The HTTP server: OpenAI's API, and llama-server's routes for tokens, over `AsyncLLM`."""
