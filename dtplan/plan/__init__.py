"""The plan language: data classes, reader with source positions, lint, schema, library. No torch."""
