"""Verdicts as people read them: docs/claims.md and its page, counts for lists, citations on cards, pages of arms."""
