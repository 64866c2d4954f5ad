"""Pictures of pages and of docs, taken with Chromium."""
