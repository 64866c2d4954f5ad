"""The report of an audit: the page, its sections and figures, and the terminal's summary."""
