"""Models from folders, GGUF files and the package itself."""
