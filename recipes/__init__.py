"""Built-in recipes, one per file; ``attnreg copy NAME FILE`` copies a recipe for you to edit."""
