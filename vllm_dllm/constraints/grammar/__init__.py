"""Schemas, expressions and structural tags as regular languages."""
