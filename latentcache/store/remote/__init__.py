"""Caches at URLs: S3, Google Cloud Storage, Azure."""
