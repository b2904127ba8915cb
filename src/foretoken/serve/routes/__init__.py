"""Routes of the app, by API."""
