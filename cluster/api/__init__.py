"""What crosses a process border. Standard library only; every other package may import it, it imports none."""
