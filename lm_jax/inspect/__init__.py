"""A thin layer over `forward` for notebooks: run a text, read it, change a component, ask again."""
