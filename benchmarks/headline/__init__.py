"""The headline studies: text and images."""
