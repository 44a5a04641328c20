"""The engines, a module each, imported when one is made."""
