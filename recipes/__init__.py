"""Built-in recipes, one file each; ``attnreg copy NAME FILE`` copies one for you to edit."""
