"""Recipes: each one file that reads from top to bottom; ``attnreg copy NAME FILE`` gives you one to edit."""
