"""Audits: find devices that compute wrongly without an error."""
